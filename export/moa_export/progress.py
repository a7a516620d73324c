"""Progress of work in stages: a line that moves on a terminal, elsewhere a line for each stage."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TextIO

Advance = Callable[[], None]
#: Seconds between two states of the line, and between two lines of a long stage elsewhere.
_MOVES_S, _EVERY_S = 0.5, 10.0
#: Seconds of steps before their pace is believed: the first megabyte of a download may come late.
_SURE_S = 3.0
_WIDTH = 78


class Progress:
    """Shows how far an export is, or another program's work.

    Args:
        stream: where to draw, or to write lines where that is no terminal.
        program: its name, which begins these lines.
        quiet: say nothing at all.
        plan: the titles of all stages in order, each with the seconds that it usually takes, if they are known: then
            the line says what comes next and how long all takes here, by how long finished stages of one step took.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        quiet: bool = False,
        plan: Mapping[str, float] = MappingProxyType({}),
        program: str = "moa-export",
    ) -> None:
        self._stream, self._quiet, self._plan, self._count, self._program = stream, quiet, plan, 0, program
        self._draws = not quiet and stream.isatty()
        self._began = time.monotonic()
        self._took = self._usual = 0.0  # seconds of finished stages

    @contextlib.contextmanager
    def stage(self, title: str, steps: int = 1) -> Iterator[Advance]:
        """Show the block; call what it yields after each of its ``steps``. A block of one step needs none."""
        self._count += 1
        began, done, first, ended = time.monotonic(), 0, 0.0, threading.Event()
        number = f"{self._count}/{len(self._plan)} " if self._plan else ""

        def show() -> None:
            part = f" {done}/{steps}" if steps > 1 else ""
            gone = time.monotonic() - began
            following, left = self.outlook(title, began, first, done, steps)
            outlook = f", then {following}" + (f"; {max(1, round(left))} s to go" if left else "") if following else ""
            line = f"{number}{title}{part}{outlook}"
            if self._draws:
                print(f"\r{line:<{_WIDTH - 8}}{f'{gone:.0f} s':>7}", end="", file=self._stream, flush=True)
            elif not self._quiet:
                total = time.monotonic() - self._began
                print(f"{self._program}: {line} ({total:.0f} s gone)", file=self._stream, flush=True)

        def keep_showing() -> None:
            while not ended.wait(_MOVES_S if self._draws else _EVERY_S):
                show()

        def advance() -> None:
            nonlocal done, first
            first, done = first or time.monotonic(), done + 1

        show()
        thread = threading.Thread(target=keep_showing, daemon=True)
        thread.start()
        try:
            yield advance
        finally:
            ended.set()
            thread.join()
            self._finished(title, time.monotonic() - began, steps)
            if self._draws:
                show()
                print(file=self._stream, flush=True)

    def outlook(self, title: str, began: float, first: float, done: int, steps: int) -> tuple[str, float]:
        """Return the next stage's title, empty for none, and the seconds until all is done; 0 if they are not known:
        without a plan, and before the pace of steps is.

        Args:
            began: when the stage ``title`` did.
            first: when the first of its steps was done; 0 before.
        """
        if title not in self._plan:
            return "", 0.0
        titles = list(self._plan)
        later = titles[titles.index(title) + 1 :]
        pace = self._took / self._usual if self._usual else 1.0
        following, now = next(iter(later), ""), time.monotonic()
        if steps == 1:
            own = max(0.0, pace * self._plan[title] - (now - began))
        elif not first or now - first < _SURE_S:
            return following, 0.0
        else:
            own = (now - first) * max(0, steps - done) / done
        return following, own + pace * sum(self._plan[each] for each in later)

    def _finished(self, title: str, took: float, steps: int) -> None:
        """Count a stage of the plan; one of several steps is a download, whose pace says nothing of this machine."""
        if title in self._plan and steps == 1:
            self._took, self._usual = self._took + took, self._usual + self._plan[title]


class JsonProgress(Progress):
    """Prints ``{"stage": ..., "part": 0 to 1, "next": ..., "left_s": ...}`` for each step, for other programs."""

    def __init__(self, stream: TextIO, *, plan: Mapping[str, float] = MappingProxyType({})) -> None:
        super().__init__(stream, quiet=True, plan=plan)

    @contextlib.contextmanager
    def stage(self, title: str, steps: int = 1) -> Iterator[Advance]:
        """See :meth:`Progress.stage`."""
        began, done, first = time.monotonic(), 0, 0.0

        def say() -> None:
            part = min(done / steps, 1.0)
            following, left = self.outlook(title, began, first, done, steps)
            said = {"stage": title, "part": part, "next": following, "left_s": round(left, 1)}
            print(json.dumps(said), file=self._stream, flush=True)

        def advance() -> None:
            nonlocal done, first
            first, done = first or time.monotonic(), done + 1
            say()

        say()
        yield advance
        self._finished(title, time.monotonic() - began, steps)
