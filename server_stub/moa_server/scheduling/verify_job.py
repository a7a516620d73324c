"""A verification job: process a prefix, verify a draft after it, return memory rows; divisible into pieces.

The text does not depend on how a job is split, or on what of its draft is verified. After some nodes of an asked draft
are accepted, and the target's choice is one that was left out, the job continues with what was drafted after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moa_runtime.session.events import Sampling, TokenLogprobs
from moa_runtime.session.tree import parents_among
from moa_server.engine.base import Outcome, Rows, StepRequest, joined

#: A job that lacks more tokens of its prefix than this is prefilling; a round lacks one, its last bonus token.
FEW = 8
#: Most memory rows that one piece asks for besides those of the tokens that it processes.
MOST_ROWS = 64


class ExpiredError(Exception):
    """A job was not done by its deadline."""


class EngineFailedError(Exception):
    """The engine failed on a job, even when it was alone in a step."""


class GivenUpError(Exception):
    """The verifier shuts down before the job is done."""


@dataclass(frozen=True)
class PricedDraft:
    """A draft, and how probable it is.

    Attributes:
        tokens, parents: a tree as in :mod:`moa_runtime.session.tree`.
        paths: probability that a token and all before it are right, for each token.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    paths: Sequence[float] = ()


class DraftSource(Protocol):
    """Proposes the draft of a job when its step is planned."""

    def newest(self) -> PricedDraft:
        """Return the best draft that there is after the job's prefix."""


