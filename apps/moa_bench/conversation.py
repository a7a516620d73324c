"""One conversation of device and verifier over the real protocol, both ends in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moa_bench.loopback import LoopbackVerifier
from moa_runtime.drafters.base import Drafter
from moa_runtime.errors import MoaError
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Faulted, Origin, RowsReceived, Sampling
from moa_runtime.session.handshake import Fingerprints


class RefusedError(MoaError):
    """The verifier answered with a fault; ``code`` as in :class:`~moa_runtime.session.events.Faulted`."""

    def __init__(self, fault: Faulted) -> None:
        super().__init__(fault.text)
        self.code = fault.code


@dataclass(frozen=True)
class Round:
    """One draft and its verdict, in tokens: sent, accepted of them, committed (the bonus token included)."""

    drafted: int
    accepted: int
    committed: int


@dataclass(frozen=True)
class Answer:
    """The committed tokens of an answer, the one that ends the turn included, and where each came from."""

    tokens: list[int]
    origins: list[Origin]


class Conversation:
    """Drafts with ``drafter`` as the runtime does, one frame under way at a time and nothing written ahead.

    Args:
        fingerprints: the bundle's.
        stop_tokens: ids that end the assistant's turn.

    Raises:
        RefusedError: the engine serves another target, tokenizer or drafter; the message names both.
    """

    def __init__(
        self, verifier: LoopbackVerifier, drafter: Drafter, fingerprints: Fingerprints, stop_tokens: Sequence[int]
    ) -> None:
        self._verifier, self._drafter = verifier, drafter
        self._session = ClientSession(fingerprints, stop_tokens=stop_tokens)
        self._session.connect()
        self._exchange()

    @property
    def committed(self) -> list[int]:
        """The conversation's tokens so far."""
        return list(self._session.committed)

    def answer(
        self,
        question: Sequence[int],
        sampling: Sampling,
        *,
        draft_length: int,
        max_new_tokens: int,
        on_round: Callable[[Round], None],
    ) -> Answer:
        """Let the target answer.

        Args:
            question: tokens of the user's turn, up to where the answer begins.
            draft_length: tokens of each draft, a greedy chain; fewer where the drafter ends the turn or
                ``max_new_tokens`` leaves room for fewer.
            on_round: called after each verdict on a draft; not after the question's own verdict, which
                brings the first token of the answer.

        Raises:
            RefusedError: the conversation does not fit the target's context (code ``CONTEXT_FULL``).
        """
        session = self._session
        session.prompt(question, sampling, max_new_tokens)
        answer = Answer([], [])

        def commit() -> tuple[int, int]:
            """What the verdict committed, and how much of that was drafted."""
            before = len(answer.origins)
            for event in self._exchange():
                answer.tokens.extend(event.tokens)
                answer.origins.extend(event.origins)
            new = answer.origins[before:]
            return len(new), sum(origin is Origin.DRAFTED for origin in new)

        commit()
        while session.answering:
            self._draft(draft_length)
            session.propose()
            drafted = session.in_flight_drafted
            committed, accepted = commit()
            on_round(Round(drafted, accepted, committed))
        return answer

    def _draft(self, length: int) -> None:
        session = self._session
        while len(session.tentative) < length and not session.tentatively_finished:
            drafted = self._drafter.draft(session.tokens, 1)
            if not drafted:  # its context is full: only the target can go on
                return
            session.extend([drafted[0].token], Origin.DRAFTED)

    def _exchange(self) -> list[Committed]:
        """Send what is due and take what comes back.

        Raises:
            RefusedError: a fault came back.
        """
        committed = []
        for frame in self._session.frames_to_send():
            answer = self._verifier.receive(frame)
            for event in self._session.receive(answer) if answer is not None else ():
                if isinstance(event, RowsReceived):
                    self._drafter.add_rows(event.start, event.keys, event.values)
                elif isinstance(event, Committed):
                    committed.append(event)
                elif isinstance(event, Faulted):
                    raise RefusedError(event)
        return committed
