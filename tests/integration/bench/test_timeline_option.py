"""``--timeline``: a verifier in a process of its own and a chat, drawn in one file."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from moa_bench.options import add_timeline_option, recording
from moa_bench.verifier import open_verifier
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.events import AnswerFinished
from moa_runtime.options import LoopSettings

Event = dict
DRAFT_LENGTH = 3
SLACK_US = 1.0  # microseconds since 1970 have more digits than a float


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_timeline_option(parser)
    return parser.parse_args(argv)


class Drawing:
    """A timeline's file; spans and marks by process and track, in the order in which they began."""

    def __init__(self, path: Path) -> None:
        self.events: list[Event] = json.loads(path.read_text())["traceEvents"]
        self.processes = {e["pid"]: e["args"]["name"] for e in self.events if e["name"] == "process_name"}
        threads = (e for e in self.events if e["name"] == "thread_name")
        self.tracks = {(e["pid"], e["tid"]): (self.processes[e["pid"]], e["args"]["name"]) for e in threads}

    def on(self, process: str, track: str, kind: str = "X") -> list[Event]:
        drawn = (event for event in self.events if event["ph"] == kind)
        found = [event for event in drawn if self.tracks[event["pid"], event["tid"]] == (process, track)]
        return sorted(found, key=lambda event: (event["ts"], -event.get("dur", 0.0)))

    @property
    def waits(self) -> list[Event]:
        return [span for span in self.on("device", "link") if span["name"] == "wait"]


def end(span: Event) -> float:
    return span["ts"] + span["dur"]


def names(events: list[Event]) -> list[str]:
    return [event["name"] for event in events]


def within(inner: Event, outer: Event) -> bool:
    return outer["ts"] - SLACK_US <= inner["ts"] and end(inner) <= end(outer) + SLACK_US


@pytest.fixture(scope="module")
def drawing(tiny, tmp_path_factory) -> Drawing:
    """Two answers with the connection closed and made again between them."""
    target, drafter, folder, backend, engine = tiny
    bundle = Bundle.open(folder)
    path = tmp_path_factory.mktemp("timeline") / "out.json"

    async def chat_twice(endpoint, timeline) -> None:
        shape = FixedShape(Budget.chain(DRAFT_LENGTH))
        proposing = MoaDrafter(backend, max_context=engine.max_context, stop_tokens=bundle.manifest.stop_tokens)
        device = LoopSettings(drafting="device")
        async with Chat(
            bundle, endpoint, drafter=proposing, controller=shape, settings=device, timeline=timeline
        ) as chat:
            await chat.open()
            for text in ("Name three primary colours.", "And now?"):
                events = [event async for event in chat.send(text, max_new_tokens=16)]
                assert isinstance(events[-1], AnswerFinished)
                await chat.work_offline(True)
                await chat.work_offline(False)

    with (
        recording(parsed("--timeline", str(path))) as (timeline, recorded),
        open_verifier(model=str(target), drafter=drafter, options=recorded) as verifier,
    ):
        asyncio.run(asyncio.wait_for(chat_twice(verifier.endpoint, timeline), 60))
    return Drawing(path)


def test_the_file_is_a_trace_of_all_work_of_both_ends(drawing: Drawing) -> None:
    assert sorted(drawing.processes.values()) == ["device", "verifier"] and os.getpid() in drawing.processes
    for event in drawing.events:
        assert event["ph"] in ("M", "X", "i") and event.get("dur", 0) >= 0
        assert event["ph"] == "M" or event["ts"] > 0
    connections = [("verifier", f"session 1, connection {number}") for number in (1, 2)]
    assert {("device", "draft"), ("device", "link"), *connections} <= set(drawing.tracks.values())
    assert set(names(drawing.on("device", "draft"))) == {"draft"}
    assert set(names(drawing.on("device", "link"))) == {"send", "wait", "receive"}
    first = names(drawing.on(*connections[0]))
    # The Welcome, then frame by frame: the verdict, and memory rows after it.
    assert first[:3] == ["send", "verify", "send"] and first[-1] == "send"
    assert all(after == "send" for name, after in pairwise(first) if name == "verify")
    assert first.count("send") > 1 + first.count("verify")
    marks = names(drawing.on("device", "link", "i"))
    assert marks[:2] == ["reconnecting", "online"] and "offline" in marks[2:]


def test_the_verifier_works_while_the_device_waits(drawing: Drawing) -> None:
    waits = drawing.waits
    verified = [
        span
        for process, track in drawing.tracks.values()
        for span in drawing.on(process, track)
        if process == "verifier" and span["name"] == "verify"
    ]
    assert len(waits) >= 4
    for wait in waits:
        inside = {span["name"]: span for span in verified if within(span, wait)}
        assert set(inside) == {"verify"}
        for name in ("drafted", "accepted"):
            assert inside["verify"]["args"][name] == wait["args"][name]
    # The system may stop the process between the two readings of a clock.
    assert median(wait["args"]["round_trip_ms"] - wait["dur"] / 1000 for wait in waits) >= -1
    assert len(verified) == len(waits)
    prompts = [span["args"] for span in verified if span["name"] == "verify" and span["args"]["prefill"]]
    assert len(prompts) == 2 and all(args["drafted"] == 0 for args in prompts)


def test_an_interrupted_recording_is_written_and_none_without_the_option(tmp_path: Path) -> None:
    with recording(parsed()) as (timeline, recorded):
        timeline.mark("here", "track")
        assert recorded == () and not [event for event in timeline.events if event["ph"] != "M"]
    path = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt), recording(parsed("--timeline", str(path)), "both ends") as (timeline, _):
        timeline.mark("here", "track")
        raise KeyboardInterrupt
    found = Drawing(path)
    assert list(found.processes.values()) == ["both ends"]
    assert names(found.on("both ends", "track", "i")) == ["here"]
