"""Spans of work in Chrome's Trace Event Format, which Perfetto and chrome://tracing draw.

Format: "Trace Event Format", Google, the JSON array with complete events (``ph: "X"``, times in microseconds).
Times are wall-clock, so that the timelines of two processes on one machine fit together.
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


class Timeline:
    """What one process did and when. Any thread may add to it.

    Args:
        process: its name in the drawing, such as ``"device"``.
        sink: file to which each event is also written at once, one JSON object a line; for a process that
            may be killed.
    """

    def __init__(self, process: str, sink: Path | None = None) -> None:
        self._pid = os.getpid()
        self._tracks: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._sink = None if sink is None else sink.open("a", encoding="utf-8", buffering=1)
        self._add({"ph": "M", "name": "process_name", "pid": self._pid, "args": {"name": process}})

    def span(self, name: str, began: int, ended: int, track: str, **details: Any) -> None:
        """Add what took from ``began`` to ``ended`` (``time.time_ns()``) on a named track of the process."""
        with self._lock:
            new = track not in self._tracks
            tid = self._tracks.setdefault(track, len(self._tracks) + 1)
        if new:
            self._add({"ph": "M", "name": "thread_name", "pid": self._pid, "tid": tid, "args": {"name": track}})
        event = {"ph": "X", "name": name, "pid": self._pid, "tid": tid, "args": details}
        self._add({**event, "ts": began / 1000, "dur": max(0, ended - began) / 1000})

    @contextlib.contextmanager
    def measure(self, name: str, track: str, **details: Any) -> Iterator[None]:
        """Add what the block takes."""
        began = time.time_ns()
        try:
            yield
        finally:
            self.span(name, began, time.time_ns(), track, **details)

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events so far."""
        with self._lock:
            return list(self._events)

    def _add(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._events.append(event)
            if self._sink is not None:
                self._sink.write(json.dumps(event) + "\n")


def read_sink(path: Path) -> list[dict[str, Any]]:
    """Events that another process wrote to its ``sink``; a last line cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_timeline(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Write a file that Perfetto opens."""
    path.write_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}), encoding="utf-8")
