"""A slow, far, unreliable link in userland: a TCP proxy between a client and a verifier.

    async with Link(get_profile("lte"), "127.0.0.1", 8765) as link:
        ...  # connect to 127.0.0.1:link.port instead of the verifier

It shapes bytes, not messages. Each direction has one wire, shared by all connections, and its own delay: a chunk that
arrives at `t` is on the wire until `end = max(t, end of the chunk before) + bits / rate`, or until a trace has let all
its bytes through, and is delivered at `end + delay`. A full queue is not read from, so the sender is blocked.

The link's clock begins with the first connection. An outage stops it: nothing is delivered, sockets hang without a
reset, and everything due waits; when the clock runs again, each byte continues with the time it had left.

TCP's own handshake, slow start and back-off after an outage happen on loopback: a real network adds a round trip to
each new connection and some time after a long outage. Rates count payload, not packet headers. The emulator needs a
free event loop, see :func:`background_link`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator

from moa_bench.link.profiles import LinkProfile
from moa_bench.link.wire import READ_BYTES, Wire, wire_of

SOCKET_BYTES = 128 * 1024  # fixed, or the kernel lets its buffers grow to megabytes and hides the back-pressure


class _LinkClock:
    """The event loop's time in seconds, without the time spent in outages."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost = 0.0
        self._stopped_at: float | None = None
        self._running = asyncio.Event()
        self._running.set()

    def now(self) -> float:
        return (self._loop.time() if self._stopped_at is None else self._stopped_at) - self.lost

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = self._loop.time()
            self._running.clear()

    def start(self) -> None:
        if self._stopped_at is not None:
            self.lost += self._loop.time() - self._stopped_at
            self._stopped_at = None
            self._running.set()

    async def sleep_until(self, when: float) -> None:
        """Return once the clock runs and shows `when` or later."""
        while True:
            await self._running.wait()
            left = when - self.now()
            if left <= 0:
                return
            await asyncio.sleep(left)


class _Direction:
    """One way of the link: its wire, its delay, and the number of bytes delivered, over all connections."""

    def __init__(self, clock: _LinkClock, wire: Wire, delay_s: float, jitter_s: float, seed: str) -> None:
        self.clock = clock
        self.chunk_bytes = wire.chunk_bytes
        self.queue_bytes = wire.queue_bytes(delay_s + jitter_s)
        self.delivered_bytes = 0
        self._wire, self._delay_s, self._jitter_s = wire, delay_s, jitter_s
        self._random = random.Random(seed)

    def due(self, size: int) -> float:
        """Put ``size`` bytes on the wire; returns the link's time (s) at which the last of them is due."""
        through = self._wire.transmit(size, self.clock.now())
        jitter = self._random.uniform(-self._jitter_s, self._jitter_s) if self._jitter_s else 0.0
        return through + max(0.0, self._delay_s + jitter)


class _Flow:
    """One direction of one connection: reads at once and delivers when due, in order, with a bounded queue."""

    def __init__(self, direction: _Direction, reader: asyncio.StreamReader) -> None:
        self.ended = False
        self._direction, self._reader = direction, reader
        # (link time due, bytes); b"" is the end of the stream, None a connection that broke.
        self._queue: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()
        self._queued_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        data: bytes | None = b"start"
        while data:
            await self._room.wait()
            try:
                data = await self._reader.read(self._direction.chunk_bytes)
            except OSError:
                data = None
            size = len(data or b"")
            self._queued_bytes += size
            if self._queued_bytes >= self._direction.queue_bytes:
                self._room.clear()
            self._queue.put_nowait((self._direction.due(size), data))
        self.ended = True

    async def deliver(self, writer: asyncio.StreamWriter) -> None:
        """Deliver everything to ``writer``, the end of the stream included, or until ``writer`` breaks."""
        with contextlib.suppress(OSError):
            while True:
                due, data = await self._queue.get()
                await self._direction.clock.sleep_until(due)
                if not data:
                    break
                self._direction.delivered_bytes += len(data)  # first: the receiver of the bytes may read the counter
                writer.write(data)
                await writer.drain()
                self._queued_bytes -= len(data)
                if self._queued_bytes < self._direction.queue_bytes:
                    self._room.set()
            if data is None:
                _reset(writer)
            else:
                writer.write_eof()


