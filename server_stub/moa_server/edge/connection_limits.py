"""Limits on the connections of a server: their number, their deadlines, and which one is ended for a new one."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from moa_server.logging import LogLimit, log_unexpected

_log = logging.getLogger(__name__)

_log.addFilter(LogLimit(lines=1))

_PROGRESS_BYTES = 64 << 10

#: The message to a client when no more connections may be busy.
ALL_BUSY = "the verifier serves as many connections as it can; try again later"
#: A key of the ASGI messages that such a client's WebSocket still receives.
FULL_KEY = "moa_server.full"
#: A key of the ASGI scope of HTTP requests: a function that ends the connection at once.
END_KEY = "moa_server.end"


@dataclass(frozen=True)
class EdgeLimits:
    """Limits on each connection, and on all of them together."""

    connections: int = 2048  # held at once, if the descriptor limit allows
    # connections of one address, or one IPv6 /64 network, that have never been busy, see :class:`ConnectionSlot`
    per_address: int = 256
    header_bytes: int = 64 << 10  # of a request header
    header_seconds: float = 10.0  # from the connection or the previous answer to the whole request header, TLS included
    body_seconds: float = 30.0  # from the header to the end of the body
    # in which a peer must read 64 KiB, or all that waits for it beyond what the system and asyncio buffer; a large
    # message may take much longer, for a slow link is no offence
    send_seconds: float = 30.0
    close_seconds: float = 5.0  # that a peer has to close as well, once all that was written for it is sent
    discard_bytes: int = 64 << 20  # bytes of a body that are read and dropped after an answer that came before its end
    write_buffer_bytes: int = 4 << 20  # that may wait for a peer besides the largest message
    control_frames_per_second: float = 50.0  # WebSocket pings and pongs, sustained
    control_frames_burst: int = 100  # WebSocket pings and pongs at once
    fragments: int = 1024  # frames of one WebSocket message
    first_message_bytes: int = 8 << 10  # that a WebSocket may send until its first message is whole


class ConnectionSlot:
    """One connection, from its acceptance until its descriptor is free.

    It is *busy* while a complete request, body included, is being answered, and as a WebSocket from the first complete
    message until a close frame is sent. Otherwise it *waits* for data that may never come.

    Attributes:
        transport: None until a TLS handshake is done.
        on_deadline: called once ``deadline`` has passed.
    """

    def __init__(self, slots: ConnectionSlots, connected: socket.socket, network: str) -> None:
        self.slots, self._socket, self.network = slots, connected, network
        self.limits = slots.limits
        self.transport: asyncio.Transport | None = None
        self.busy = self.ending = False
        self.deadline: float | None = None
        self.on_deadline: Callable[[], None] = self.end
        self._largest = 0
        self._unread: tuple[float, int] | None = None  # since when the peer has not read enough, bytes that waited then
        self._lingering = False
        self._sent: float | None = None  # since when nothing more is to be sent before the end

    def begin(self) -> bool:
        """Mark it busy: its request or first message is complete. Return False if it is to be refused instead."""
        if self.ending or self.slots.full():
            return False
        self.slots.not_waiting(self)
        self.busy = True
        self.slots.busy += 1
        return True

    def wait(self) -> None:
        """Mark it waiting: its request is answered or refused, or its WebSocket is being closed."""
        if self.busy:
            self.busy = False
            self.slots.busy -= 1
            self.slots.waiting[self] = None

    def leave(self) -> None:
        """Free the slot: the descriptor is free, or will be in this turn of the event loop. Again does nothing."""
        self.wait()
        self.slots.remove(self)

    def end(self) -> None:
        """Close at once, dropping all data that is still to be sent."""
        if self.ending:
            return
        self.ending = True
        self.slots.ending += 1
        self.slots.not_waiting(self)
        if self.transport is not None:
            self.transport.abort()
        else:  # in a TLS handshake, which fails now
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def half_close(self) -> bool:
        """Send the end of the stream after all written data, and continue reading; return False if impossible (TLS).

        Closing with unread data would reset the connection, and the peer might lose the last written data.
        """
        if self.transport is None or not self.transport.can_write_eof():
            return False
        try:
            self.transport.write_eof()
        except OSError:  # the peer has reset the connection
            self.end()
        return True

    def linger(self) -> bool:
        """Give the peer ``close_seconds`` to close as well, counted from when all written data is sent.

        Returns the result of :meth:`half_close`.
        """
        self.wait()
        self._lingering = True
        return self.half_close()

    def set_deadline(self, seconds: float | None) -> None:
        """Set the deadline to ``seconds`` from now; None removes it."""
        self.deadline = None if seconds is None else self.slots.clock() + seconds

    def write_paused(self, paused: bool) -> None:
        """Note that the peer reads more slowly than data is sent, or no longer does."""
        self._unread = (self.slots.clock(), self._waiting_bytes()) if paused else None

    def check_write_buffer(self, sent: int = 0) -> None:
        """End the connection if more data waits for the peer than allowed, not counting the app's largest message.

        Args:
            sent: bytes of a message just sent.
        """
        self._largest = max(self._largest, sent)
        if self._waiting_bytes() > self.limits.write_buffer_bytes + self._largest:
            self.end()

    def look(self, now: float) -> None:
        """End the connection if one of its deadlines has passed."""
        if self.transport is None or self.ending:
            return
        waiting = self._waiting_bytes()
        if self._lingering or self.transport.is_closing():
            # Earlier writes go out first; asyncio sets no limit for that.
            if not waiting:
                if self._sent is None:
                    self._sent = now
                elif now - self._sent >= self.limits.close_seconds:
                    self.end()
                return
            self._unread = self._unread or (now, waiting)
        if self._unread is not None:
            since, before = self._unread
            if waiting <= before - _PROGRESS_BYTES:
                self._unread = now, waiting
            elif now - since >= self.limits.send_seconds:
                self.end()
        if self.deadline is not None and now >= self.deadline and not self.transport.is_closing():
            self.deadline = None
            self.on_deadline()

    def _waiting_bytes(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0


class ConnectionSlots:
    """All connections of a server.

    At the ceiling a new connection replaces the one that has waited longest. An eighth of the slots is never busy, so
    one always waits: connections that never complete a request cannot lock others out, but only shorten the time that
    others have for their requests.

    Attributes:
        busy, ending: number of busy connections, see :class:`ConnectionSlot`, and of those that are being ended.
        waiting: the others.
    """

    def __init__(self, limits: EdgeLimits, ceiling: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.ceiling, self.clock = limits, ceiling, clock
        self.most_busy = max(1, ceiling - max(1, ceiling // 8))
        self._all: set[ConnectionSlot] = set()
        # Dictionaries keep the order: the one that has waited longest comes first.
        self.waiting: dict[ConnectionSlot, None] = {}
        self._opening: dict[str, dict[ConnectionSlot, None]] = {}
        self.busy = self.ending = 0
        self._left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, connected: socket.socket, host: str) -> ConnectionSlot:
        """Make a slot for an accepted socket; call :meth:`make_room` next."""
        slot = ConnectionSlot(self, connected, network_of(host))
        self._all.add(slot)
        self.waiting[slot] = None
        opening = self._opening.setdefault(slot.network, {})
        opening[slot] = None
        slot.set_deadline(self.limits.header_seconds)
        if len(opening) > self.limits.per_address:
            next(iter(opening)).end()
        return slot

    async def make_room(self) -> None:
        """End connections until at most ``ceiling`` are open, and wait until they are gone."""
        while len(self._all) > self.ceiling:
            if len(self._all) - self.ending > self.ceiling:
                self.end_oldest_waiting()
            self._left.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._left.wait(), 1.0)

    def end_oldest_waiting(self) -> None:
        """End the connection that has waited longest, if any waits."""
        if self.waiting:
            next(iter(self.waiting)).end()

    def full(self) -> bool:
        """Whether :meth:`ConnectionSlot.begin` would return False now; a warning is logged then."""
        full = self.busy >= self.most_busy
        if full:
            _log.warning("%d connections are busy, as many as may be; further requests are refused", self.busy)
        return full

    def remove(self, slot: ConnectionSlot) -> None:
        """Forget a slot, see :meth:`ConnectionSlot.leave`."""
        if slot in self._all:
            self.not_waiting(slot)
            self._all.discard(slot)
            self.ending -= slot.ending
            self._left.set()

    def sweep(self) -> None:
        """End connections whose deadlines have passed."""
        now = self.clock()
        for slot in list(self._all):
            try:
                slot.look(now)
            except Exception as error:  # one failing connection must not disable the deadlines of the others
                log_unexpected(_log, "closing an overdue connection", error)
                slot.end()

    def not_waiting(self, slot: ConnectionSlot) -> None:
        """Note that a slot is busy, ending or gone."""
        self.waiting.pop(slot, None)
        opening = self._opening.get(slot.network, {})
        opening.pop(slot, None)
        if not opening:
            self._opening.pop(slot.network, None)


def network_of(host: str) -> str:
    """Return what is counted as one client: an address, or its /64 network for IPv6, which one subscriber has."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 6 and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host
