"""Keeping the toolchains' chatter off the terminal: into a log file instead."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from moa_runtime.paths import cache_dir, check_cache


def toolchain_log() -> Path:
    """Return the path of the last export's chatter; raise MoaError if the cache folder cannot be written."""
    check_cache()
    return cache_dir() / "logs" / "export.log"


@contextlib.contextmanager
def quiet_toolchain(log: Path) -> Iterator[TextIO]:
    """Send everything that is written to stdout and stderr to ``log``, also by C++ libraries and subprocesses.

    The root logger is put back at the end: some toolchains configure it when imported.

    Yields:
        the real stderr, for progress.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(log.open("w", encoding="utf-8", errors="replace"))
        # Flushed first, or text from before would end up in the log.
        sys.stdout.flush()
        sys.stderr.flush()
        terminal = stack.enter_context(os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace"))
        for descriptor in (1, 2):
            stack.callback(_put_back, descriptor, os.dup(descriptor))
            os.dup2(stream.fileno(), descriptor)
        stack.enter_context(contextlib.redirect_stdout(stream))
        stack.enter_context(contextlib.redirect_stderr(stream))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            yield terminal
        finally:
            root.handlers[:], root.level = handlers, level


def _put_back(descriptor: int, kept: int) -> None:
    os.dup2(kept, descriptor)
    os.close(kept)
