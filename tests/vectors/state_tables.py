"""The transition table of the client session; a port has the same one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moa_runtime.session.client_table import CALLS, Event, State, transition
from vectors.walks import Draws


def client_table(draws: Draws) -> Iterator[dict[str, Any]]:
    """Yield each call, then each event, with all states; nothing is drawn."""
    for call, rule in CALLS.items():
        following = {
            state.name.lower(): _named(rule.next_states[state]) for state in State if state in rule.next_states
        }
        yield {"call": call.value, "next_states": following, "refusal": rule.refusal}
    for event in Event:
        transitions = {}
        for state in State:
            action, next_states = transition(event, state)
            transitions[state.name.lower()] = {"action": action.name.lower(), "next_states": _named(next_states)}
        yield {"event": event.name.lower(), "transitions": transitions}


def _named(states: frozenset[State]) -> list[str]:
    return [state.name.lower() for state in State if state in states]
