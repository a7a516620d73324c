"""The table of a client session, rule by rule: a port has the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moa_runtime.session.client_table import CALLS, Heard, State, row_of
from vectors.walks import Draws


def client_states(draws: Draws) -> Iterator[dict[str, Any]]:
    """Each call, then each frame, with all states; nothing is drawn."""
    for call, rule in CALLS.items():
        leads = {state.name.lower(): _named(rule.leads[state]) for state in State if state in rule.leads}
        yield {"call": call.value, "leads": leads, "refusal": rule.refusal}
    for heard in Heard:
        rows = {state: row_of(heard, state) for state in State}
        said = {s.name.lower(): {"does": row.does.name.lower(), "leads": _named(row.leads)} for s, row in rows.items()}
        yield {"frame": heard.name.lower(), "rows": said}


def _named(states: frozenset[State]) -> list[str]:
    return [state.name.lower() for state in State if state in states]
