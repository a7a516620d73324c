"""A log that nobody can fill from outside: so many lines a minute for each message."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_MOST_KEYS = 1000


class LogLimit(logging.Filter):
    """Lets through ``lines`` records of each message in ``seconds``; the next one after tells how many were left out.

    A message is a logger, a level, a format string and the type of the exception, so arguments make no new one. As a
    filter of a handler it limits every logger that the handler serves.
    """

    def __init__(self, lines: int = 10, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._lines, self._seconds, self._clock = lines, seconds, clock
        self._spans: dict[object, list[float]] = {}  # each: when it began, lines let through, lines left out
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        exception = record.exc_info[0] if record.exc_info else None
        key = (record.name, record.levelno, str(record.msg), exception)
        with self._lock:
            now = self._clock()
            span = self._spans.get(key)
            left_out = 0
            if span is None or now - span[0] >= self._seconds:
                left_out = int(span[2]) if span else 0
                if span is None and len(self._spans) >= _MOST_KEYS:  # a format string that is none
                    self._spans.pop(next(iter(self._spans)))
                span = self._spans[key] = [now, 0, 0]
            if span[1] >= self._lines:
                span[2] += 1
                return False
            span[1] += 1
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (and {left_out} more like it, left out)", ()
        return True
