"""Replays a trace of a client session and names the first difference."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from moa_runtime.bundle import Fingerprints
from moa_runtime.session.client import ClientSession, LocalProtocolError
from moa_runtime.session.events import Origin, Policy, Sampling
from moa_runtime.session.snapshot import SnapshotError
from moa_runtime.session.tree import DraftTree
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from vectors import trace_json
from vectors.trace_recorder import Step, outcome, raised, state_of


class ReplayError(AssertionError):
    """A step had another result than in the trace."""


def replay(name: str, steps: list[Step]) -> None:
    """Play a trace.

    Raises:
        ReplayError: with the trace, the step, and what differs.
    """
    client: ClientSession | None = None
    state: dict[str, Any] = {}
    for number, step in enumerate(steps):
        client, got = _played(client, step)
        if "frames" in step and "frames" not in got and client is not None:
            got |= outcome("frames_to_send", client.frames_to_send())
        expected = {key: step[key] for key in ("returns", "events", "frames", "raises") if key in step}
        state |= step.get("state", {})
        if got != expected:
            raise ReplayError(f"{name}, step {number}, {_title(step)}: expected {expected}, got {got}")
        now = {} if client is None else state_of(client)
        for key in sorted(state.keys() | now.keys()):
            if state.get(key) != now.get(key):
                text = f"{key} should be {state.get(key)}, is {now.get(key)}"
                raise ReplayError(f"{name}, step {number}, {_title(step)}: {text}")


def _played(client: ClientSession | None, step: Step) -> tuple[ClientSession | None, dict[str, Any]]:
    """Do a step; return the session and the result of the call."""
    if "set" in step:
        value = step["value"]
        setattr(client, step["set"], Policy(value) if step["set"] == "policy" else value)
        return client, {}
    name = step["call"]
    args = {key: _argument(name, key, value) for key, value in step.get("args", {}).items()}
    try:
        if name in ("create", "restore"):
            return (ClientSession if name == "create" else ClientSession.restore)(**args), {}
        call: Callable[..., Any] = getattr(client, name)
        return client, outcome(name, _call(call, args))
    except (LocalProtocolError, SnapshotError) as error:
        return client, raised(error)


def _call(call: Callable[..., Any], args: dict[str, Any]) -> Any:
    """Call with positional arguments, except for keyword-only ones."""
    parameters = inspect.signature(call).parameters.values()
    positional = [args.pop(each.name) for each in parameters if each.kind is not each.KEYWORD_ONLY]
    return call(*positional, **args)


def _argument(call: str, key: str, value: Any) -> Any:
    if key == "fingerprints":
        return Fingerprints(**value)
    if key == "sampling":
        return Sampling(**value | {"seed": int(value["seed"])})
    if key == "policy":
        return Policy(value)
    if key == "origin":
        return Origin(value)
    if key == "data":
        return trace_json.frame_bytes(value, wire.ServerMessage)
    if key == "tree" and value is not None:
        tokens = tuple(value["tokens"])
        return DraftTree(tokens, tuple(value["parents"]), (0.0,) * len(tokens))
    if key == "snapshot" and isinstance(value, dict):
        return _whole_numbers(value)
    return value


def _whole_numbers(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Restore large integers, which the vectors write as strings."""

    def whole(value: object) -> object:
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    numbers = {key: whole(snapshot[key]) for key in ("epoch", "connection", "max_length") if key in snapshot}
    sampling = snapshot.get("sampling")
    if isinstance(sampling, dict) and "seed" in sampling:
        numbers["sampling"] = sampling | {"seed": whole(sampling["seed"])}
    return snapshot | numbers


def _title(step: Step) -> str:
    return str(step.get("call") or f"set {step.get('set')}")
