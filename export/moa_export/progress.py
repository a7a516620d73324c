"""Progress of work in stages: a line that moves on a terminal, elsewhere a line for each stage."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

Advance = Callable[[], None]
#: Seconds between two states of the line, and between two lines of a long stage elsewhere.
_MOVES_S, _EVERY_S = 0.5, 10.0
_WIDTH = 78


class Progress:
    """Shows how far an export is.

    Args:
        stream: where to draw, or to write lines where that is no terminal.
        quiet: say nothing at all.
        stages: number of stages, if it is known.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False, stages: int = 0) -> None:
        self._stream, self._quiet, self._stages, self._count = stream, quiet, stages, 0
        self._draws = not quiet and stream.isatty()
        self._began = time.monotonic()

    @contextlib.contextmanager
    def stage(self, title: str, steps: int = 1) -> Iterator[Advance]:
        """Show the block; call what it yields after each of its ``steps``. A block of one step needs none."""
        self._count += 1
        began, done, ended = time.monotonic(), 0, threading.Event()
        number = f"{self._count}/{self._stages} " if self._stages else ""

        def show() -> None:
            part = f" {done}/{steps}" if steps > 1 else ""
            line = f"{number}{title}{part}"
            if self._draws:
                seconds = f"{time.monotonic() - began:.0f} s"
                print(f"\r{line:<{_WIDTH - 8}}{seconds:>7}", end="", file=self._stream, flush=True)
            elif not self._quiet:
                gone = time.monotonic() - self._began
                print(f"moa-export: {line} ({gone:.0f} s gone)", file=self._stream, flush=True)

        def keep_showing() -> None:
            while not ended.wait(_MOVES_S if self._draws else _EVERY_S):
                show()

        def advance() -> None:
            nonlocal done
            done += 1

        show()
        thread = threading.Thread(target=keep_showing, daemon=True)
        thread.start()
        try:
            yield advance
        finally:
            ended.set()
            thread.join()
            if self._draws:
                show()
                print(file=self._stream, flush=True)


class JsonProgress(Progress):
    """Prints ``{"stage": ..., "part": 0 to 1}`` for each step, for other programs."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, quiet=True)

    @contextlib.contextmanager
    def stage(self, title: str, steps: int = 1) -> Iterator[Advance]:
        """See :meth:`Progress.stage`."""
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            self._say(title, min(done / steps, 1.0))

        self._say(title, 0.0)
        yield advance

    def _say(self, title: str, part: float) -> None:
        print(json.dumps({"stage": title, "part": part}), file=self._stream, flush=True)
