"""Which parts of a rendered block come from where."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from moa_runtime.events import Origin, TextSpan


@dataclass(frozen=True)
class Run:
    """Characters ``[start, end)`` of a rendered block that share an origin."""

    start: int
    end: int
    origin: Origin
    committed: bool


class SpanIndex:
    """Finds the span of a text that holds an offset."""

    def __init__(self, spans: Sequence[TextSpan]) -> None:
        self._spans = [span for span in spans if span.text]
        self._ends = list(accumulate(len(span.text) for span in self._spans))

    def at(self, offset: int) -> TextSpan | None:
        """The span with the character at ``offset``; None behind the last one."""
        index = bisect_right(self._ends, offset)
        return self._spans[index] if index < len(self._spans) else None

    def runs(self, offsets: Sequence[int]) -> list[Run]:
        """Cut a rendered text at changes of origin.

        Args:
            offsets: for each of its characters the offset in the spans' joined text.
        """
        spans = [self.at(offset) for offset in offsets]
        runs = []
        for span, group in groupby(range(len(spans)), key=spans.__getitem__):
            places = list(group)
            if span is not None:
                runs.append(Run(places[0], places[-1] + 1, span.origin, span.committed))
        return runs
