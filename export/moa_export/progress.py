"""One progress bar per stage, on a terminal only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TextIO

from tqdm import tqdm

Advance = Callable[[], None]


class Progress:
    """Shows how far an export is.

    Args:
        stream: where to draw; nothing is drawn where that is no terminal.
        quiet: draw nothing at all.
    """

    def __init__(self, stream: TextIO, *, quiet: bool) -> None:
        self._stream = stream
        # None lets tqdm look whether the stream is a terminal.
        self._disable = True if quiet else None

    @contextlib.contextmanager
    def stage(self, title: str, steps: int = 1) -> Iterator[Advance]:
        """One bar for the block; call what it yields after each of its ``steps``. A block of one step needs none."""
        layout = "{desc:<44} {bar:24} {n_fmt:>3}/{total_fmt} [{elapsed}]"
        with tqdm(total=steps, desc=title, file=self._stream, disable=self._disable, bar_format=layout) as bar:
            yield lambda: None if steps == 1 else bar.update() and None
            if steps == 1:
                bar.update()
