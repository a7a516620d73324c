"""A job: bring a sequence up to a prefix, verify a draft behind it, give its memory rows; piece by piece.

What a job does does not depend on how it is cut into pieces: a draft whose first nodes were accepted goes on with what
hangs below them, so each piece only leaves less to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.session.sampling import Sampling
from moa_server.engine.base import Outcome, Rows, StepRequest, joined

#: A job that lacks more tokens of its prefix than this is prefilling; a round lacks one, its last bonus token.
FEW = 8
#: Most memory rows that one piece asks for besides those of the tokens that it processes.
MOST_ROWS = 64


class ExpiredError(Exception):
    """A job came to its deadline before it was done."""


class EngineFailedError(Exception):
    """The engine failed on a job, also when it was alone in a step."""


class GivenUpError(Exception):
    """The verifier ends before the job is done."""


class Job:
    """Work for one sequence. Pure: :meth:`request` says what an engine is asked, :meth:`take` takes what it answers.

    Args:
        sequence: the engine's number of the conversation.
        prefix: all tokens before the draft, at least one.
        sampling: how the target chooses behind the prefix; None chooses nothing: the job is done when its memory rows
            are there.
        draft, parents: a tree as in :mod:`moa_runtime.session.tree`.
        rows_from: position of the first memory row that is wanted; None for none.

    Attributes:
        path: indices into the draft of what was accepted.
        token: the target's choice behind it; None until it has chosen.
        steps: steps that it took part in.
        seconds: that these took, whatever else was in them.
    """

    def __init__(
        self,
        sequence: int,
        prefix: Sequence[int],
        sampling: Sampling | None,
        draft: Sequence[int] = (),
        parents: Sequence[int] = (),
        rows_from: int | None = None,
    ) -> None:
        self.sequence = sequence
        self.sampling = sampling
        self.path: tuple[int, ...] = ()
        self.token: int | None = None
        self.steps = 0
        self.seconds = 0.0
        self._prefix = list(prefix)  # grows by what pieces of the draft were accepted
        self._draft, self._parents = list(draft), list(parents)
        self._nodes = list(range(len(draft)))  # their indices in the whole draft
        self._rows_next = rows_from
        self._rows: list[Rows] = []

    @property
    def done(self) -> bool:
        if self.sampling is None:
            return self._rows_next is None or self._rows_next >= len(self._prefix)
        return self.token is not None

    @property
    def prefix(self) -> Sequence[int]:
        """The tokens that must be held before what is left of the draft can be verified."""
        return self._prefix

    @property
    def draft_length(self) -> int:
        """Drafted tokens that are still to be verified."""
        return len(self._draft)

    def prefills(self, held: int) -> bool:
        """Whether much is to be done before the draft, with ``held`` tokens of the prefix held."""
        return len(self._prefix) - held > FEW or self._rows_behind(held) > MOST_ROWS

    def request(self, held: int, most: int) -> StepRequest:
        """The next piece: at most ``most`` tokens, at least one.

        Args:
            held: tokens at the beginning of :attr:`prefix` that the engine holds.
        """
        if self._rows_behind(held) > MOST_ROWS:  # held from an earlier connection, say: rows alone
            return self._prefill(min(held, (self._rows_next or 0) + MOST_ROWS))
        if self.sampling is None:
            return self._prefill(min(len(self._prefix), held + most))
        lacking = max(1, len(self._prefix) - held)  # the last token is computed again for its choice
        if lacking > most:
            return self._prefill(held + most)
        # The first nodes of a tree are a tree: parents come first.
        most_drafted = max(0, most - lacking) if self._draft else 0
        return StepRequest(
            self.sequence,
            self._prefix,
            self._draft[:most_drafted],
            self._parents[:most_drafted],
            self.sampling,
            self._rows_next,
        )

    def take(self, request: StepRequest, outcome: Outcome) -> None:
        """What became of a request."""
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
        self.path += tuple(self._nodes[index] for index in outcome.path)
        node = outcome.path[-1] + 1 if outcome.path else 0
        child = next(
            (
                index
                for index in range(len(request.draft), len(self._draft))
                if self._parents[index] == node and self._draft[index] == outcome.token
            ),
            None,
        )
        if child is None:
            self.token = outcome.token
            return
        self._prefix += [request.draft[index] for index in outcome.path] + [outcome.token]
        self.path += (self._nodes[child],)
        self._descend(child)

    @property
    def rows(self) -> Rows | None:
        """The memory rows that the engine gave; None where it gives none."""
        return joined(self._rows) if self._rows else None

    def _prefill(self, length: int) -> StepRequest:
        wanted = self._rows_next is not None and self._rows_next < length  # not those of a cache that was lost since
        rows_from = self._rows_next if wanted else None
        return StepRequest(self.sequence, self._prefix[:length], rows_from=rows_from, expected=len(self._prefix))

    def _rows_behind(self, held: int) -> int:
        """Held tokens whose rows are still wanted."""
        return 0 if self._rows_next is None else held - self._rows_next

    def _descend(self, child: int) -> None:
        """Keep of the draft what hangs below ``child``, which becomes its root."""
        places = {child: 0}  # old index -> new parent number
        for index in range(child + 1, len(self._draft)):
            if self._parents[index] - 1 in places:
                places[index] = len(places)
        kept = [index for index in places if index != child]
        self._parents = [places[self._parents[index] - 1] for index in kept]
        self._draft = [self._draft[index] for index in kept]
        self._nodes = [self._nodes[index] for index in kept]
