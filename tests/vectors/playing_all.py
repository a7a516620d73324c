"""Plays vectors with some runtime, and says which is the first that breaks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moa_runtime
from vectors import files
from vectors.figures import figures_of
from vectors.loop_playing import alike, replay_loop
from vectors.replaying import replay
from vectors.texts import texts

#: The exit status where one does.
BROKEN = 3
_SESSIONS = ("scripts", "spelled_out", "walks")


def play_sessions() -> None:
    """Raises AssertionError where one breaks; whatever else a mistake leads to."""
    for group in _SESSIONS:
        for trace in files.read(f"session/{group}"):
            replay(trace["name"], trace["steps"])


def play_the_rest() -> None:
    """The same of loops, figures and texts."""
    for trace in files.read("loop/walks"):
        replay_loop(trace["name"], trace["steps"])
    for name, cases in _cases():
        for number, (case, said) in enumerate(zip(cases, files.read(name), strict=True)):
            assert alike(case, said), f"{name}, case {number}"


def _cases() -> Iterator[tuple[str, list[Any]]]:
    for name, cases in figures_of().items():
        yield f"figures/{name}", cases
    for name, cases in texts().items():
        yield f"texts/{name}", cases


def main(package: str, what: str) -> int:
    """With the runtime that lies at ``package``; ``sessions``, or what is not of them."""
    if Path(moa_runtime.__file__).parent != Path(package):
        raise RuntimeError(f"this is the runtime at {moa_runtime.__file__}")
    try:
        play_sessions() if what == "sessions" else play_the_rest()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        return BROKEN
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
