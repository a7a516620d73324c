"""The tables of docs/protocol.md, written from the code's.

``PYTHONPATH=tests python -m support.session.protocol_tables`` puts them into the page.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from pathlib import Path

from moa_runtime.session import client_table as client
from moa_runtime.session import server_table as server

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
_PLACE = re.compile(r"(<!-- table: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _names(states: Collection[enum.Enum], order: type[enum.Enum]) -> str:
    """Name states in the order of their class, or those that are missing if these are few."""
    missing = [state.name for state in order if state not in states]
    if len(missing) <= 3 < len(states):
        return f"all but {', '.join(missing)}" if missing else "all"
    return ", ".join(state.name for state in order if state in states)


def _alike(rows: Mapping[enum.Enum, Hashable]) -> list[tuple[list[enum.Enum], Hashable]]:
    """States with the same rule together, in the order in which the first of them comes."""
    groups: dict[Hashable, list[enum.Enum]] = {}
    order = [state for state in (*client.State, *server.State) if state in rows]
    for state in order:
        groups.setdefault(rows[state], []).append(state)
    return [(states, rule) for rule, states in groups.items()]


def _states(states: type[enum.Enum]) -> str:
    return _table(["state", "meaning"], ([state.name, state.value] for state in states))


def _client_calls() -> str:
    rows = []
    for call, rule in client.CALLS.items():
        following = {
            state: None if next_states == {state} else next_states for state, next_states in rule.next_states.items()
        }
        steps, named = [], 0
        for states, next_states in _alike(following):
            named += len(states)
            last = len(following) == len(client.State) == named > len(states)
            before = "all others" if last else _names(states, client.State)
            then = _names(next_states, client.State) if isinstance(next_states, frozenset) else "same"
            steps.append(f"{before} → {then}")
        rows.append([f"`{call.value}`", rule.effect, "; ".join(steps)])
    return _table(["call", "effect", "in → then"], rows)


def _client_frames() -> str:
    rows = []
    for event in client.Event:
        name = event.value
        for states, row in _alike(client.FRAMES[event]):
            assert isinstance(row, client.Transition)
            following = _names(row.next_states, client.State) if row.next_states else "same"
            rows.append([name, _names(states, client.State), row.action.value, following])
            name = ""
        if not client.FRAMES[event]:
            rows.append([name, "all", client.Action.DROP.value, "same"])
    return _table(["frame", "in", "action", "then"], rows)


def _server_frames() -> str:
    rows = []
    for event in server.Event:
        name = event.value
        for states, row in _alike(server.FRAMES[event]):
            assert isinstance(row, server.Transition)
            following = "same" if row.next_state is None else row.next_state.name
            rows.append([name, _names(states, server.State), row.action.value, following])
            name = ""
    return _table(["frame", "in", "action", "then"], rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "client states": lambda: _states(client.State),
    "client calls": _client_calls,
    "client frames": _client_frames,
    "server states": lambda: _states(server.State),
    "server frames": _server_frames,
}


def written(page: str) -> str:
    """The page with its tables as they should be.

    Raises:
        ValueError: a table has no place in it, or more than one.
    """
    places = [match[2] for match in _PLACE.finditer(page)]
    if sorted(places) != sorted(TABLES):
        raise ValueError(f"the page has places for {places}, the tables are {list(TABLES)}")
    return _PLACE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
