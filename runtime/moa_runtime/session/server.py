"""The verifier's end of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from moa_runtime.session.handshake import PROTOCOL_VERSION, Limits, fault
from moa_runtime.session.tree import TreeError, chain, check_parents
from moa_runtime.wire.moa.v1 import session_pb2 as wire


@dataclass(frozen=True)
class Sampling:
    """How the target chooses: ``temperature`` 0 is greedy; ``seed`` keys the generator with the position."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Verify:
    """Work for the engine: run the target over ``draft``, a tree of ``parents`` after ``prefix``.

    ``prefix`` is the whole committed conversation, the last ``supplied`` tokens of it from this frame;
    ``rows_from`` the first memory row that goes to the client.
    """

    prefix: tuple[int, ...]
    draft: tuple[int, ...]
    parents: tuple[int, ...]
    sampling: Sampling
    rows_from: int
    supplied: int = 0


@dataclass(frozen=True)
class Decision:
    """What :meth:`ServerSession.decide` made of the target's choices.

    ``rows`` is the range of positions whose memory rows belong into the verdict.
    """

    verdict: wire.Verdict
    rows: range


def parse_client_message(data: bytes) -> wire.ClientMessage | wire.ServerMessage:
    """A frame from a client, or the fault that answers one that is no message."""
    try:
        message = wire.ClientMessage.FromString(data)
    except DecodeError:
        return fault(wire.FAULT_CODE_PROTOCOL, "the frame is no ClientMessage")
    if message.WhichOneof("event") is None:
        return fault(wire.FAULT_CODE_PROTOCOL, "the ClientMessage holds no event this version knows")
    return message


