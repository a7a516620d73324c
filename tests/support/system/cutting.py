"""A link whose connections are cut after some bytes."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Iterator


class CuttingLink:
    """A port in front of a verifier's.

    Args:
        after_bytes: of the verifier's, after which a connection is cut.
        times: connections that are cut; those after them are not.

    Attributes:
        cuts: connections that were cut.
    """

    def __init__(self, port: int, after_bytes: int, times: float = math.inf) -> None:
        self._server, self._after, self._times, self.cuts = port, after_bytes, times, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self._server)) as server:
            threading.Thread(target=_copy, args=(client, server), daemon=True).start()
            left = self._after if self.cuts < self._times else math.inf
            while left > 0 and (piece := server.recv(int(min(left, 65536)))):
                client.sendall(piece)
                left -= len(piece)
            self.cuts += left <= 0
            for end in (client, server):  # closing alone would not wake the other thread
                end.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(65536):
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def cutting(port: int, after_bytes: int, times: float = math.inf) -> Iterator[CuttingLink]:
    """Run a :class:`CuttingLink` until the block ends."""
    link = CuttingLink(port, after_bytes, times)
    try:
        yield link
    finally:
        link.close()
