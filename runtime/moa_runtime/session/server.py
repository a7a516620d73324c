"""The verifier's end of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from moa_runtime.session.handshake import PROTOCOL_VERSION, Limits, digest, fault
from moa_runtime.session.tree import TreeError, chain, check_parents, depths, walk
from moa_runtime.wire.moa.v1 import session_pb2 as wire


@dataclass(frozen=True)
class Sampling:
    """How the target chooses: ``temperature`` 0 is greedy; ``seed`` and the position make the noise.

    ``top_k`` and ``min_p`` (0 for none) are the engine's; the wire does not carry them yet.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0


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
    """One conversation at the verifier. It outlives connections; all it knows of them is their count.

    Only a Prompt or Cancel cuts what is committed. A frame that names an earlier position than the server has reached
    is answered from there, without the engine: what was lost on its way is said once more.

    =============  =========================================  ==========================================
    frame          is taken when                              and then
    =============  =========================================  ==========================================
    Prompt         epoch newer, base_len <= committed         cut, append, Verify
    Prompt         of this epoch: sent again                  a verdict if there is one, else Verify
    Draft          of this epoch, an answer runs there        at the end Verify, before it a verdict
    Cancel         epoch not older                            cut, end the answer
    =============  =========================================  ==========================================

    Frames of an older epoch are dropped; a position that was never reached is the fault OUT_OF_SYNC, and so is a Draft
    of an epoch whose Prompt did not come.

    Memory rows go to a connection once: from those that its Hello says the client holds, or its Prompt, in order.

    Attributes:
        connection: the count of the newest connection.
    """

    def __init__(self, limits: Limits, vocab_size: int, stop_tokens: Sequence[int]) -> None:
        self.limits = limits
        self.committed: list[int] = []
        self._vocab_size = vocab_size
        self._stop_tokens = frozenset(stop_tokens)
        self.connection = 0
        self._epoch = 0
        self._answer_start: int | None = None  # committed length right after the last Prompt
        self._finish: int | None = None  # of the answer that ended, if one did
        self._max_length = 0
        self._sampling = Sampling()
        self._while_away = False
        self._rows_sent = 0  # the client has the rows below, or they are on their way

    def greet(self, hello: wire.Hello, token: str) -> list[wire.ServerMessage]:
        """What a new connection hears: the Welcome, and a verdict on what was decided since the client heard last.

        Args:
            token: of this conversation, for a later Hello.
        """
        resume = hello.resume
        self.connection = max(self.connection, resume.connection)
        agreed = max((mark.length for mark in resume.marks[-2:] if self._has(mark)), default=0)
        self._rows_sent = min(resume.rows, agreed)
        known = resume.marks[-1].length if resume.marks else 0
        goes_on = resume.answering and resume.epoch == self._epoch and 0 < agreed == known
        news = goes_on and self._answer_start is not None and self._answer_start <= known < len(self.committed)
        self._while_away = self._while_away and goes_on
        welcome = wire.Welcome(
            protocol_version=PROTOCOL_VERSION,
            resume_token=token,
            limits=wire.Limits(
                max_context=self.limits.max_context,
                max_draft_tokens=self.limits.max_draft_tokens,
                max_frame_bytes=self.limits.max_frame_bytes,
                idle_seconds=self.limits.idle_seconds,
                chains_only=not self.limits.trees,
                away_seconds=self.limits.away_seconds,
                keep_seconds=self.limits.keep_seconds,
            ),
            committed_length=agreed,
            epoch=self._epoch,
            connection=self.connection,
            verdict_follows=news,
        )
        said = [wire.ServerMessage(welcome=welcome)]
        return [*said, self._known_verdict(known)] if news else said

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

    @property
    def goes_on_alone(self) -> bool:
        """Whether an answer runs that is to be finished while the client is away."""
        return self._while_away and self._answer_start is not None and self._finish is None

    def go_on(self) -> Verify | None:
        """While the client is away: the work for the next token, if there is any."""
        return self._work() if self.goes_on_alone else None

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
            self._finish = finish
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
        rows = range(min(work.rows_from, processed), processed)
        self._rows_sent = max(self._rows_sent, processed)
        return Decision(verdict, rows)

    def _prompt(self, prompt: wire.Prompt) -> Verify | wire.ServerMessage | None:
        end = prompt.base_len + len(prompt.tokens)
        if prompt.epoch < self._epoch:
            return None
        if prompt.epoch == self._epoch and end == self._answer_start:
            return self._known_verdict(end) if end < len(self.committed) else self._work(supplied=len(prompt.tokens))
        problem = self._unreached(prompt.base_len)
        if problem is None and prompt.epoch == self._epoch:
            problem = fault(wire.FAULT_CODE_PROTOCOL, "another Prompt of the same epoch; each begins one of its own")
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
        self._epoch = prompt.epoch
        self._cut(prompt.base_len)
        self._rows_sent = max(self._rows_sent, min(prompt.rows_from, end))
        self.committed += prompt.tokens
        self._answer_start = end
        self._max_length, self._while_away = prompt.max_length, prompt.while_away
        sampling = prompt.sampling
        self._sampling = Sampling(sampling.temperature, sampling.top_p or 1.0, sampling.seed)
        return self._work(supplied=len(prompt.tokens))

    def _draft(self, draft: wire.Draft) -> Verify | wire.ServerMessage | None:
        if draft.epoch < self._epoch:
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
        if self._answer_start is None or draft.base_len < self._answer_start or draft.epoch > self._epoch:
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
        if draft.base_len < len(self.committed):
            return self._known_verdict(draft.base_len, draft.tokens, parents)
        if self._finish is not None:
            return None
        room = self.limits.max_context - draft.base_len
        return self._work(tuple(draft.tokens[:room]), tuple(parents[:room]))

    def _cancel(self, cancel: wire.Cancel) -> wire.ServerMessage | None:
        if cancel.epoch < self._epoch:
            return None
        self._epoch = cancel.epoch
        self._cut(cancel.base_len)
        return None

    def _cut(self, length: int) -> None:
        """No answer runs behind what is left."""
        self._while_away = False
        del self.committed[length:]
        self._rows_sent = min(self._rows_sent, length)
        self._answer_start = self._finish = None

    def _work(self, draft: tuple[int, ...] = (), parents: tuple[int, ...] = (), *, supplied: int = 0) -> Verify:
        return Verify(tuple(self.committed), draft, parents, self._sampling, self._rows_sent, supplied)

    def _known_verdict(
        self, base_len: int, draft: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> wire.ServerMessage:
        """On what is decided already; without memory rows, which the next verdict of the engine brings."""
        tokens, levels = self.committed[base_len:], [0, *depths(parents)]
        path, _ = walk(draft, parents, lambda node: tokens[levels[node]] if levels[node] < len(tokens) else -1)
        finish = wire.Finish.Name(wire.FINISH_UNSPECIFIED if self._finish is None else self._finish)
        verdict = wire.Verdict(epoch=self._epoch, base_len=base_len, tokens=tokens, accepted=len(path), finish=finish)
        return wire.ServerMessage(verdict=verdict)

    def _has(self, mark: wire.Mark) -> bool:
        return mark.length <= len(self.committed) and digest(self.committed[: mark.length]) == mark.digest

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