class Job:
    """Work for one sequence. Pure: :meth:`request` returns the next request to an engine, :meth:`take` its outcome.

    Args:
        sequence: the engine's number of the conversation.
        prefix: all tokens before the draft, at least one.
        sampling: how the target chooses after the prefix; None chooses nothing: the job is done when it has its memory
            rows.
        draft, parents: a tree as in :mod:`moa_runtime.session.tree`.
        rows_from: position of the first wanted memory row; None for none.
        paths: see :class:`PricedDraft`; without it all tokens of a draft are worth verifying.
        source: proposes the draft, which is verified in one step.

    Attributes:
        path: indices of the accepted draft tokens.
        verified: indices of the draft tokens that the target has verified, or chosen although they were left out.
        token: the target's choice after the path; None until it has chosen.
        logprobs: of the path and the token, if the sampling asks for them.
        steps: number of steps that contained a piece of it.
        seconds: total time of those steps, whatever else they contained.
        drafting_s: time that the verifier's own drafting before these steps took.
    """

    def __init__(
        self,
        sequence: int,
        prefix: Sequence[int],
        sampling: Sampling | None,
        draft: Sequence[int] = (),
        parents: Sequence[int] = (),
        rows_from: int | None = None,
        paths: Sequence[float] | None = None,
        source: DraftSource | None = None,
    ) -> None:
        self.sequence, self.sampling, self.source = sequence, sampling, source
        self.path: tuple[int, ...] = ()
        self.verified: list[int] = []
        self.token: int | None = None
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self.steps, self.seconds, self.drafting_s = 0, 0.0, 0.0
        self._prefix = list(prefix)  # grows by what pieces of the draft were accepted
        self._draft, self._parents = list(draft), list(parents)
        self._paths = [1.0] * len(draft) if paths is None else list(paths)
        self._nodes = list(range(len(draft)))  # their indices in the whole draft
        self._asked: list[int] = []  # of those, the nodes of the last request
        self._rows_next = rows_from
        self._rows: list[Rows] = []

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        if self.sampling is None:
            return self._rows_next is None or self._rows_next >= len(self._prefix)
        return self.token is not None

    @property
    def prefix(self) -> Sequence[int]:
        """The tokens that must be processed before the rest of the draft can be verified."""
        return self._prefix

    @property
    def draft_length(self) -> int:
        """Number of drafted tokens that are still to be verified."""
        return len(self._draft)

    @property
    def paths(self) -> Sequence[float]:
        """Probability that a drafted token and all before it are right, for each that is still to be verified."""
        return self._paths

    def take_newest(self) -> None:
        """Take the newest draft of the source, if there is one."""
        if self.source is not None:
            draft = self.source.newest()
            self._draft, self._parents, self._paths = list(draft.tokens), list(draft.parents), list(draft.paths)
            self._nodes = list(range(len(draft.tokens)))

    def prefills(self, held: int) -> bool:
        """Whether the job is in prefill: much is to be done before the draft, given ``held`` tokens of the prefix."""
        return len(self._prefix) - held > FEW or self._rows_behind(held) > MOST_ROWS

    def request(self, held: int, most: int, nodes: Sequence[int] | None = None) -> StepRequest:
        """Return the next piece: at least one token, at most ``most``.

        Args:
            held: number of leading tokens of :attr:`prefix` that the engine holds.
            nodes: ascending indices of the drafted tokens to verify, a tree; None for the first ones.
        """
        if self._rows_behind(held) > MOST_ROWS:  # held from an earlier connection, say: rows alone
            return self._prefill(min(held, (self._rows_next or 0) + MOST_ROWS))
        if self.sampling is None:
            return self._prefill(min(len(self._prefix), held + most))
        lacking = max(1, len(self._prefix) - held)  # the last token is computed again for its choice
        if lacking > most:
            return self._prefill(held + most)
        # The first nodes of a tree are a tree: parents come first.
        chosen = range(len(self._draft)) if nodes is None else nodes
        self._asked = list(chosen)[: max(0, most - lacking)]
        draft, parents = [self._draft[index] for index in self._asked], parents_among(self._asked, self._parents)
        return StepRequest(self.sequence, self._prefix, draft, parents, self.sampling, self._rows_next)

    def take(self, request: StepRequest, outcome: Outcome) -> None:
        """Take the outcome of a request."""
        self.steps += 1
        if not outcome.done:
            return
        if request.rows_from is not None and outcome.rows is None:
            self._rows_next = None  # there are none
        elif outcome.rows is not None and len(outcome.rows.keys):
            self._rows.append(outcome.rows)
            self._rows_next = outcome.rows.stop
        if outcome.token is None:
            return
        self.path += tuple(self._nodes[self._asked[index]] for index in outcome.path)
        self.logprobs += outcome.logprobs
        self.verified += [self._nodes[index] for index in self._asked]
        node = self._asked[outcome.path[-1]] + 1 if outcome.path else 0
        unseen = sorted(set(range(len(self._draft))).difference(self._asked))
        matching = (i for i in unseen if self._parents[i] == node and self._draft[i] == outcome.token)
        child = next(matching, None)
        if child is None or self.source is not None or child + 1 not in self._parents:
            self.token = outcome.token
            return
        self._prefix += [request.draft[index] for index in outcome.path] + [outcome.token]
        self.path += (self._nodes[child],)
        self.verified.append(self._nodes[child])
        self._descend(child)

    @property
    def rows(self) -> Rows | None:
        """The memory rows from the engine; None if it made none."""
        return joined(self._rows) if self._rows else None

    def _prefill(self, length: int) -> StepRequest:
        wanted = self._rows_next is not None and self._rows_next < length  # not those of a cache that was lost since
        rows_from = self._rows_next if wanted else None
        return StepRequest(self.sequence, self._prefix[:length], rows_from=rows_from, expected=len(self._prefix))

    def _rows_behind(self, held: int) -> int:
        """Number of held tokens whose rows are still wanted."""
        return 0 if self._rows_next is None else held - self._rows_next

    def _descend(self, child: int) -> None:
        """Reduce the draft to the subtree below ``child``, which becomes the root."""
        places = {child: 0}  # old index -> new parent number
        for index in range(child + 1, len(self._draft)):
            if self._parents[index] - 1 in places:
                places[index] = len(places)
        kept = [index for index in places if index != child]
        self._parents = [places[self._parents[index] - 1] for index in kept]
        self._draft = [self._draft[index] for index in kept]
        sure = self._paths[child]
        self._paths = [self._paths[index] / sure if sure else 0.0 for index in kept]
        self._nodes = [self._nodes[index] for index in kept]
