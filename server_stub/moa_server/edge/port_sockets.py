"""The connections of a port whose sockets belong to a library, found among the descriptors of this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from pathlib import Path

from moa_server.edge.connection_limits import EdgeLimits, Peer

#: Where a system lists this process's descriptors; Windows has no such place.
_FOLDER = next((each for each in ("/proc/self/fd", "/dev/fd") if Path(each).is_dir()), None)
_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None

# Where tcpi_bytes_received stands in Linux's struct tcp_info, and the value of its first byte, tcpi_state, while both
# sides may send.
_RECEIVED_AT = 128
_ESTABLISHED = 1

# Connections among which a new one is looked for at once, in less than a millisecond; else the next watch finds it.
_MOST_LOOKED_AT = 256


class PortSockets:
    """The accepted connections of a listening socket. On Windows none is found, and no limit that needs one holds.

    Args:
        listening: the listening socket.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._family, self._port = listening.family, listening.getsockname()[1]
        self._found: dict[Peer, int] = {}

    def peers(self) -> dict[Peer, int | None]:
        """Look for all connections: return their peers, and the bytes that each has sent: 0 without a count, None if
        one side has closed.

        Takes some microseconds a descriptor.
        """
        seen = {fd: peer for fd in _descriptors() if (peer := self._peer_of(fd)) is not None}
        self._found = {peer: fd for fd, peer in seen.items()}
        return {peer: self._received(fd) for fd, peer in seen.items()}

    def _received(self, fd: int) -> int | None:
        if not sys.platform.startswith("linux"):
            return 0
        with contextlib.suppress(OSError):
            seen = socket.socket(self._family, socket.SOCK_STREAM, 0, fileno=fd)
            try:
                told = seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
                if told[0] != _ESTABLISHED:
                    return None
                return int.from_bytes(told[_RECEIVED_AT:], sys.byteorder) if len(told) == _RECEIVED_AT + 8 else 0
            finally:
                seen.detach()
        return 0

    def hold(self, peer: Peer) -> socket.socket | None:
        """Return a duplicate of a connection's socket, which keeps it open; None if it is gone, or too new among too
        many to look for it."""
        for looked in (False, True):
            if looked:
                if len(self._found) > _MOST_LOOKED_AT:
                    break
                self.peers()
            fd = self._found.get(peer)
            if fd is not None and (held := self._duplicate(fd, peer)) is not None:
                return held
        return None

    def end(self, peer: Peer) -> None:
        """End a connection at once, dropping all data that is still to be sent."""
        held = self.hold(peer)
        if held is not None:
            with held, contextlib.suppress(OSError):
                if _LIBC is not None:
                    # To connect to no address is to reset: after a shutdown alone Linux still lets the peer send.
                    _LIBC.connect(held.fileno(), bytes(16), 16)
                held.shutdown(socket.SHUT_RDWR)

    def _duplicate(self, fd: int, peer: Peer) -> socket.socket | None:
        # The number may be another file's by now: only the duplicate, which nobody else closes, is sure to be the one.
        try:
            copy = os.dup(fd)
        except OSError:
            return None
        if self._peer_of(copy) == peer:
            held = socket.socket(self._family, socket.SOCK_STREAM, 0, fileno=copy)
            held.setblocking(False)  # as its owner has it: the flag belongs to both
            return held
        os.close(copy)
        return None

    def _peer_of(self, fd: int) -> Peer | None:
        try:
            seen = socket.socket(self._family, socket.SOCK_STREAM, 0, fileno=fd)
        except OSError:  # no socket, or closed meanwhile
            return None
        try:
            own = seen.getsockname()
            if isinstance(own, tuple) and own[1:2] == (self._port,):
                host, port = seen.getpeername()[:2]
                return str(host), str(port)
        except OSError:  # not connected
            pass
        finally:
            seen.detach()
        return None


def set_deadlines(listening: socket.socket, limits: EdgeLimits) -> None:
    """Have the system watch the connections of a listening socket, which take its options over: it gives up peers that
    are gone, or that take nothing of what waits for them, and sends small frames at once."""
    options = {
        (socket.SOL_SOCKET, "SO_KEEPALIVE"): 1,
        (socket.SOL_SOCKET, "SO_RCVBUF"): limits.receive_buffer_bytes,
        (socket.IPPROTO_TCP, "TCP_NODELAY"): 1,
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE"): 20,
        (socket.IPPROTO_TCP, "TCP_KEEPALIVE"): 20,  # the same on macOS
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL"): 10,
        (socket.IPPROTO_TCP, "TCP_KEEPCNT"): 3,
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"): int(1000 * limits.send_seconds),
    }
    for (level, name), value in options.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                listening.setsockopt(level, getattr(socket, name), value)


def _descriptors() -> list[int]:
    if _FOLDER is None:
        return []
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(_FOLDER)]  # noqa: PTH208  # a Path for each would take longer
    return []
