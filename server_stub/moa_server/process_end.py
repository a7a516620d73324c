"""The end of the process of a verifier that has served."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys


class ProcessEnd:
    """Once the verifier has served, the process ends with status 0 behind the exit handlers, without more ado.

    Python would look for garbage among all objects several times, and take every module apart. With what torch and vLLM
    import that takes seconds, up to nine on a busy machine, in which a supervisor waits for nothing.

    Make one before these are imported: exit handlers run in reverse, so theirs come before.

    Attributes:
        served: set it when all is closed; else the process ends in the ordinary way.
    """

    def __init__(self) -> None:
        self.served = False
        atexit.register(self._end)

    def _end(self) -> None:
        if not self.served:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads it, or it is closed, or None
                stream.flush()
        os._exit(0)
