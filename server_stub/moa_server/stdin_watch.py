"""The end of a verifier whose program has ended."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from moa_server.options import ServeError


def end_with_stdin() -> None:
    """End this process with exit status 0 when its standard input ends: a pipe does when its writer is gone, in
    whatever way that ended and on every system.

    Raises:
        ServeError: there is no standard input.
    """
    try:
        descriptor = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError) as error:  # None, or closed
        raise ServeError("--until-stdin-ends needs a standard input to read: give it a pipe") from error
    threading.Thread(target=_watch, args=(descriptor,), name="moa-stdin", daemon=True).start()


def _watch(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 4096):
            pass
    # At once: nobody is left who waits for a verdict, and while a model is loaded no signal is heard.
    os._exit(0)
