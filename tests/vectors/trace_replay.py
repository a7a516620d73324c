"""Plays recorded conversations of client sessions, to check them or to write their results anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moa_runtime.manifest import Fingerprints
from moa_runtime.session.client import ClientSession, LocalProtocolError
from moa_runtime.session.client_frames import BrokenFrameError, classify, parse_server_message
from moa_runtime.session.client_table import Call, Event, State
from moa_runtime.session.events import Origin, Policy, Sampling
from moa_runtime.session.snapshot import SnapshotError
from moa_runtime.session.tree import DraftTree
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from vectors import trace_json

Step = dict[str, Any]
#: A call or frame, with the states before and after it.
Seen = tuple[Call | Event, State, State]

#: Calls that return events.
_TELLING = ("resume", "cancel", "keep", "receive")
#: Part of the state beside the values of a snapshot.
_LIVE = (
    "link",
    "rows",
    "held",
    "wants_rows",
    "credit",
    "credit_open",
    "server_may_push",
    "awaiting_verdict",
    "awaiting_prefill",
    "may_propose",
    "may_send_unsolicited",
    "may_grant_credit",
    "rows_coming",
    "stamp",
    "room",
    "tentative_finish",
    "max_new_tokens",
    "unconfirmed",
)


def play(steps: Sequence[Step], seen: set[Seen] | None = None) -> Iterator[Step]:
    """Make the calls of a trace; yield each step with its present result and changes of state.

    Args:
        steps: calls with their arguments; frames are taken after a step that has ``frames``.
        seen: gets each call and frame with its states.
    """
    client: ClientSession | None = None
    state: dict[str, Any] = {}
    for step in steps:
        before, what = (None, None) if client is None else (client.state, _kind(client, step))
        client, result = _do(client, step)
        now = {} if client is None else _state_of(client)
        changed = {key: value for key, value in now.items() if key not in state or state[key] != value}
        state = now
        if seen is not None and before is not None and what is not None and client is not None:
            seen.add((what, before, client.state))
        if changed:
            result["state"] = changed
        if "frames" in step and "frames" not in result and client is not None:
            result["frames"] = [trace_json.up(data) for data in client.frames_to_send()]
        yield {key: step[key] for key in ("call", "args", "set", "value") if key in step} | result


def replay(name: str, steps: Sequence[Step], seen: set[Seen] | None = None) -> None:
    """Play a trace; raise AssertionError with the first difference."""
    for number, (expected, got) in enumerate(zip(steps, play(steps, seen), strict=True)):
        assert got == expected, f"{name}, step {number}: expected {expected}, got {got}"


def _do(client: ClientSession | None, step: Step) -> tuple[ClientSession | None, Step]:
    """Do a step; return the session and the result of the call as fields of the step."""
    if "set" in step:
        setattr(client, step["set"], Policy(step["value"]) if step["set"] == "policy" else step["value"])
        return client, {}
    name = step["call"]
    args = {key: _argument(key, value) for key, value in step.get("args", {}).items()}
    try:
        if name in ("create", "restore"):
            return (ClientSession if name == "create" else ClientSession.restore)(**args), {}
        result = getattr(client, name)(**args)
    except SnapshotError as error:  # its text shows Python values
        return client, {"raises": {"error": type(error).__name__}}
    except LocalProtocolError as error:
        return client, {"raises": {"error": type(error).__name__, "text": str(error)}}
    if result is None or (name in _TELLING and not result):
        return client, {}
    if name in _TELLING:
        return client, {"events": [trace_json.event(event) for event in result]}
    if name == "frames_to_send":
        return client, {"frames": [trace_json.up(data) for data in result]}
    return client, {"returns": trace_json.plain(result)}


def _kind(client: ClientSession, step: Step) -> Call | Event | None:
    """Return the table's call or event of a step; None if it is neither."""
    if step.get("call") == "receive":
        try:
            message = parse_server_message(_argument("data", step["args"]["data"]))
        except BrokenFrameError:
            return None
        return classify(message, client.snapshot()["epoch"])
    return next((call for call in Call if call.value == step.get("call")), None)


def _state_of(client: ClientSession) -> dict[str, Any]:
    """Return the public state of a session without its fingerprints."""
    said = {key: value for key, value in client.snapshot().items() if key not in ("version", "fingerprints")}
    return trace_json.plain(said | {name: getattr(client, name) for name in _LIVE})  # type: ignore[no-any-return]


def _argument(key: str, value: Any) -> Any:
    if key == "fingerprints":
        return Fingerprints(**value)
    if key == "sampling":
        return Sampling(**value | {"seed": int(value["seed"])})
    if key in ("policy", "origin"):
        return (Policy if key == "policy" else Origin)(value)
    if key == "data":
        return trace_json.frame_bytes(value, wire.ServerMessage)
    if key == "tree" and value is not None:
        tokens = tuple(value["tokens"])
        return DraftTree(tokens, tuple(value["parents"]), tuple(value.get("scores", (0.0,) * len(tokens))))
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
