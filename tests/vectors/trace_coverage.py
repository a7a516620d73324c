"""Features that traces of client sessions must cover, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from moa_runtime.session.events import Cause, Origin, Policy
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from vectors.trace_recorder import CALLS, SETTINGS, Step

_RESUMES = ("idle", "cancels", "proposes", "fetches", "held", "replays", "keeps and prompts", "prompts")
_STALE = ("verdict", "standing", "fault", "rows")
EVENTS = (
    "Welcomed",
    "Echoed",
    "RowsReceived",
    "Decided",
    "Committed",
    "RolledBack",
    "Finished",
    "Faulted",
    "Resumed",
)

REQUIRED = frozenset(
    [f"call {name}" for name in (*CALLS, "create", "restore") if name != "frames_to_send"]
    + [f"set {name}" for name in SETTINGS]
    + [f"event {name}" for name in EVENTS]
    + [f"fault {name}" for name in wire.FaultCode.keys()]  # noqa: SIM118
    + [f"finish {name}" for name in wire.Finish.keys()]  # noqa: SIM118
    + [f"policy {policy.value}" for policy in Policy]
    + [f"origin {origin.value}" for origin in Origin]
    + [f"cause {cause.value}" for cause in Cause]
    + [f"resume {branch}" for branch in _RESUMES]
    + [f"stale {kind}" for kind in _STALE]
    + [f"rows {encoding}" for encoding in wire.RowEncoding.keys()]  # noqa: SIM118
    + [f"sends {kind}" for kind in ("hello", "prompt", "draft", "cancel", "credit")]
    + ["sends tree", "hand-over to the server", "hand-over to the device", "drafts wanted", "no message"]
    + [
        "shared target",
        "unknown fault",
        "raises LocalProtocolError",
        "raises SnapshotError",
        "server drafts",
        "larger than 2^53",
    ]
)


def features(steps: Iterable[Step]) -> set[str]:
    """Return the features of :data:`REQUIRED` that a trace covers."""
    found: set[str] = set()
    state: dict[str, Any] = {}
    for step in steps:
        before, state = state, state | step.get("state", {})
        found.update(_of_call(step), _of_events(step.get("events", [])), _of_frames(step.get("frames", [])))
        found.add(f"policy {state.get('policy')}")
        message = step.get("args", {}).get("data")
        if message is not None:
            found.update(_of_message(message, before, state))
            if "welcome" in message and before["link"] == "handshake" and state["link"] == "up":
                found.add(f"resume {_resumed(step, message['welcome'], before, state)}")
        if isinstance(state.get("epoch"), str):
            found.add("larger than 2^53")
    return found & REQUIRED


def _of_call(step: Step) -> Iterator[str]:
    yield f"call {step['call']}" if "call" in step else f"set {step['set']}"
    if "raises" in step:
        yield f"raises {step['raises']['error']}"


def _of_events(events: list[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        yield f"event {event['event']}"
        yield from (f"origin {origin}" for origin in event.get("origins", []))
        if "cause" in event:
            yield f"cause {event['cause']}"
        if event.get("drafts_wanted"):
            yield "drafts wanted"
        if event["event"] == "Decided" and event["sharing"] > 1:
            yield "shared target"
        if event.get("drafts"):
            yield "server drafts"


def _of_frames(frames: list[dict[str, Any]]) -> Iterator[str]:
    for frame in frames:
        for kind, said in frame.items():
            yield f"sends {kind}"
            if said.get("parents"):
                yield "sends tree"
            if kind == "credit":
                yield f"hand-over to the {'server' if int(said.get('position', 0)) else 'device'}"


def _of_message(message: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    if "bytes" in message:
        yield "no message"
    for kind in _STALE:
        older = kind in message and 0 < int(message[kind].get("epoch", 0)) < int(before["epoch"])
        # Older rows hold where nothing was cut.
        if older and (kind != "rows" or before["rows"] == after["rows"]):
            yield f"stale {kind}"
    if "fault" in message:
        code = message["fault"].get("code", "FAULT_CODE_UNSPECIFIED")
        yield f"fault {code}" if isinstance(code, str) else "unknown fault"
    if "verdict" in message:
        yield f"finish {message['verdict'].get('finish', 'FINISH_UNSPECIFIED')}"
    if "rows" in message:
        yield f"rows {message['rows'].get('encoding', 'ROW_ENCODING_UNSPECIFIED')}"


def _resumed(step: Step, welcome: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> str:
    """Name the client's reaction to a Welcome."""
    sent = {kind for frame in step.get("frames", []) for kind in frame}
    if not before["answering"]:
        return "cancels" if "cancel" in sent else "idle"
    if "prompt" in sent:
        if after["supplied"] != before["supplied"] and after["kept"]:
            return "keeps and prompts"
        return "replays" if any(event["event"] == "Resumed" for event in step.get("events", [])) else "prompts"
    if welcome.get("verdictFollows"):
        return "fetches"
    return "proposes" if "draft" in sent else "held"
