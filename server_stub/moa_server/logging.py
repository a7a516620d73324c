"""Log lines of the verifier: text or JSON, with the fields of their session, and limited in number.

Each record is one printable, short line, whatever a client sent: :func:`_clean` ensures that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

_log = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

#: Loggers of the parts of ours that ``--log-level`` is about; those of libraries tell warnings and worse.
_OWN = ("moa_server", "moa_drafter", "moa_runtime")
#: Lines a minute of one kind: of complaints a few tell all, of sessions that come and go one wants to see each.
_COMPLAINTS, _EVENTS = 10, 1000
#: Limits of a text's characters (its middle is cut out) and of a traceback's lines (the last ones stay).
_LONGEST, _LAST = 1000, 200
_MOST_LINES = 100
_MOST_KEYS = 1000
_SPAN_S = 60.0

_FIELDS: ContextVar[dict[str, Any] | None] = ContextVar("log_fields", default=None)


@contextlib.contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Add these fields to lines logged in this block and by tasks that begin in it."""
    token = _FIELDS.set(fields)
    try:
        yield
    finally:
        _FIELDS.reset(token)


def add_log_fields(**fields: Any) -> None:
    """Add fields to the surrounding block of :func:`log_fields` and to its running tasks."""
    current = _FIELDS.get()
    if current is not None:
        current.update(fields)


def log_unexpected(logger: logging.Logger, where: str, error: BaseException) -> None:
    """Log an unexpected exception as one line; its traceback only at the level debug."""
    logger.error("%s: unexpected %s: %s (%s)", where, type(error).__name__, error, _place(error))
    logger.debug("the way to it", exc_info=error)


def complain(text: str) -> None:
    """Log the error that ends the program."""
    _log.error("%s", text)


def handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle exceptions of an event loop that asyncio would log with a traceback."""
    error = context.get("exception")
    if isinstance(error, OSError):  # the end of a connection; TLS errors are OSErrors too
        _log.debug("a connection ended: %s", error)
    elif error is not None:
        log_unexpected(_log, "in the background", error)
    elif loop.is_closed():  # a connection's task that granian began while the loop ended
        _log.debug("after the end: %s", context.get("message"))
    else:
        _log.error("in the background: %s", context.get("message"))


class TextLines(logging.Formatter):
    """``moa-serve: warning: what happened [session 3, connection 1, alice]``, one line but for tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        named = {"session": "session ", "connection": "connection ", "bearer": ""}
        fields = _FIELDS.get() or {}
        about = ", ".join(f"{named[name]}{fields[name]}" for name in named if fields.get(name))
        text = f"moa-serve: {record.levelname.lower()}: {_clean(record.getMessage())}"
        if about:
            text += f" [{_clean(about)}]"
        return "\n  ".join([text, *_traceback_lines(self, record)])


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``, and where they are known
    ``session``, ``connection``, ``bearer``, ``traceback``, and what the line gives as ``extra={"data": {...}}``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON of a record."""
        time = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {"time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z")}
        line |= {"level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= {name: value for name, value in (_FIELDS.get() or {}).items() if value != ""}
        line |= getattr(record, "data", {})
        line = {name: value if isinstance(value, int | float) else _clean(str(value)) for name, value in line.items()}
        if lines := _traceback_lines(self, record):
            line["traceback"] = "\n".join(lines)
        return json.dumps(line)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """The one that :func:`configure` installs."""


def configure(form: str = "text", level: str = "warning", stream: TextIO | None = None) -> None:
    """Log to ``stream`` (stderr without one), in place of what an earlier call set up.

    Args:
        form: one of :data:`FORMATS`.
        level: one of :data:`LEVELS`, from which on lines of ours are written.
    """
    root = logging.getLogger()
    for earlier in [each for each in root.handlers if isinstance(each, _Handler)]:
        root.removeHandler(earlier)
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    handler.addFilter(LogLimit(_COMPLAINTS, events=_EVENTS))
    root.addHandler(handler)
    root.setLevel(logging.ERROR if level == "error" else logging.WARNING)
    for name in _OWN:
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of writes to a client that has gone
    logging.captureWarnings(form == "json")  # else Python writes them between the objects


def _clean(text: str) -> str:
    """On one line, printable and not long, whatever a client wrote into it."""
    if len(text) > _LONGEST:
        left_out = f" ... ({len(text) - _LONGEST} characters left out) ... "
        text = text[: _LONGEST - _LAST] + left_out + text[-_LAST:]
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _traceback_lines(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """Return the lines of the record's traceback, if any."""
    lines = formatter.formatException(record.exc_info).splitlines() if record.exc_info else []
    return [_clean(line) for line in lines[-_MOST_LINES:]]


def _place(error: BaseException) -> str:
    """File and line of ours where an exception came from, or of a library where ours has no part in it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent.name in _OWN]
    if not frames:
        return "no place known"
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


class LogLimit(logging.Filter):
    """Lets through ``lines`` records of each message in a minute, or ``events`` of a message below WARNING; the next
    one after tells how many were left out.

    A message is a logger, a level, a format string and the type of the exception, so arguments make no new one. As a
    filter of a handler it limits every logger that the handler serves.
    """

    def __init__(self, lines: int, events: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._lines, self._clock = lines, clock
        self._events = lines if events is None else events
        self._spans: dict[object, list[float]] = {}  # each: when it began, lines let through, lines left out
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        exception = record.exc_info[0] if record.exc_info else None
        key = (record.name, record.levelno, str(record.msg), exception)
        with self._lock:
            now = self._clock()
            span = self._spans.get(key)
            left_out = 0
            if span is None or now - span[0] >= _SPAN_S:
                left_out = int(span[2]) if span else 0
                if span is None and len(self._spans) >= _MOST_KEYS:  # of messages that are no format strings
                    self._spans.pop(next(iter(self._spans)))
                span = self._spans[key] = [now, 0, 0]
            if span[1] >= (self._lines if record.levelno >= logging.WARNING else self._events):
                span[2] += 1
                return False
            span[1] += 1
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (and {left_out} more like it, left out)", ()
        return True
