"""Work that is dropped if something else happens before it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LeftError(Exception):
    """The client left before its answer was complete."""


async def unless(ending: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T], error: Exception) -> T:
    """The work's result; if ``ending`` is done first, cancel the work and raise ``error``."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(ending)
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error
        return working.result()
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
        # The error's traceback has this frame: a circle would keep the request's connection until garbage is collected.
        del working, waiting, error
