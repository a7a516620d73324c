"""Progress of long work: a bar on a terminal, otherwise a line at the beginning and every ten seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_EVERY_S = 10.0
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed} gone, {remaining} to go{postfix}"


class Progress(tqdm):  # type: ignore[type-arg]  # of whatever it counts
    """A ``tqdm`` bar on stderr, with the same arguments; it prints its first line at once."""

    def __init__(self, iterable: Iterable[Any] | None = None, **options: Any) -> None:
        self._draws = sys.stderr.isatty()
        if not self._draws:
            options |= {"mininterval": _EVERY_S, "maxinterval": _EVERY_S, "miniters": 1}
            options |= {"bar_format": _LINE, "leave": False}
        super().__init__(iterable, file=sys.stderr, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Show the state; called by ``tqdm``."""
        if self._draws:
            return super().display(msg, pos)
        if msg is None:
            print(self, file=sys.stderr, flush=True)
        return False