class Link:
    """A TCP proxy on a free local port that slows connections to ``host:port`` down as ``profile`` says."""

    def __init__(self, profile: LinkProfile, host: str, port: int) -> None:
        self.profile, self.port = profile, 0
        self._target = (host, port)
        self._cut = self._in_outage = False
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._outages: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Link:
        profile = self.profile
        self._clock = _LinkClock()
        delay, jitter = profile.round_trip_ms / 2000, profile.jitter_ms / 1000
        up = wire_of(profile.up_bits_per_s, profile.up_trace)
        down = wire_of(profile.down_bits_per_s, profile.down_trace)
        self._up = _Direction(self._clock, up, delay, jitter, "up")
        self._down = _Direction(self._clock, down, delay, jitter, "down")
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", limit=READ_BYTES)
        [sock] = self._server.sockets
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        self.port = sock.getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        tasks = [*self._connections, *([self._outages] if self._outages else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def bytes_up(self) -> int:
        """Payload bytes delivered to the verifier so far, over all connections."""
        return self._up.delivered_bytes

    @property
    def bytes_down(self) -> int:
        """Payload bytes delivered to clients so far, over all connections."""
        return self._down.delivered_bytes

    @property
    def is_cut(self) -> bool:
        """Whether nothing passes now, because of :meth:`cut` or an outage of the profile."""
        return self._cut or self._in_outage

    def cut(self) -> None:
        """Enter a dead zone: connections stay open and hang, new ones are accepted and hang too."""
        self._cut = True
        self._clock.stop()

    def restore(self) -> None:
        """Leave the dead zone: queued bytes and new connections pass. An outage of the profile stays."""
        self._cut = False
        if not self.is_cut:
            self._clock.start()

    def reset(self) -> None:
        """Break all connections now, on both sides, like a middlebox that has lost its state."""
        for writer in self._writers:
            _reset(writer)
        for task in self._connections:
            task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._outages is None:  # the first connection
            self._clock.lost += self._clock.now()  # it shows 0
            self._outages = asyncio.create_task(self._run_outages())
        task = asyncio.create_task(self._connect(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until both directions have ended or one side is gone."""
        up = _Flow(self._up, reader)
        with contextlib.ExitStack() as stack:
            stack.callback(up.reading.cancel)
            stack.callback(self._drop, writer)
            self._writers.add(writer)
            await self._clock.sleep_until(0.0)  # not in an outage
            if up.ended:
                return  # closed in a dead zone: its first packet never got through
            try:
                target_reader, target_writer = await asyncio.open_connection(*self._target, limit=READ_BYTES)
            except OSError:
                _reset(writer)
                return
            stack.callback(self._drop, target_writer)
            self._writers.add(target_writer)
            target_writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
            down = _Flow(self._down, target_reader)
            stack.callback(down.reading.cancel)
            await asyncio.gather(up.deliver(target_writer), down.deliver(writer))

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.close()

    async def _run_outages(self) -> None:
        loop = asyncio.get_running_loop()
        opened = loop.time()
        for start, duration in self.profile.outages:
            await asyncio.sleep(opened + start - loop.time())
            self._in_outage = True
            self._clock.stop()
            await asyncio.sleep(opened + start + duration - loop.time())
            self._in_outage = False
            if not self.is_cut:
                self._clock.start()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST: the other side sees a broken connection, not an orderly end."""
    if not writer.transport.is_closing():
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()


class BackgroundLink(Link):
    """A link on the event loop of a separate thread, so that other work does not show up as delay. It may be cut,
    restored and reset from any thread."""

    def __init__(self, profile: LinkProfile, host: str, port: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(profile, host, port)
        self._loop = loop

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(super().cut)

    def restore(self) -> None:
        self._loop.call_soon_threadsafe(super().restore)

    def reset(self) -> None:
        self._loop.call_soon_threadsafe(super().reset)


@contextlib.contextmanager
def background_link(profile: LinkProfile, host: str, port: int) -> Iterator[BackgroundLink]:
    """Emulate ``profile`` in front of the server at ``host:port`` on a thread of its own.

    A process would cost each answer its start. Beside a thread that drafts, either adds less than 1 ms to a round trip
    in the median, as the drafter's graph runs without Python's lock. Beside pure Python, a thread adds up to
    :func:`sys.setswitchinterval`, 5 ms by default, at each turn.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="link", daemon=True)
    thread.start()
    link = BackgroundLink(profile, host, port, loop)
    try:
        asyncio.run_coroutine_threadsafe(link.__aenter__(), loop).result()
        try:
            yield link
        finally:
            asyncio.run_coroutine_threadsafe(link.__aexit__(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
