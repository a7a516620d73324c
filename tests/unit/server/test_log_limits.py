"""The log filter: a flood of one message leaves some lines, and the number of those left out."""

from __future__ import annotations

import logging

from moa_server.logging import LogLimit


class Kept(logging.Handler):
    def __init__(self, **options) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.now = 0.0
        self.addFilter(LogLimit(clock=lambda: self.now, **options))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def logger_into(handler: logging.Handler, name: str = "a") -> logging.Logger:
    logger = logging.Logger(name)
    logger.addHandler(handler)
    return logger


def test_a_flood_leaves_so_many_lines_and_a_count():
    kept = Kept(lines=3, seconds=60)
    logger = logger_into(kept)
    for number in range(1000):
        logger.warning("bad request %d", number)
    assert kept.lines == ["bad request 0", "bad request 1", "bad request 2"]
    kept.now = 60.0
    logger.warning("bad request %d", 5)
    logger.warning("bad request %d", 6)
    assert kept.lines[3:] == ["bad request 5 (and 997 more like it, left out)", "bad request 6"]


def test_other_messages_loggers_levels_and_exceptions_are_not_left_out_with_it():
    kept = Kept(lines=1)
    logger, other = logger_into(kept), logger_into(kept, "b")
    for _ in range(2):
        logger.warning("one")
        logger.error("one")
        other.warning("one")
        logger.warning("two")
        for error in (ValueError("v"), KeyError("k")):
            try:
                raise error
            except Exception:
                logger.exception("failed")
    assert len(kept.lines) == 6


def test_messages_without_end_take_no_memory_without_end():
    kept = Kept(lines=1)
    logger = logger_into(kept)
    for number in range(5000):
        logger.warning(f"message {number}")
    assert len(kept.filters[0]._spans) <= 1000
