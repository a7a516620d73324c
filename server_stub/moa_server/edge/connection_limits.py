"""Limits on the connections of a server: their number, their deadlines, and which ones are ended for others."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from moa_server.logging import LogLimit

_log = logging.getLogger(__name__)

_log.addFilter(LogLimit(lines=1))

#: The message to a client when no more connections may be busy.
ALL_BUSY = "the verifier serves as many connections as it can; try again later"
#: The message to a client whose body gives way to others.
TOO_MANY_BODIES = "too many bodies come at once; send it again later"
#: A key of the ASGI scope of HTTP requests: a function that ends the connection at once.
END_KEY = "moa_server.end"

#: Address and port of a client, as ``client`` of an ASGI scope.
Peer = tuple[str, str]


# Bytes of a frame's header and of TLS around one message.
_AROUND_MESSAGE = 64


@dataclass(frozen=True)
class EdgeLimits:
    """Limits on each connection, and on all of them together."""

    connections: int = 2048  # held at once, if the descriptor limit allows
    per_address: int = 256  # waiting connections, and bodies that come, of one address, or one IPv6 /64 network
    requests: int = 1024  # of one network that wait to begin, one a turn of the event loop; more are refused
    header_bytes: int = 16 << 10  # of a request header, which granian reads from the beginning for each segment
    header_seconds: float = 10.0  # from the connection or the previous answer to the whole request header, TLS included
    body_seconds: float = 30.0  # from the header to the end of the body
    unused_bytes: int = 4 << 20  # sent over a WebSocket that are no whole messages: pings, and a message that comes
    receive_buffer_bytes: int = 16 << 10  # of the system: what granian parses of one connection before others' turns
    piece_bytes: int = 256  # mean size of the pieces that a body of any length arrives in
    send_seconds: float = 30.0  # in which a peer must take something of what waits for it, or the system gives it up
    close_seconds: float = 5.0  # that a peer has to close as well, once all that was written for it is sent
    discard_bytes: int = 4 << 20  # that are read and dropped meanwhile


class ConnectionSlot:
    """One connection. It is *busy* while a request is being answered and as a WebSocket, and *waits* otherwise."""

    def __init__(self, network: str, now: float) -> None:
        self.network = network
        self.since = now  # when it began to wait
        self.requests = 0  # that are being answered; HTTP/1.1 allows one
        self.websocket = False
        self.used = 0  # bytes of whole messages that the app has taken, with what surrounds them on the wire


class ConnectionSlots:
    """All connections of a server, by peer.

    An eighth of the places is never busy. If more connections wait than these, those that have waited longest are
    ended: connections that never complete a request shorten the time that others have, and do not lock them out. The
    same holds for bodies: a quarter of the places is for those that are not whole.

    """

    def __init__(self, limits: EdgeLimits, ceiling: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.ceiling, self.clock = limits, ceiling, clock
        self.most_busy = max(1, ceiling - max(1, ceiling // 8))
        self._begun = 0  # requests that have not ended
        self._slots: dict[Peer, ConnectionSlot] = {}
        # Requests whose bodies come, oldest first: their networks, and what ends them.
        self._bodies: dict[Peer, tuple[str, Callable[[], None]]] = {}
        self._gave_way: set[Peer] = set()  # whose bodies were ended, and whose requests have not ended yet

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def busy(self) -> int:
        """Number of busy connections, see :class:`ConnectionSlot`, without those whose bodies gave way: a burst of
        bodies begins before the event loop ends these requests, and would block all others."""
        return self._begun - len(self._gave_way)

    def begin(self, peer: Peer, websocket: bool = False) -> bool:
        """Mark a connection busy: it has a complete request header. Return False if the request is to be refused."""
        if self.busy >= self.most_busy:
            _log.warning("%d connections are busy, as many as may be; further requests are refused", self.busy)
            return False
        slot = self._slots.setdefault(peer, ConnectionSlot(network_of(peer[0]), self.clock()))
        slot.requests += 1
        slot.websocket = websocket
        self._begun += 1
        return True

    def finish(self, peer: Peer) -> None:
        """Mark it waiting again; each True of :meth:`begin` needs one call."""
        self._begun -= 1
        self._gave_way.discard(peer)
        self.body_ended(peer)
        slot = self._slots.get(peer)
        if slot is not None:
            slot.requests -= 1
            slot.since = self.clock()

    def body_begins(self, peer: Peer, give_way: Callable[[], None]) -> None:
        """Note that the body of a request begins to come. If there are too many of a network, or of all, call the
        ``give_way`` of the oldest one of it, or of the network that has most."""
        self._bodies[peer] = network, _ = network_of(peer[0]), give_way
        counts = Counter(its_network for its_network, _ in self._bodies.values())
        if len(self._bodies) > max(1, self.ceiling // 4):
            network = max(counts, key=counts.__getitem__)
        elif counts[network] <= self.limits.per_address:
            return
        ended = next(other for other, (its_network, _) in self._bodies.items() if its_network == network)
        self._bodies.pop(ended)[1]()
        self._gave_way.add(ended)

    def body_ended(self, peer: Peer) -> None:
        """Note that it is whole, or no longer wanted."""
        self._bodies.pop(peer, None)

    def take(self, peer: Peer, count: int) -> None:
        """Note that the app has taken a message of ``count`` bytes."""
        if (slot := self._slots.get(peer)) is not None:
            slot.used += count + _AROUND_MESSAGE

    def excuse(self, seconds: float) -> None:
        """Do not count time in which this process was stopped, or its machine asleep: requests may have come since."""
        for slot in self._slots.values():
            slot.since += seconds

    def overdue(self, open_peers: Mapping[Peer, int | None]) -> list[Peer]:
        """Return the connections that are to be ended.

        Args:
            open_peers: all connections, and the bytes received over each, None if one side has closed: granian is about
                to. Others are forgotten, unless they are busy.
        """
        now, peers = self.clock(), open_peers
        slots = {peer: self._slots.get(peer) or ConnectionSlot(network_of(peer[0]), now) for peer in peers}
        self._slots = {peer: slot for peer, slot in self._slots.items() if slot.requests} | slots
        waiting = sorted((slot.since, peer) for peer, slot in slots.items() if not slot.requests)
        most = max(self.ceiling // 8, self.most_busy - self.busy)
        ended = {peer for since, peer in waiting if now - since >= self.limits.header_seconds}
        unused = {peer: (peers[peer] or 0) - slot.used for peer, slot in slots.items() if slot.websocket}
        ended |= {peer for peer, count in unused.items() if count > self.limits.unused_bytes}
        by_network: dict[str, int] = {}
        # Those that have waited longest are beyond a limit first. A flood of connections that are closed at once is not
        # counted: it would have those ended that were opened before it.
        counted = [peer for _, peer in reversed(waiting) if peers[peer] is not None]
        for kept, peer in enumerate(counted, 1):
            network = slots[peer].network
            by_network[network] = by_network.get(network, 0) + 1
            if kept > most or by_network[network] > self.limits.per_address:
                ended.add(peer)
        return sorted(ended)


@lru_cache(4096)
def network_of(host: str) -> str:
    """Return what is counted as one client: an address, or its /64 network for IPv6, which one subscriber has."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 6 and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host
