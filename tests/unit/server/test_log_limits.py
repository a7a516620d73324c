"""The log filter: a flood of one message leaves some lines, and the number of those left out."""

from __future__ import annotations

import logging

from moa_server.logging import LogLimit


class Kept(logging.Handler):
    """Keeps the lines that a limit lets through; its clock reads ``now``."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.now = 0.0
        self.limit = LogLimit(lines, clock=lambda: self.now)
        self.addFilter(self.limit)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def logger(self, name: str = "a") -> logging.Logger:
        logger = logging.Logger(name)
        logger.addHandler(self)
        return logger


def test_a_flood_leaves_some_lines_and_a_count():
    kept = Kept(3)
    logger = kept.logger()
    for number in range(1000):
        logger.warning("bad request %d", number)
    assert kept.lines == ["bad request 0", "bad request 1", "bad request 2"]
    kept.now = 60.0
    logger.warning("bad request %d", 5)
    logger.warning("bad request %d", 6)
    assert kept.lines[3].startswith("bad request 5") and "997" in kept.lines[3] and kept.lines[4] == "bad request 6"


def test_other_messages_loggers_levels_and_exceptions_are_not_left_out_with_it():
    kept = Kept(1)
    logger, other = kept.logger(), kept.logger("b")
    for _ in range(2):
        logger.warning("one")
        logger.error("one")
        other.warning("one")
        logger.warning("two")
        for error in (ValueError("v"), KeyError("k")):
            logger.error("failed", exc_info=error)
    assert len(kept.lines) == 6
    for number in range(5000):
        logger.warning(f"message {number}")
    assert len(kept.limit._spans) <= 1000, "messages without end take no memory without end"
