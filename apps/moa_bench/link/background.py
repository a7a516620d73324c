"""Running the link emulator beside a benchmark.

It has a thread and not a process of its own. Beside a thread that drafts, either adds less than 1 ms to a round trip
in the median, for the drafter's graph runs without Python's lock; a process would cost each answer its start.
Beside pure Python, a thread adds what :func:`sys.setswitchinterval` allows, 5 ms at each turn by default.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

from moa_bench.link import Link, LinkProfile


class BackgroundLink:
    """A :class:`Link` with an event loop of its own, so that nothing else's work shows up as delay.

    ``cut``, ``restore`` and ``reset`` may be called from any thread.
    """

    def __init__(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        self._link, self._loop = link, loop

    @property
    def port(self) -> int:
        return self._link.port

    @property
    def bytes_up(self) -> int:
        """Payload bytes delivered to the verifier."""
        return self._link.bytes_up

    @property
    def bytes_down(self) -> int:
        """Payload bytes delivered to the client."""
        return self._link.bytes_down

    def cut(self) -> None:
        """Begin a dead zone: connections hang, nothing passes."""
        self._loop.call_soon_threadsafe(self._link.cut)

    def restore(self) -> None:
        """End the dead zone; what was under way arrives."""
        self._loop.call_soon_threadsafe(self._link.restore)

    def reset(self) -> None:
        """Break all connections now."""
        self._loop.call_soon_threadsafe(self._link.reset)


@contextlib.contextmanager
def background_link(profile: LinkProfile, host: str, port: int) -> Iterator[BackgroundLink]:
    """Emulate ``profile`` in front of the server at ``host:port`` on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="link", daemon=True)
    thread.start()
    link = Link(profile, host, port)

    def run(work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        run(link.__aenter__())
        try:
            yield BackgroundLink(link, loop)
        finally:
            run(link.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
