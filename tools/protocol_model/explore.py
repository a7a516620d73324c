"""Visits every state that can be reached, and runs each to its end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from protocol_model.client import WrongError
from protocol_model.world import Bounds, World, done, necessary, problem, start, steps

#: A quiet run has no longer way to go.
_LONGEST_RUN = 200


class FoundError(AssertionError):
    """A way to a state that must not be."""


@dataclass(frozen=True)
class Explored:
    """How much was seen."""

    states: int
    steps: int
    longest_run: int


def explore(bounds: Bounds) -> Explored:
    """Every state within ``bounds``.

    Raises:
        FoundError: one breaks a rule, or cannot come to its end without further mishaps; with the way to it.
    """
    first = start(bounds)
    came: dict[World, tuple[World, str] | None] = {first: None}
    waiting = deque([first])
    runs: dict[World, int] = {}
    taken = 0
    while waiting:
        world = waiting.popleft()
        wrong = problem(world)
        if wrong:
            raise _found(came, world, wrong)
        _run(world, runs, came)
        following = steps(world)
        while True:
            try:
                name, after = next(following)
            except StopIteration:
                break
            except WrongError as error:
                raise _found(came, world, str(error)) from error
            taken += 1
            if after not in came:
                came[after] = (world, name)
                waiting.append(after)
    return Explored(len(came), taken, max(runs.values()))


def _run(world: World, runs: dict[World, int], came: dict[World, tuple[World, str] | None]) -> None:
    """The quiet run from here: nothing more goes wrong, and the answer becomes complete."""
    path: list[World] = []
    names: list[str] = []
    at = world
    while at not in runs and not done(at):
        path.append(at)
        if len(path) > _LONGEST_RUN:
            raise _found(came, world, "it never ends: " + " / ".join(names[-12:]))
        try:
            name, at = next(necessary(at), ("", at))
        except WrongError as error:
            raise _found(came, world, f"in a quiet run: {error}: {names}") from error
        if not name:
            raise _found(came, world, f"nothing happens any more, after {names}: {at}")
        names.append(name)
    length = runs.get(at, 0)
    for back, passed in enumerate(reversed(path), 1):
        runs[passed] = length + back
    runs.setdefault(world, length)


def _found(came: dict[World, tuple[World, str] | None], world: World, what: str) -> FoundError:
    way: list[str] = []
    at: tuple[World, str] | None = came[world]
    while at is not None:
        way.append(at[1])
        at = came[at[0]]
    lines = "\n".join(f"{number}. {name}" for number, name in enumerate(reversed(way), 1))
    return FoundError(f"{what}\n{lines}\n{world}")
