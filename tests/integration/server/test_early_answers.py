"""An answer that comes before the request's body has ended is not lost; what is still sent is read within bounds."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator

import pytest

from moa_server.edge.connection_limits import EdgeLimits
from moa_server.settings import Settings
from support.server.edge_running import Edge, edge, error_of, eventually, read_all, secured, status_of
from support.server.running import serving
from support.toy_engine import ToyEngine

PATIENT = EdgeLimits(connections=20, per_address=1000, header_seconds=60)
MIB = 1 << 20


def post(path: str, size: int, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {size}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def sent(connected: socket.socket, size: int) -> int:
    """Send so many bytes without reading; says how many went out before the server closed."""
    part = b" " * 65536
    for at in range(0, size, len(part)):
        try:
            connected.sendall(part[: size - at])
        except (OSError, ssl.SSLError):
            return at
    return size


@contextlib.contextmanager
def refused(running: Edge, size: int, *headers: str) -> Iterator[socket.socket]:
    """A client whose request is answered before its body has come."""
    with running.open(post("/refusing", size, *headers)) as connected:
        connected.recv(1, socket.MSG_PEEK)
        yield connected


@pytest.mark.parametrize("headers", [(), ("Connection: close",)])
@pytest.mark.parametrize("size", [2 * MIB, 40 * MIB])
def test_a_body_that_is_too_large_is_told_so_to_who_sends_all_of_it_first(size, headers):
    with (
        serving(ToyEngine(), Settings()) as verifier,
        socket.create_connection(("127.0.0.1", verifier.port), 30) as connected,
    ):
        connected.sendall(post("/v1/decode", size, *headers))
        assert sent(connected, size) == size
        answer = read_all(connected)
        assert status_of(answer) == 413 and "the body has more than" in error_of(answer)
        assert answer.lower().count(b"connection: close") == 1


@pytest.mark.parametrize("headers", [(), ("Connection: close",)])
def test_an_early_answer_is_whole_and_the_last_one(headers):
    with edge(PATIENT) as running, refused(running, 10, *headers) as connected:
        connected.sendall(b"1234567890" + post("/echo", 0))
        answer = read_all(connected)
        assert status_of(answer) == 401 and answer.endswith(b"\r\n\r\nno") and answer.count(b"HTTP/1.1") == 1
        assert not running.complaints()


def test_who_is_still_sending_takes_no_busy_place():
    with edge(PATIENT) as running, contextlib.ExitStack() as crowd:
        for _ in range(15):
            crowd.enter_context(refused(running, 10 * MIB))
        eventually(lambda: running.slots.busy == 0)
        assert status_of(running.ask()) == 200


def test_only_so_many_bytes_are_read_behind_an_answer():
    limits = EdgeLimits(discard_bytes=MIB, body_seconds=60)
    with edge(limits) as running, refused(running, 100 * MIB) as connected:
        assert sent(connected, 100 * MIB) < 20 * MIB  # what the system holds for both ends is more than the bound
        eventually(lambda: len(running.slots) == 0)
        assert not running.complaints()


def test_only_so_long_is_read_behind_an_answer():
    with edge(EdgeLimits(body_seconds=1)) as running, refused(running, 100) as connected:
        until = time.monotonic() + 30
        with contextlib.suppress(OSError):
            while len(running.slots) and time.monotonic() < until:
                connected.send(b" ")
                time.sleep(0.05)
        assert time.monotonic() < until and not running.complaints()


def test_over_tls(tls):
    with edge(PATIENT, tls) as running, secured(running.open()) as connected:
        connected.sendall(post("/refusing", 8 * MIB))
        assert sent(connected, 8 * MIB) == 8 * MIB
        answer = connected.recv(65536)
        assert status_of(answer) == 401 and b"connection: close" in answer.lower()
