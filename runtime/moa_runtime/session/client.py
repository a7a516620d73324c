"""The device's end of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moa_runtime.session.client_table import Call
from moa_runtime.session.events import Origin, Policy, Sampling, SessionEvent
from moa_runtime.session.exchange import Exchange
from moa_runtime.session.handshake import Fingerprints
from moa_runtime.session.link import LinkState
from moa_runtime.session.outgoing import Outgoing
from moa_runtime.session.snapshot import Snapshot
from moa_runtime.session.state import LocalProtocolError
from moa_runtime.wire.moa.v1 import session_pb2 as wire

__all__ = ["ClientSession", "LinkState", "LocalProtocolError"]


class ClientSession(Exchange):
    """Committed prefix, supplied tokens of a prompt under way, tentative suffix; and the link's state.

    The application adds tentative tokens with :meth:`extend` whenever its drafter has some, calls
    :meth:`propose` when it wants them verified, hands in what arrives (:meth:`receive`) and sends what
    :meth:`frames_to_send` holds. Going offline changes nothing but that nothing is sent: the suffix grows.

    What a call does in which state, and what an arriving frame: :mod:`~moa_runtime.session.client_table`.

    What it knows of the conversation, and the calls that concern it alone: :mod:`~moa_runtime.session.state`. Whose
    turn it is: :mod:`~moa_runtime.session.link`. The frames: :mod:`~moa_runtime.session.exchange`.

    Args:
        vocab_size: of the target: ids from there on are refused.
    """

    def __init__(
        self,
        fingerprints: Fingerprints,
        *,
        stop_tokens: Sequence[int],
        policy: Policy = Policy.ROLLBACK,
        row_encoding: int = wire.ROW_ENCODING_INT8,
        vocab_size: int = 1 << 32,
    ) -> None:
        super().__init__(fingerprints, stop_tokens, policy, row_encoding, vocab_size)

    def prompt(
        self, tokens: Sequence[int], sampling: Sampling, max_new_tokens: int = 0, *, while_away: bool = True
    ) -> None:
        """Add the client's own tokens (the user's turn) and ask for an answer; works offline too.

        Args:
            max_new_tokens: the answer's length limit, 0 for none.
            while_away: whether the server may finish the answer while there is no link.

        Raises:
            LocalProtocolError: an answer still runs, or there are no tokens.
        """
        self._check(Call.PROMPT)
        if not tokens:
            raise LocalProtocolError("a prompt needs at least one token")
        self._supplied, self._kept = list(tokens), 0
        self._sampling = sampling
        self._answer_start = len(self.committed) + len(tokens)
        self._max_length = self._answer_start + max_new_tokens if max_new_tokens else 0
        self._while_away = while_away
        self._answer_supplied()

    def continue_answer(
        self,
        tokens: Sequence[int],
        answer_start: int,
        sampling: Sampling,
        max_new_tokens: int = 0,
        *,
        while_away: bool = True,
    ) -> None:
        """Have an answer that has ended go on, as if its limit had been larger; works offline too.

        Args:
            tokens: what follows the committed ones, up to the answer's end; perhaps none.
            answer_start: the position of its first token.
            max_new_tokens: by how many it may become longer, 0 for no limit.
            while_away: as for :meth:`prompt`.

        Raises:
            LocalProtocolError: an answer still runs, or this one has no tokens.
        """
        self._check(Call.CONTINUE)
        if not 0 < answer_start < len(self.committed) + len(tokens):
            raise LocalProtocolError(f"can't continue an answer from {answer_start} on: it has no tokens")
        self.committed += tokens
        self._sampling, self._while_away = sampling, while_away
        self._answer_start = answer_start
        self._max_length = len(self.committed) + max_new_tokens if max_new_tokens else 0
        self.answering = True
        # As after a server lost an answer that ran: it is given what it lacks, and decides what follows.
        self._replay()

    def extend(self, tokens: Sequence[int], origin: Origin) -> None:
        """Append what the drafter wrote; ``origin`` is DRAFTED or OFFLINE.

        Raises:
            LocalProtocolError: no answer runs.
        """
        self._check(Call.EXTEND)
        self._tentative += tokens
        self._origins += [origin] * len(tokens)

    def cancel(self) -> list[SessionEvent]:
        """End the answer where the target has confirmed it; a prompt the server has not answered is
        taken back."""
        events = self._drop_tentative()
        self._supplied, self._kept = [], 0
        self.answering = False
        self._outgoing.begin_epoch(len(self.committed))
        if self.link is LinkState.UP:
            self._outgoing.cancel(len(self.committed))
            self._server_length = min(self._server_length, len(self.committed))
        return events

    def rewind(self, length: int) -> None:
        """Forget committed tokens from position ``length`` on: the next prompt continues from there.

        Nothing is sent: a Prompt names the position that it continues from.

        Raises:
            LocalProtocolError: an answer runs, or fewer tokens are committed.
        """
        self._check(Call.REWIND)
        if not 0 <= length <= len(self.committed):
            raise LocalProtocolError(f"can't rewind to {length}: {len(self.committed)} tokens are committed")
        self._answer_start = None
        self._cut(length)

    def keep(self, start: int, tokens: Sequence[int]) -> list[SessionEvent]:
        """Take the last answer, running or ended, back to position ``start`` and have the target go on behind
        ``tokens``, which become kept ones. End-of-turn tokens among them are left out: where the turn ends is
        the target's. So are those for which its context has no room.

        Raises:
            LocalProtocolError: ``start`` lies outside the answer, or there are no tokens to keep.
        """
        kept = self.keepable(tokens, start)
        if self._answer_start is None or not self._answer_start <= start <= len(self.committed):
            raise LocalProtocolError(f"can't keep tokens from {start} on: no answer of the target has that position")
        if not kept:
            raise LocalProtocolError("can't keep an empty text")
        events = self._drop_tentative()
        self._cut(start)
        self._supplied, self._kept = kept, len(kept)
        self._answer_supplied()
        return events

    def _answer_supplied(self) -> None:
        """Ask for an answer behind the supplied tokens, now or once the link is up."""
        self.answering = True
        self._outgoing.begin_epoch(len(self.committed))
        if self.link is LinkState.UP:
            self._send_prompt()

    # -- when the program is closed ------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """All that :meth:`restore` needs, as JSON has it; at any time, and nothing changes.

        It holds the conversation's tokens and its resume token: keep it as private as the text.
        """
        return Snapshot(
            policy=self.policy,
            limits=self.limits,
            resume_token=self._resume_token,
            epoch=self._outgoing.epoch,
            connection=self._outgoing.connection,
            committed=list(self.committed),
            supplied=list(self._supplied),
            kept=self._kept,
            tentative=list(self._tentative),
            origins=list(self._origins),
            answering=self.answering,
            answer_start=self._answer_start,
            sampling=self._sampling,
            max_length=self._max_length,
            while_away=self._while_away,
        ).to_json(self.fingerprints)

    @classmethod
    def restore(
        cls,
        snapshot: object,
        fingerprints: Fingerprints,
        *,
        stop_tokens: Sequence[int],
        row_encoding: int = wire.ROW_ENCODING_INT8,
        vocab_size: int = 1 << 32,
    ) -> ClientSession:
        """The session of a snapshot, with its link down and without memory rows.

        The snapshot may be older than the end of its program: the next connection says which tokens it holds, and the
        server goes on behind those that it has too.

        Args:
            fingerprints: of the bundle now. The drafter may be another: the text is the target's.

        Raises:
            SnapshotError: another version, another target or tokenizer, or no snapshot of a session.
        """
        saved = Snapshot.from_json(snapshot, fingerprints, vocab_size)
        session = cls(
            fingerprints,
            stop_tokens=stop_tokens,
            policy=saved.policy,
            row_encoding=row_encoding,
            vocab_size=vocab_size,
        )
        session.limits = saved.limits
        session.committed = saved.committed
        session.answering = saved.answering
        session._supplied, session._kept = saved.supplied, saved.kept
        session._tentative, session._origins = saved.tentative, saved.origins
        session._answer_start = saved.answer_start
        session._sampling, session._max_length = saved.sampling, saved.max_length
        session._while_away = saved.while_away
        session._resume_token = saved.resume_token
        session._outgoing = Outgoing.restored(saved.epoch, saved.connection)
        return session
