"""Features that traces of drafting loops must cover, by name."""

from __future__ import annotations

from collections.abc import Iterable

from moa_runtime.events import LinkStatus, PauseReason
from vectors.loop_replay import Said
from vectors.trace_coverage import EVENTS

_OF_LOOPS = ("Drafted", "RoundEnded", "Pushed", "LinkChanged", "LinkLost", "PauseBegan", "Problem")

REQUIRED_OF_LOOPS = frozenset(
    [f"event {name}" for name in (*EVENTS, *_OF_LOOPS)]
    + [f"pause {reason.value}" for reason in PauseReason]
    + [f"link {status.value}" for status in LinkStatus]
    + [f"sends {kind}" for kind in ("hello", "prompt", "draft", "cancel", "credit")]
    + ["drafter drafted", "drafter offline", "writer offline", "tree", "a draft on trial", "a draft ahead of a verdict"]
    + ["to the server", "to the device", "late", "rows refused", "answers without being asked", "waits for ever"]
)


def features_of_loop(steps: Iterable[Said]) -> set[str]:
    """Return the features of :data:`REQUIRED_OF_LOOPS` that a trace covers."""
    found: set[str] = set()
    todo: Said = {}
    awaited = False
    for step in steps:
        for event in step.get("events", []):
            found.add(f"event {event['event']}")
            found.add(f"pause {event.get('reason')}")
            found.add(f"link {event.get('status')}")
            if "late" in event.get("detail", ""):
                found.add("late")
            if event.get("code") == "ROWS_MISMATCH":
                found.add("rows refused")
            if event.get("cause") == "fetched":
                found.add("answers without being asked")
            if event["event"] == "Decided":
                awaited = False
        for frame in step.get("frames", []):
            found.update(f"sends {kind}" for kind in frame)
            awaited = awaited or "draft" in frame
            if "credit" in frame:
                found.add("to the server" if int(frame["credit"].get("position", 0)) else "to the device")
            if frame.get("draft", {}).get("parents"):
                found.add("tree")
        if step["call"] == "lost":
            awaited = False
        if step["call"] == "drafted":
            if "events" not in step and step["args"]["tree"]["tokens"]:
                found.add("a draft on trial")
            elif awaited:
                found.add("a draft ahead of a verdict")
        todo = step.get("todo", todo)
        if "draft" in todo:
            found.add(f"{todo['draft']['by']} {todo['draft']['origin']}")
        elif todo.get("wait", 0) is None:
            found.add("waits for ever")
    return found & REQUIRED_OF_LOOPS
