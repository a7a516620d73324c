"""Looking things up in a datastore."""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from moa_runtime.datastore.file import DatastoreError, Header, as_parts, mapped_arrays, read_header
from moa_runtime.datastore.suffixes import LONGEST_RUN, Int32

_RANGES_KEPT = 1 << 14


class Datastore:
    """Earlier texts, mapped into memory. Several conversations and threads may share one.

    Args:
        tokens: ``[n]``, with :data:`~moa_runtime.datastore.file.BOUNDARY` behind each document.
        places: ``[n]``, :func:`~moa_runtime.datastore.suffixes.sorted_suffixes` of them.

    Attributes:
        header: what the file says of itself.
    """

    def __init__(self, header: Header, tokens: Int32, places: Int32) -> None:
        self.header = header
        self._tokens, self._places = tokens, places
        self._of_first = lru_cache(_RANGES_KEPT)(lambda token: self._narrowed((token,), 0, len(places)))

    @classmethod
    def open(cls, path: Path, tokenizer: str) -> Datastore:
        """Map a file, which is read once to see that it is whole.

        Args:
            tokenizer: fingerprint of the one that tokens are of.

        Raises:
            DatastoreError: there is none, it is damaged, or its tokens are of another tokenizer.
        """
        header, start = read_header(path)
        if header.tokenizer != tokenizer:
            raise DatastoreError(
                f"the datastore {path} was made with another tokenizer ({header.tokenizer}, the bundle's is "
                f"{tokenizer}): make it again with moa-export datastore"
            )
        tokens, places = mapped_arrays(path, header, start)
        crc32 = 0
        for part in as_parts(tokens, places):
            crc32 = zlib.crc32(part, crc32)
        if crc32 != header.crc32:
            raise DatastoreError(f"the datastore {path} is damaged: delete it, and make it again")
        return cls(header, tokens, places)

    def count(self, run: Sequence[int]) -> int:
        """How often a run of tokens occurs. Takes ``O(log n)`` steps; of a longer one than
        :data:`~moa_runtime.datastore.suffixes.LONGEST_RUN` the last tokens count."""
        return len(self._range(run))

    def longest(self, text: Sequence[int], least: int = 1) -> int:
        """How many tokens the longest suffix of ``text`` has that occurs, at most
        :data:`~moa_runtime.datastore.suffixes.LONGEST_RUN`; 0 where none of ``least`` tokens does."""
        most = min(LONGEST_RUN, len(text))
        if least > most or not self._range(text[len(text) - least :]):
            return 0
        lengths = range(least + 1, most + 1)  # what a run ends with occurs wherever the run does
        return least + bisect_left(lengths, True, key=lambda length: not self._range(text[len(text) - length :]))

    def continuations(self, run: Sequence[int], *, most: int, length: int) -> list[list[int]]:
        """What followed a run, up to ``length`` tokens each, to the document's end.

        Args:
            most: occurrences at most; of more than that, evenly drawn from their order (as in SSSD, arXiv 2411.05894).
        """
        found = self._range(run)
        step = max(1.0, len(found) / most)
        behind = min(len(run), LONGEST_RUN)
        chosen = [found[int(at * step)] for at in range(min(most, len(found)))]
        return [self._document(int(self._places[at]) + behind, length) for at in chosen]

    def followers(self, run: Sequence[int], *, most: int) -> dict[int, float]:
        """The tokens that followed a run, each with its share among ``most`` occurrences; none where nothing did."""
        tokens = [token for one in self.continuations(run, most=most, length=1) for token in one]
        return {token: times / len(tokens) for token, times in Counter(tokens).items()}

    def _document(self, place: int, length: int) -> list[int]:
        tokens: list[int] = self._tokens[place : place + length].tolist()
        end = next((at for at, token in enumerate(tokens) if token < 0), length)
        return tokens[:end]

    def _range(self, run: Sequence[int]) -> range:
        """Which of the places the suffixes begin with a run at."""
        run = tuple(run[-LONGEST_RUN:])
        if not run:
            return range(0)
        found: range = self._of_first(run[0])
        return found if len(run) == 1 or not found else self._narrowed(run, found.start, found.stop)

    def _narrowed(self, run: tuple[int, ...], low: int, high: int) -> range:
        tokens, places, length, sought = self._tokens, self._places, len(run), list(run)

        def begins(at: int) -> list[int]:
            place = places[at]
            begun: list[int] = tokens[place : place + length].tolist()
            return begun

        low = bisect_left(range(high), sought, lo=low, key=begins)
        if low == high or begins(low) != sought:
            return range(0)
        return range(low, bisect_right(range(high), sought, lo=low, key=begins))
