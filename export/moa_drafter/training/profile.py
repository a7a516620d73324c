"""Where the time of a training step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Seconds by part; a part inside another counts for itself only. Off, it costs nothing.

    On a GPU each boundary waits for the device, so what is measured is true and the whole is slower.
    """

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if not self.on:
            yield
            return
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its time counted as ``name``."""

        def watched(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*args, **options)

        return watched

    def shares(self) -> dict[str, float]:
        """Share of the time by part, most first."""
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in sorted(self.seconds.items(), key=lambda item: -item[1])}

    def _turn(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
