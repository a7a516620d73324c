"""Timelines in Chrome's Trace Event Format."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from moa_runtime.timeline import NO_TIMELINE, Timeline, read_sink, write_timeline
from support.refusals import refused


def filled(sink: Path | None = None) -> Timeline:
    timeline = Timeline("device", sink)
    timeline.span("wait", 2_000_000, 5_500_000, "link", drafted=6)
    with timeline.measure("draft", "draft", position=3):
        timeline.mark("offline", "link", detail="late")
    return timeline


def check(events: list[dict]) -> None:
    """The events of :func:`filled`."""
    process, link, wait, mark, track, draft = events
    assert {event["pid"] for event in events} == {os.getpid()}
    assert (process["ph"], process["name"], process["args"]) == ("M", "process_name", {"name": "device"})
    assert (link["ph"], link["name"], link["args"]) == ("M", "thread_name", {"name": "link"})
    assert (wait["ph"], wait["name"], wait["args"]) == ("X", "wait", {"drafted": 6})
    assert (wait["ts"], wait["dur"], wait["tid"]) == (2000.0, 3500.0, link["tid"])
    assert (mark["ph"], mark["s"], mark["name"], mark["tid"]) == ("i", "t", "offline", link["tid"])
    assert (track["args"], track["tid"]) == ({"name": "draft"}, draft["tid"])
    assert (draft["args"], draft["tid"] != link["tid"]) == ({"position": 3}, True)
    assert draft["ts"] <= mark["ts"] <= draft["ts"] + draft["dur"]


def test_events_are_kept_in_the_format(tmp_path: Path) -> None:
    timeline = filled()
    write_timeline(tmp_path / "out.json", timeline.events)
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["traceEvents"] == timeline.events
    check(timeline.events)


def test_a_sink_has_every_event_at_once_and_keeps_none_in_memory(tmp_path: Path) -> None:
    sink = tmp_path / "sink.json"
    timeline = filled(sink)
    events = read_sink(sink)
    check(events)
    assert timeline.events == []
    timeline.close()
    assert json.loads(sink.read_text().rstrip(",\n") + "]") == events  # the format lets the bracket be left out
    sink.write_bytes(sink.read_bytes()[:-20])  # the process was killed in the middle of an event
    assert read_sink(sink) == events[:-1]


def test_threads_share_a_timeline(tmp_path: Path) -> None:
    timeline = Timeline("device", tmp_path / "sink.json")

    def work(number: int) -> None:
        for _ in range(50):
            timeline.span("work", 0, 1, f"thread {number % 2}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    events = read_sink(tmp_path / "sink.json")
    assert sum(event["ph"] == "X" for event in events) == 200
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert sorted(names) == ["thread 0", "thread 1"]


def test_no_timeline_keeps_nothing() -> None:
    before = NO_TIMELINE.events
    NO_TIMELINE.mark("offline", "link")
    with NO_TIMELINE.measure("draft", "draft"):
        NO_TIMELINE.span("wait", 0, 1, "link")
    assert NO_TIMELINE.events == before


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with refused("cannot_write"):
        Timeline("device", tmp_path / "nowhere" / "sink.json")
    with refused("cannot_write"):
        write_timeline(tmp_path, [])
