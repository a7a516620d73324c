"""Progress of an export: a bar for each stage on a terminal, elsewhere a line for each stage and every ten seconds."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from tqdm import tqdm

Advance = Callable[[], None]
_EVERY_S = 10.0
_LAYOUT = "{desc:<44} {bar:24} {n_fmt:>3}/{total_fmt} [{elapsed}]"


class Progress:
    """Shows how far an export is.

    Args:
        stream: where to draw, or to write lines where that is no terminal.
        quiet: say nothing at all.
    """

    def __init__(self, stream: TextIO, *, quiet: bool) -> None:
        self._stream, self._quiet = stream, quiet
        self._draws = stream.isatty() and not quiet
        self._began, self._said = time.monotonic(), -math.inf

    @contextlib.contextmanager
    def stage(self, title: str, steps: int = 1) -> Iterator[Advance]:
        """Show the block; call what it yields after each of its ``steps``. A block of one step needs none."""
        self._line(title, new=True)
        with tqdm(total=steps, desc=title, file=self._stream, disable=not self._draws, bar_format=_LAYOUT) as bar:

            def advance() -> None:
                if steps > 1:
                    bar.update()
                    self._line(title)

            yield advance
            if steps == 1:
                bar.update()

    def _line(self, title: str, *, new: bool = False) -> None:
        now = time.monotonic()
        if self._quiet or self._draws or (not new and now < self._said + _EVERY_S):
            return
        self._said = now
        print(f"moa-export: {title} ({now - self._began:.0f} s gone)", file=self._stream, flush=True)