class ServerSession:
    """One conversation at the verifier. It outlives connections; nothing in it knows of them.

    The client names absolute positions, and the target's choice at a position is a function of the
    tokens before it (greedily, or by a generator keyed with the position). So a frame that names an
    earlier position than the server has reached just truncates: what was lost is decided again, alike.

    =============  =========================================  ==========================================
    frame          is taken when                              and then
    =============  =========================================  ==========================================
    Prompt         epoch not older, base_len <= committed,    truncate, append, Verify
                   not behind what this epoch confirmed
    Draft          the same, and an answer runs there         truncate, Verify
    Cancel         epoch not older                            truncate, end the answer
    =============  =========================================  ==========================================

    Frames of an older epoch of the connection are dropped; a position that was never reached is the fault OUT_OF_SYNC.

    Memory rows that a connection was sent are sent again only where a frame goes back behind them: whatever a Draft or
    Prompt asks for, it gets the row before its position and what follows.
    """

    def __init__(self, limits: Limits, vocab_size: int, stop_tokens: Sequence[int]) -> None:
        self.limits = limits
        self.committed: list[int] = []
        self._vocab_size = vocab_size
        self._stop_tokens = frozenset(stop_tokens)
        self._epoch = 0
        self._confirmed = 0  # the highest base_len seen in this epoch
        self._answer_start: int | None = None  # committed length right after the last Prompt
        self._finished_at: int | None = None
        self._max_length = 0
        self._sampling = Sampling()
        self._rows_sent = 0  # on this connection: the client has the rows below, as far as none was cut

    def welcome(self, resume_token: str) -> wire.ServerMessage:
        """The Welcome of a new connection, on which no memory row was sent yet.

        No frame of an earlier connection can come any more, and the client may be a program that was restored from an
        old snapshot and counts epochs from there: they begin anew.
        """
        self._rows_sent = self._epoch = self._confirmed = 0
        return wire.ServerMessage(
            welcome=wire.Welcome(
                protocol_version=PROTOCOL_VERSION,
                resume_token=resume_token,
                limits=wire.Limits(
                    max_context=self.limits.max_context,
                    max_draft_tokens=self.limits.max_draft_tokens,
                    max_frame_bytes=self.limits.max_frame_bytes,
                    idle_seconds=self.limits.idle_seconds,
                    chains_only=not self.limits.trees,
                ),
                committed_length=len(self.committed),
            )
        )

    def receive(self, message: wire.ClientMessage) -> Verify | wire.ServerMessage | None:
        """Take a Prompt, Draft or Cancel.

        Returns:
            work for the engine (answer it with :meth:`decide` before the next frame), a fault to send,
            or None where nothing is to be done.
        """
        event = message.WhichOneof("event")
        if event == "prompt":
            return self._prompt(message.prompt)
        if event == "draft":
            return self._draft(message.draft)
        if event == "cancel":
            return self._cancel(message.cancel)
        return fault(wire.FAULT_CODE_PROTOCOL, f"a {event or 'empty'} event cannot follow the Hello of a connection")

    def decide(self, work: Verify, path: Sequence[int], token: int, compute_us: int = 0) -> Decision:
        """Commit what the target chose.

        Args:
            work: what :meth:`receive` asked for.
            path: indices into the draft of the tokens that the target accepts.
            token: its own choice behind them.
            compute_us: time the target took, microseconds; for the verdict.
        """
        base_len = len(work.prefix)
        tokens = [work.draft[i] for i in path] + [token]
        finish = wire.FINISH_UNSPECIFIED
        for count, chosen in enumerate(tokens, 1):
            if chosen in self._stop_tokens:
                finish = wire.FINISH_STOP
            elif self._max_length and base_len + count >= self._max_length:
                finish = wire.FINISH_LENGTH
            elif base_len + count >= self.limits.max_context:
                finish = wire.FINISH_CONTEXT
            if finish != wire.FINISH_UNSPECIFIED:
                tokens = tokens[:count]
                break
        accepted = min(len(path), len(tokens))
        self.committed = [*work.prefix, *tokens]
        if finish != wire.FINISH_UNSPECIFIED:
            self._finished_at = len(self.committed)
        verdict = wire.Verdict(
            epoch=self._epoch,
            base_len=base_len,
            tokens=tokens,
            accepted=accepted,
            finish=wire.Finish.Name(finish),
            compute_us=compute_us,
        )
        # A bonus token has no row yet: the target has not processed it.
        processed = base_len + accepted
        self._rows_sent = processed
        return Decision(verdict, range(min(work.rows_from, processed), processed))

    def _prompt(self, prompt: wire.Prompt) -> Verify | wire.ServerMessage | None:
        end = prompt.base_len + len(prompt.tokens)
        # A Prompt of this epoch behind a later Draft is a copy that was delayed on its way.
        if prompt.epoch < self._epoch or (prompt.epoch == self._epoch and end < self._confirmed):
            return None
        problem = self._unreached(prompt.base_len)
        if problem is None and end >= self.limits.max_context:
            problem = fault(
                wire.FAULT_CODE_CONTEXT_FULL,
                f"the conversation would have {end} tokens, "
                f"the target's context holds {self.limits.max_context}; shorten it or begin a new chat",
            )
        if problem is None and not prompt.tokens:
            problem = fault(wire.FAULT_CODE_PROTOCOL, "a Prompt without tokens")
        problem = problem or self._bad_tokens(prompt.tokens)  # last: there may be a million
        if problem is not None:
            return problem
        self._enter(prompt.epoch)
        self.committed = self.committed[: prompt.base_len] + list(prompt.tokens)
        self._answer_start = self._confirmed = len(self.committed)
        self._finished_at = None
        self._max_length = prompt.max_length
        sampling = prompt.sampling
        self._sampling = Sampling(sampling.temperature, sampling.top_p or 1.0, sampling.seed)
        rows_from = self._rows_from(prompt.rows_from, prompt.base_len)
        return Verify(tuple(self.committed), (), (), self._sampling, rows_from, len(prompt.tokens))

    def _draft(self, draft: wire.Draft) -> Verify | wire.ServerMessage | None:
        if draft.epoch < self._epoch:
            return None
        if draft.epoch == self._epoch and draft.base_len < self._confirmed:
            return None
        problem = self._unreached(draft.base_len)
        if problem is None and len(draft.tokens) > self.limits.max_draft_tokens:
            problem = fault(
                wire.FAULT_CODE_TOO_LARGE,
                f"a draft of {len(draft.tokens)} tokens; this verifier takes {self.limits.max_draft_tokens}",
            )
        problem = problem or self._bad_tokens(draft.tokens)
        if problem is not None:
            return problem
        if self._answer_start is None or draft.base_len < self._answer_start:
            return fault(
                wire.FAULT_CODE_OUT_OF_SYNC,
                f"no answer runs at position {draft.base_len}",
                committed_length=min(len(self.committed), draft.base_len),
            )
        try:
            parents = check_parents(draft.parents, len(draft.tokens))
        except TreeError as error:
            return fault(wire.FAULT_CODE_PROTOCOL, str(error))
        if not self.limits.trees and parents != chain(len(parents)):
            return fault(wire.FAULT_CODE_PROTOCOL, "a draft tree; this verifier takes chains only, as its Welcome says")
        if self._finished_at is not None and draft.base_len >= self._finished_at:
            return None
        self._enter(draft.epoch)
        self._confirmed = draft.base_len
        self._finished_at = None
        self.committed = self.committed[: draft.base_len]
        room = self.limits.max_context - draft.base_len
        kept = len(draft.tokens) if len(draft.tokens) < room else room
        rows_from = self._rows_from(draft.rows_from, draft.base_len)
        return Verify(
            tuple(self.committed), tuple(draft.tokens[:kept]), tuple(parents[:kept]), self._sampling, rows_from
        )

    def _cancel(self, cancel: wire.Cancel) -> wire.ServerMessage | None:
        if cancel.epoch < self._epoch:
            return None
        self._enter(cancel.epoch)
        self.committed = self.committed[: cancel.base_len]
        self._answer_start = self._finished_at = None
        return None

    def _enter(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch = epoch
            self._confirmed = 0

    def _rows_from(self, wanted: int, base_len: int) -> int:
        """Of the rows that a frame at ``base_len`` asks for, the first that it can lack and there can be."""
        return min(max(wanted, min(self._rows_sent, base_len - 1)), len(self.committed))

    def _unreached(self, base_len: int) -> wire.ServerMessage | None:
        if base_len <= len(self.committed):
            return None
        return fault(
            wire.FAULT_CODE_OUT_OF_SYNC,
            f"position {base_len} was named, this conversation has {len(self.committed)} tokens",
            committed_length=len(self.committed),
        )

    def _bad_tokens(self, tokens: Sequence[int]) -> wire.ServerMessage | None:
        worst = max(tokens, default=0)
        if worst < self._vocab_size:
            return None
        return fault(wire.FAULT_CODE_PROTOCOL, f"token {worst} is outside the vocabulary of {self._vocab_size}")
