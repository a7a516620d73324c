"""The edge of the verifier: a uvicorn server with limits on connections, deadlines and buffers.

uvicorn serves the app; this package bounds what uvicorn leaves unbounded. :class:`EdgeServer` accepts the connections
itself, to keep their number below the descriptor limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Coroutine

import uvicorn

from moa_runtime.errors import MoaError
from moa_server.edge.connection_limits import ConnectionSlot, ConnectionSlots, EdgeLimits
from moa_server.edge.http import EdgeHttp
from moa_server.logging import LogLimit

_log = logging.getLogger(__name__)
_log.addFilter(LogLimit(lines=1))

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_EXHAUSTED_PAUSE_S = 0.1

# Descriptors for everything else: the model's files, the event loop, listening sockets, a timeline.
_RESERVE = 128
_MOST_DESCRIPTORS = 65536
_LISTEN_QUEUE = 1024


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
    if room < 2:
        text = f"only {descriptors} files may be open, moa-serve needs over {_RESERVE}: raise it with ulimit -n 4096"
        raise MoaError(text, code="too_few_descriptors")
    return min(connections, room)


class EdgeServer(uvicorn.Server):
    """uvicorn's server with limits on each client; serves HTTP/1.1 and WebSocket.

    The fields ``http`` and ``ws`` of the configuration have no effect.

    Attributes:
        slots: the open connections; set by :meth:`startup`.
    """

    def __init__(self, config: uvicorn.Config, limits: EdgeLimits | None = None) -> None:
        super().__init__(config)
        self._limits = limits or EdgeLimits()
        self.slots: ConnectionSlots

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, then accept connections of the listening sockets.

        Raises:
            MoaError: the descriptor limit leaves no room for connections.
        """
        self.slots = ConnectionSlots(self._limits, ceiling(self._limits.connections, raise_descriptor_limit()))
        await super().startup([])  # uvicorn's accept loop gives up at the descriptor limit, with a traceback each time
        self.servers.append(_Acceptor(self, self.slots, sockets or []))  # type: ignore[arg-type]


class _Acceptor:
    """Accepts connections until it is closed; has the methods of ``asyncio.Server`` that uvicorn uses."""

    def __init__(self, server: EdgeServer, slots: ConnectionSlots, sockets: list[socket.socket]) -> None:
        self._server, self._slots = server, slots
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeping = asyncio.ensure_future(self._sweep())
        for listening in sockets:
            listening.setblocking(False)
            listening.listen(_LISTEN_QUEUE)
            self._spawn(self._accept(listening))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Stop checking deadlines: all connections are closed."""
        self._sweeping.cancel()
        await asyncio.gather(self._sweeping, *self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self) -> None:
        limits = self._slots.limits
        shortest_s = min(limits.header_seconds, limits.body_seconds, limits.send_seconds, limits.close_seconds)
        while True:
            await asyncio.sleep(min(1.0, shortest_s / 4))
            self._slots.sweep()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, address = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    _log.warning("no descriptor is left for a new connection: %s", error.strerror)
                    self._slots.end_oldest_waiting()
                # Any other error belongs to the new connection: its client has left.
                await asyncio.sleep(_EXHAUSTED_PAUSE_S if error.errno in _EXHAUSTED else 0)
                continue
            slot = self._slots.enter(connected, str(address[0]) if isinstance(address, tuple) else "")
            self._spawn(self._connect(connected, slot))
            await self._slots.make_room()
            await asyncio.sleep(0)  # sock_accept does not let others run while connections wait

    async def _connect(self, connected: socket.socket, slot: ConnectionSlot) -> None:
        config, state, app_state = self._server.config, self._server.server_state, self._server.lifespan.state
        timeout = self._slots.limits.header_seconds if config.ssl else None
        try:
            if connected.family in (socket.AF_INET, socket.AF_INET6):
                # asyncio sets it only if the listening socket was made with a protocol number. A small frame must not
                # wait for the client's acknowledgement of the previous one.
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: EdgeHttp(config, state, app_state, slot),
                connected,
                ssl=config.ssl,
                ssl_handshake_timeout=timeout,
            )
        except OSError as error:  # no TLS, or the client has left
            _log.debug("a connection was lost before its first request: %s", error)
        finally:
            if slot.transport is None:
                with contextlib.suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)
                slot.leave()
