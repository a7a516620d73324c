"""Spans of work in Chrome's Trace Event Format, which Perfetto and chrome://tracing draw.

Format: "Trace Event Format", Google: complete events (``ph: "X"``) and instant events (``ph: "i"``), times in
microseconds. Times are wall-clock, so that the timelines of two processes on one machine fit together.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moa_runtime.errors import MoaError


class Timeline:
    """Spans and marks of one process. Any thread may add to it.

    Spans of one track must follow each other or lie within each other; others belong on another track.

    Args:
        process: its name in the drawing, such as ``"device"``.
        sink: file that takes each event at once, one a line, instead of this object: for a process that runs for long
            or may be killed. It is the format's array without its closing bracket, which Perfetto opens at any time;
            see also :func:`read_sink`.

    Raises:
        MoaError: ``sink`` cannot be written.
    """

    def __init__(self, process: str, sink: Path | None = None) -> None:
        self._pid = os.getpid()
        self._tracks: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        try:
            self._sink = None if sink is None else sink.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise MoaError(f"cannot write the timeline {sink}: {error.strerror}", code="cannot_write") from error
        if self._sink is not None:
            self._sink.write("[\n")
        self._add({"ph": "M", "name": "process_name", "args": {"name": process}})

    def span(self, name: str, began: int, ended: int, track: str, **details: Any) -> None:
        """Add a span from ``began`` to ``ended`` (``time.time_ns()``) on a named track of the process."""
        times = {"ts": began / 1000, "dur": max(0, ended - began) / 1000}
        self._add({"ph": "X", "name": name, "tid": self._tid(track), **times, "args": details})

    def mark(self, name: str, track: str, **details: Any) -> None:
        """Add an event at the present time."""
        now = time.time_ns() / 1000
        self._add({"ph": "i", "s": "t", "name": name, "tid": self._tid(track), "ts": now, "args": details})

    @contextlib.contextmanager
    def measure(self, name: str, track: str, **details: Any) -> Iterator[None]:
        """Add a span of the block's time."""
        began = time.time_ns()
        try:
            yield
        finally:
            self.span(name, began, time.time_ns(), track, **details)

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events so far; none with a sink, which has them."""
        with self._lock:
            return list(self._events)

    def close(self) -> None:
        """Close the sink; nothing may be added afterwards."""
        if self._sink is not None:
            self._sink.close()

    def _tid(self, track: str) -> int:
        """Return the number of a track, which is named before it is first used."""
        with self._lock:
            if track not in self._tracks:
                self._tracks[track] = len(self._tracks) + 1
                name = {"ph": "M", "name": "thread_name", "tid": self._tracks[track], "args": {"name": track}}
                self._write(name)
            return self._tracks[track]

    def _add(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        event["pid"] = self._pid
        if self._sink is None:
            self._events.append(event)
        else:
            self._sink.write(f"{json.dumps(event)},\n")


class _NoTimeline(Timeline):
    """Drop everything."""

    def _add(self, event: dict[str, Any]) -> None:
        pass

    def _tid(self, track: str) -> int:
        return 0


#: For callers without a timeline.
NO_TIMELINE: Timeline = _NoTimeline("")


def read_sink(path: Path) -> list[dict[str, Any]]:
    """Return the events that another process wrote to its ``sink``, without an incomplete last line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line[:-2]) for line in lines if line.endswith(",\n")]


def write_timeline(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Write a file for Perfetto; raise MoaError if it cannot be written."""
    try:
        path.write_text(json.dumps({"traceEvents": list(events)}), encoding="utf-8")
    except OSError as error:
        raise MoaError(f"cannot write the timeline {path}: {error.strerror}", code="cannot_write") from error
