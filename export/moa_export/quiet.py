"""Keeping the toolchains' chatter off the terminal."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_toolchain() -> Iterator[None]:
    """Silence log messages up to warnings, Python warnings and transformers' progress bars.

    The root logger is put back too: onnxruntime's quantiser configures it when imported.
    """
    from transformers.utils import logging as transformers_logging

    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, logging.root.manager.disable
    bars = transformers_logging.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
        logging.disable(disabled)
        root.handlers[:], root.level = handlers, level
