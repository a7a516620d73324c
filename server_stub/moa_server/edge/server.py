"""The server of an app: granian, whose parsers are native, in the app's own event loop, with limits of our own.

What an app does not read, granian does not read from the socket either, and what a peer does not take waits in the
system's buffers alone. The watch ends connections that wait for too long, which granian would keep.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from granian._futures import _future_watcher_wrapper, _new_cbscheduler
from granian._granian import ASGIWorker, SocketHolder, WorkerSignal
from granian.http import HTTP1Settings
from starlette.applications import Starlette

from moa_runtime.errors import MoaError
from moa_server.edge.connection_limits import ConnectionSlots, EdgeLimits
from moa_server.edge.guard import EdgeGuard
from moa_server.edge.port_sockets import PortSockets, set_deadlines
from moa_server.edge.time_slices import shorten_time_slices
from moa_server.logging import log_unexpected

_log = logging.getLogger(__name__)

# Descriptors for everything else: the model's files, the event loop, listening sockets, a timeline.
_RESERVE = 128
_MOST_DESCRIPTORS = 65536
_LISTEN_QUEUE = 4096
_FULL_COLLECTION_S = 60.0

# Their stubs are incomplete, and describe another release.
_WORKER: Any = ASGIWorker
_HOLDER: Any = SocketHolder
_SCHEDULER: Any = _new_cbscheduler
_WATCHED: Any = _future_watcher_wrapper


def raise_descriptor_limit() -> int | None:
    """Raise the soft limit of open descriptors towards the hard one. Return the limit; None for none."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return None if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (ValueError, OSError):  # macOS refuses more than the kernel's own limit
        return soft
    return most


def ceiling(connections: int, descriptors: int | None) -> int:
    """Return how many of the requested connections may be open under a descriptor limit.

    Raises:
        MoaError: the limit leaves no room for any.
    """
    if descriptors is None:
        return connections
    room = descriptors - _RESERVE
    if room < 4:
        text = f"only {descriptors} files may be open, moa-serve needs over {_RESERVE}: raise it with ulimit -n 4096"
        raise MoaError(text, code="too_few_descriptors")
    return min(connections, room // 2)  # WebSockets are not among those that granian counts


def freeze_loaded_objects() -> None:
    """Exclude loaded objects from garbage collection, which would take a second, and leave full collections to the
    server: a flood of requests causes two a second, each of up to 0.1 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 1 << 30)


class EdgeServer:
    """Serves an app on a listening socket, HTTP/1.1 and WebSocket, until :attr:`should_exit` is set.

    Args:
        tls: certificate chain and key, PEM files.

    Attributes:
        slots: the connections; set by :meth:`startup`.
        guard: what is around the app; set by :meth:`startup`.
    """

    def __init__(self, app: Starlette, limits: EdgeLimits | None = None, tls: tuple[Path, Path] | None = None) -> None:
        self._app, self._limits, self._tls = app, limits or EdgeLimits(), tls
        self._exit = threading.Event()
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers: list[tuple[Any, asyncio.Future[None]]] = []
        self.slots: ConnectionSlots
        self.guard: EdgeGuard

    @property
    def should_exit(self) -> bool:
        """Whether the server is to end; may be set in any thread."""
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._exit.set() if value else self._exit.clear()
        if self._loop is not None and self._wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake.set)

    def run(self, listening: socket.socket) -> None:
        """Serve in an event loop of its own."""
        asyncio.run(self.serve(listening))

    async def serve(self, listening: socket.socket) -> None:
        """Start, serve until :attr:`should_exit`, and shut down.

        Raises:
            MoaError: the descriptor limit leaves no room for connections.
        """
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self.slots = ConnectionSlots(self._limits, ceiling(self._limits.connections, raise_descriptor_limit()))
        self._listening, self._sockets = listening, PortSockets(listening)
        self.guard = EdgeGuard(self._app, self.slots, self._sockets)
        async with self._app.router.lifespan_context(self._app):
            await self.startup()
            watching = asyncio.create_task(self._watch())
            try:
                while not self.should_exit:
                    await self._wake.wait()
                    self._wake.clear()
            finally:
                await self.shutdown()
                watching.cancel()

    async def startup(self) -> None:
        """Accept connections."""
        shorten_time_slices()
        set_deadlines(self._listening, self._limits)
        self._listening.setblocking(False)
        self._start_worker()

    async def shutdown(self) -> None:
        """Accept no more connections, give those that are closing their time, and end all."""
        deadline = self.slots.clock() + self._limits.close_seconds
        for signal, _ in self._workers:
            await asyncio.to_thread(signal.set)
        while self.guard.lingering and self.slots.clock() < deadline:
            await asyncio.sleep(0.02)
        ended = asyncio.gather(*(ended for _, ended in self._workers))
        while not ended.done():
            for peer in await asyncio.to_thread(self._sockets.peers):
                self._sockets.end(peer)
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), 0.1)

    def renew(self) -> None:
        """Read the certificate and the key again, for new connections. Those that are open are lost, and come back."""
        former = [signal for signal, ended in self._workers if not ended.done()]
        self._start_worker()
        for signal in former:
            threading.Thread(target=signal.set, daemon=True).start()

    def _start_worker(self) -> None:
        """Start granian in a thread of its own; the app's coroutines run in this event loop."""
        loop = asyncio.get_running_loop()
        logging.getLogger("_granian").setLevel(logging.CRITICAL + 1)  # what clients do is no concern of an operator
        signal, ended = WorkerSignal(), loop.create_future()
        signal.add_cb(lambda: loop.call_soon_threadsafe(ended.set_result, None))
        number = self._listening.dup().detach()
        if sys.platform == "win32":
            holder = _HOLDER(number)
        elif sys.platform.startswith(("linux", "freebsd")):
            holder = _HOLDER(number, False, _LISTEN_QUEUE)
        else:
            self._listening.listen(_LISTEN_QUEUE)
            holder = _HOLDER(number, False)
        # Each answer closes its connection (guard.py); 101 does not say so.
        http1 = HTTP1Settings(
            header_read_timeout=int(1000 * self._limits.header_seconds),
            max_buffer_size=self._limits.header_bytes,
        )
        cert, key = map(str, self._tls) if self._tls else (None, None)
        tls: tuple[Any, ...] = (self._tls is not None, cert, key, None, "tls1.2", None, [], False)
        pool = (None, 1, 512, 1, 30)  # metrics, runtime threads, blocking threads, Python threads, seconds they idle
        worker = _WORKER(1, (None, holder), *pool, self.slots.ceiling, "1", http1, None, True, None, *tls, (None, None))

        async def call(scope: Any, protocol: Any) -> None:
            await self.guard(scope, protocol.receive, protocol.send)

        scheduler = _SCHEDULER(loop, _WATCHED(call), impl_asyncio=True)
        worker.serve_async(scheduler, loop, signal)
        self._workers.append((signal, ended))

    async def _watch(self) -> None:
        """End connections whose time is over, and collect garbage now and then."""
        period_s, collected = min(0.25, self._limits.header_seconds / 4), self.slots.clock()
        while True:
            planned = self.slots.clock() + period_s
            await asyncio.sleep(period_s)
            if self.slots.clock() - collected >= _FULL_COLLECTION_S:
                gc.collect()
                collected = self.slots.clock()
            try:
                self.slots.excuse(self.slots.clock() - planned)
                peers = await asyncio.to_thread(self._sockets.peers)
                for peer in self.slots.overdue(peers):
                    self._sockets.end(peer)
            except Exception as error:  # one failure must not disable the deadlines
                log_unexpected(_log, "ending overdue connections", error)
