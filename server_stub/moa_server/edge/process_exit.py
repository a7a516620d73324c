"""The end of a process that has served."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys


class ProcessExit:
    """Ends the process with status 0 right after the exit handlers, once the server has ended.

    Otherwise Python would collect garbage several times and clear every module, which takes seconds after importing
    torch or vLLM, and a thread of granian that still lets go of Python's objects would abort the process. Make one
    before importing these: exit handlers run in reverse order, so theirs run first.

    Attributes:
        served: set it when everything is closed; otherwise the process ends in the ordinary way.
    """

    def __init__(self) -> None:
        self.served = False
        atexit.register(self._end)

    def _end(self) -> None:
        if not self.served:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a broken pipe, closed, or None
                stream.flush()
        os._exit(0)
