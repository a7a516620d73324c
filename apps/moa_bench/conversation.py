"""One conversation of device and verifier over the real protocol, both ends in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moa_bench.loopback import LoopbackVerifier
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafting import lengthen
from moa_runtime.errors import MoaError
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Faulted, Origin, RowsReceived, Sampling
from moa_runtime.session.handshake import Fingerprints
from moa_runtime.session.tree import DraftTree
from moa_runtime.timeline import NO_TIMELINE, Timeline


class RefusedError(MoaError):
    """The verifier answered with a fault; ``code`` as in :class:`~moa_runtime.session.events.Faulted`."""

    def __init__(self, fault: Faulted) -> None:
        super().__init__(fault.text)
        self.code = fault.code


#: Continues a conversation's tokens by a tree.
DraftTrees = Callable[[Sequence[int]], DraftTree]


@dataclass(frozen=True)
class Round:
    """One draft and its verdict, in tokens.

    Attributes:
        drafted: sent.
        depth: of them, on the longest path; as many as were sent where the draft is a chain.
        accepted: of them.
        committed: the bonus token included.
        draft_s: seconds that drafting took.
    """

    drafted: int
    depth: int
    accepted: int
    committed: int
    draft_s: float = 0.0


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
        timeline: gets the spans ``draft`` and ``receive``.

    Raises:
        RefusedError: the engine serves another target, tokenizer or drafter; the message names both.
    """

    def __init__(
        self,
        verifier: LoopbackVerifier,
        drafter: Drafter,
        fingerprints: Fingerprints,
        stop_tokens: Sequence[int],
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self._verifier, self._drafter, self._timeline = verifier, drafter, timeline
        self._session = ClientSession(fingerprints, stop_tokens=stop_tokens)
        self._session.connect()
        self._exchange()

    @property
    def committed(self) -> list[int]:
        """The conversation's tokens so far."""
        return list(self._session.committed)

    @property
    def answering(self) -> bool:
        """Whether the answer goes on."""
        return self._session.answering

    def answer(
        self,
        question: Sequence[int],
        sampling: Sampling,
        *,
        draft_length: int,
        max_new_tokens: int,
        on_round: Callable[[Round], None],
        draft_tree: DraftTrees | None = None,
    ) -> Answer:
        """Let the target answer.

        Args:
            question: tokens of the user's turn, up to where the answer begins.
            draft_length: see :meth:`round`.
            draft_tree: makes every draft, where they are not to be chains.
            on_round: called after each verdict on a draft; not after the question's own verdict, which
                brings the first token of the answer.

        Raises:
            RefusedError: the conversation does not fit the target's context (code ``CONTEXT_FULL``).
        """
        answer = self.ask(question, sampling, max_new_tokens)
        while self.answering:
            round_of = self.round(draft_length, answer) if draft_tree is None else self.tree_round(draft_tree, answer)
            on_round(round_of)
        return answer

    def ask(self, question: Sequence[int], sampling: Sampling, max_new_tokens: int = 0) -> Answer:
        """Ask, without drafting yet.

        Args:
            max_new_tokens: of the answer, 0 for no limit.

        Returns:
            the first token of the answer.

        Raises:
            RefusedError: see :meth:`answer`.
        """
        self._session.prompt(question, sampling, max_new_tokens)
        answer = Answer([], [])
        self._commit_to(answer)
        return answer

    def round(self, draft_length: int, answer: Answer) -> Round:
        """One draft and its verdict, which extends ``answer``. An answer must run.

        Args:
            draft_length: tokens of the draft, a greedy chain; fewer where the drafter ends the turn or
                there is room for fewer, and more where it knows more without a step. A draft of 0 asks the target for
                one token.
        """
        began = time.perf_counter()
        logprob = write_on(self._session, self._drafter, draft_length, Origin.DRAFTED, self._timeline)
        lengthen(self._session, self._drafter, logprob)
        draft_s = time.perf_counter() - began
        self._session.propose()
        return self._judge(answer, self._session.in_flight_drafted, draft_s)

    def tree_round(self, draft_tree: DraftTrees, answer: Answer) -> Round:
        """One tree and its verdict, which extends ``answer``. An answer must run."""
        prefix = self._session.tokens
        began = time.perf_counter()
        with self._timeline.measure("draft", "draft", position=len(prefix), origin=Origin.DRAFTED.value):
            tree = draft_tree(prefix)
        draft_s = time.perf_counter() - began
        self._session.extend(tree.likeliest_path(), Origin.DRAFTED)
        self._session.propose(tree=tree)
        return self._judge(answer, tree.depth, draft_s)

    def _judge(self, answer: Answer, depth: int, draft_s: float) -> Round:
        drafted = self._session.in_flight_drafted
        new = self._commit_to(answer)
        return Round(drafted, depth, sum(origin is Origin.DRAFTED for origin in new), len(new), draft_s)

    def cut(self) -> ClientSession:
        """Lose the link for good: the session is the caller's now, the conversation is over."""
        self._session.disconnected()
        return self._session

    def _commit_to(self, answer: Answer) -> list[Origin]:
        """Exchange frames; returns the origins of the tokens that this committed."""
        before = len(answer.origins)
        for event in self._exchange():
            answer.tokens.extend(event.tokens)
            answer.origins.extend(event.origins)
        return answer.origins[before:]

    def _exchange(self) -> list[Committed]:
        return exchange(self._session, self._verifier, self._drafter, self._timeline)


def write_on(
    session: ClientSession, drafter: Drafter, length: int, origin: Origin, timeline: Timeline = NO_TIMELINE
) -> float:
    """Extend the tentative suffix to ``length`` tokens, as the runtime does: one token after the other.

    It stays shorter where the drafter ends the turn, the answer is as long as was asked for, or the drafter
    has nothing to propose.

    Returns:
        log-probability of what was written (nats).
    """
    logprob = 0.0
    while len(session.tentative) < length and not session.tentatively_finished:
        prefix = session.tokens
        with timeline.measure("draft", "draft", position=len(prefix), origin=origin.value):
            drafted = drafter.draft(prefix, 1)
        if not drafted:
            break
        session.extend([drafted[0].token], origin)
        logprob += drafted[0].logprob
    return logprob


def exchange(
    session: ClientSession,
    verifier: LoopbackVerifier,
    drafter: Drafter | None = None,
    timeline: Timeline = NO_TIMELINE,
) -> list[Committed]:
    """Send what is due and take what comes back; memory rows go to ``drafter``, if there is one.

    Raises:
        RefusedError: a fault came back.
    """
    committed = []
    for frame in session.frames_to_send():
        answer = verifier.receive(frame)
        if answer is not None:
            with timeline.measure("receive", "link", bytes=len(answer)):
                committed += _take(session, answer, drafter)
    return committed


def _take(session: ClientSession, frame: bytes, drafter: Drafter | None) -> list[Committed]:
    """Take one frame of the verifier. Raises RefusedError."""
    committed = []
    for event in session.receive(frame):
        if isinstance(event, RowsReceived) and drafter is not None:
            drafter.add_rows(event.start, event.keys, event.values)
        elif isinstance(event, Committed):
            committed.append(event)
        elif isinstance(event, Faulted):
            raise RefusedError(event)
    return committed
