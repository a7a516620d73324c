"""The edge over HTTP: connections that wait, slow ones and broken ones cost others nothing, and fill no log."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import ssl
import struct
import sys
from collections.abc import Iterator

import pytest

from moa_server.edge.connection_limits import ConnectionSlots, EdgeLimits
from moa_server.edge.port_sockets import PortSockets
from moa_server.settings import Settings
from support.malformed_framing import REQUESTS, SMUGGLED
from support.server.attacks import Victim
from support.server.edge_running import Edge, edge, error_of, eventually, is_closed, read_all, secured, status_of
from support.server.running import serving
from support.toy_engine import PRINTS, ToyEngine

PATIENT = EdgeLimits(connections=20, per_address=1000, header_seconds=60)
HASTY = EdgeLimits(header_seconds=1, body_seconds=1, send_seconds=0.5, close_seconds=0.5)
UPGRADED = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
HOLD = b"GET /hold HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def running():
    with edge(PATIENT) as running:
        yield running
        assert not running.complaints()


@pytest.fixture
def hasty():
    with edge(HASTY) as running:
        yield running
        assert not running.complaints()


@pytest.fixture
def clients():
    with contextlib.ExitStack() as stack:
        yield lambda connected: stack.enter_context(connected)


def test_a_connection_has_one_request(running):
    requests = [b"GET / HTTP/1.1\r\n", b"GET /missing HTTP/1.1\r\n", b"POST /echo HTTP/1.1\r\nContent-Length: 0\r\n"]
    for request in requests:
        with running.open(2 * (request + b"Host: localhost\r\nConnection: keep-alive\r\n\r\n")) as connected:
            assert read_all(connected).count(b"HTTP/1.1 ") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="struct tcp_info")
def test_bytes_and_ends_of_connections_are_seen():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sockets = PortSockets(listening)
        with socket.create_connection(listening.getsockname()) as client, listening.accept()[0]:
            peer = "127.0.0.1", str(client.getsockname()[1])
            client.sendall(b"abc")
            eventually(lambda: sockets.peers() == {peer: 3})
            client.shutdown(socket.SHUT_WR)
            eventually(lambda: sockets.peers() == {peer: None})


# -- the ceiling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: local"])
def test_unfinished_requests_beyond_the_ceiling_give_way_oldest_first(clients, sent, running):
    crowd = [clients(running.open(sent)) for _ in range(40)]
    assert status_of(running.ask()) == 200
    eventually(lambda: sum(is_closed(each) for each in crowd) >= 20)
    eventually(lambda: len(running.slots) <= 20)
    assert running.slots.busy == 0 and not is_closed(crowd[-1])


def test_requests_that_are_being_answered_do_not_give_way(clients, running):
    running.hold.clear()
    held = [clients(running.open(HOLD)) for _ in range(5)]
    with running.websocket() as websocket:
        websocket.send(b"hello")
        assert websocket.recv(30) == b"hello"
        eventually(lambda: running.slots.busy == 6)
        for _ in range(40):
            clients(running.open())
        assert status_of(running.ask()) == 200
        websocket.send(b"still here")
        assert websocket.recv(30) == b"still here"
    running.hold.set()
    for each in held:
        assert status_of(each.recv(65536)) == 200


def refused_when_busy(answer: bytes) -> bool:
    return status_of(answer) == 503 and b"retry-after: 5" in answer.lower()


def test_when_all_are_busy_a_request_is_told_when_to_come_back(clients):
    with edge(PATIENT) as running:
        running.hold.clear()
        held = [clients(running.open(HOLD)) for _ in range(running.slots.most_busy)]
        eventually(lambda: running.slots.busy == len(held))
        for answer in (running.ask(), running.ask(UPGRADED)):
            assert refused_when_busy(answer)
        head = running.ask(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert refused_when_busy(head) and head.endswith(b"\r\n\r\n")
        assert all("busy" in line for line in running.complaints())
        running.hold.set()
        assert all(status_of(each.recv(65536)) == 200 for each in held)
        eventually(lambda: running.slots.busy == 0)
        assert status_of(running.ask()) == 200


@pytest.mark.parametrize("unfinished", [POST, UPGRADED])
def test_what_follows_a_request_is_no_part_of_it(clients, unfinished, running):
    connected = clients(running.open(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + unfinished))
    answer = read_all(connected)
    assert status_of(answer) == 200 and answer.count(b"HTTP/1.1 ") == 1
    eventually(lambda: running.slots.busy == 0)


def test_one_address_may_have_few_connections_without_a_header(clients):
    with edge(EdgeLimits(connections=100, per_address=5)) as running:
        idle = [clients(running.open()) for _ in range(12)]
        eventually(lambda: sum(is_closed(each) for each in idle) >= 7)
        eventually(lambda: len(running.slots) <= 5)
        other = clients(running.open(source_address=("127.0.0.2", 0)))
        eventually(lambda: len(running.slots) == 6)
        assert not is_closed(other) and not is_closed(idle[-1])
        assert status_of(running.ask()) == 200


def test_one_address_may_have_few_bodies_that_are_not_whole(clients):
    with edge(EdgeLimits(connections=100, per_address=5)) as running:
        slow = [clients(running.open(POST)) for _ in range(12)]
        assert [status_of(each.recv(65536)) for each in slow[:7]] == [503] * 7
        assert status_of(running.ask(CHUNKS + b"1\r\nx\r\n0\r\n\r\n")) == 200
        assert status_of(slow[7].recv(65536)) == 503
        slow[-1].sendall(bytes(10))
        assert status_of(slow[-1].recv(65536)) == 200
        assert not running.complaints()


# -- deadlines -------------------------------------------------------------------------------------


def trickle(connected: socket.socket, parts: bytes) -> None:
    """Send one byte after the other until the server has closed."""
    with contextlib.suppress(OSError):
        connected.settimeout(0.05)
        for at in range(len(parts)):
            connected.send(parts[at : at + 1])
            with contextlib.suppress(TimeoutError):
                if connected.recv(1, socket.MSG_PEEK):
                    break
    connected.settimeout(30)


def test_a_slow_header_ends_the_connection(clients, hasty):
    connected = clients(hasty.open())
    trickle(connected, b"GET / HTTP/1.1\r\nX-A: " + b"a" * 500)
    assert b" 200 " not in read_all(connected)


def test_an_answer_may_take_longer_than_a_header(clients, hasty):
    hasty.hold.clear()
    held = clients(hasty.open(HOLD))
    eventually(lambda: hasty.slots.busy == 1)
    assert read_all(clients(hasty.open())) == b"", "a silent one is closed first"
    hasty.hold.set()
    assert status_of(held.recv(65536)) == 200


@pytest.mark.parametrize("path", [b"/echo", b"/refusing"])
def test_a_slow_body_ends_the_connection(clients, path, hasty):
    connected = clients(hasty.open(b"POST " + path + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"))
    trickle(connected, b"b" * 500)
    answer = read_all(connected)
    assert status_of(answer) == (408 if path == b"/echo" else 401)
    eventually(lambda: len(hasty.slots) == 0)


def test_a_header_that_is_too_large_is_refused(clients, running):
    answer = running.ask(b"GET / HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 300_000 + b"\r\n\r\n")
    assert not answer or status_of(answer) == 431
    fitting = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-A: " + b"a" * 10_000 + b"\r\n\r\n"
    assert status_of(running.ask(fitting)) == 200


def test_a_body_in_tiny_pieces_is_refused_before_its_end(running):
    """Each piece costs the event loop a turn."""
    answer = running.ask(CHUNKS + b"1\r\nx\r\n" * 5000)
    assert status_of(answer) == 400 and "256 bytes" in error_of(answer)
    assert running.ask(CHUNKS + b"200\r\n" + bytes(512) + b"\r\n" + b"0\r\n\r\n").endswith(b"512")


def test_a_body_arrives_whole_however_it_is_cut(clients, running):
    body = random.Random(1).randbytes(700_000)
    request = b"POST /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 700000\r\n\r\n" + body
    assert running.ask(request).endswith(b"\r\n\r\n700000")


# -- garbage ---------------------------------------------------------------------------------------

UPGRADE = b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
CHUNKED = b"POST /%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nnonsense\r\n"
GARBAGE = [
    bytes.fromhex("16030100c8010000c40303") + bytes(190),  # the beginning of a TLS handshake
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    b"\x00" * 100,
    b"\r\n" * 100,
    b"GET\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",  # no Host
    b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /%ff%00%zz HTTP/1.1\r\nHost: a\r\n\r\nGET",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    CHUNKED % b"echo",
    CHUNKED % b"refusing",
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    UPGRADE + b"\r\n",
    UPGRADE + b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 1\r\n\r\n",
    UPGRADE + b"Content-Length: 3\r\n\r\nabc",
    UPGRADE + b"X: " + b"x" * 20_000 + b"\r\n\r\n",
    UPGRADE + b"".join(b"X%d: x\r\n" % number for number in range(300)) + b"\r\n",
    UPGRADE.replace(b"GET", b"POST") + b"\r\n",
    UPGRADE.replace(b"1.1", b"1.0") + b"\r\n",
]


def leave_by_reset(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connected.close()


def test_garbage_is_refused_without_a_word_in_the_log():
    rng = random.Random(7)
    pieces = [UPGRADE, *(line + b"\r\n" for line in (b"GET / HTTP/1.1", b"Host: a", b"", b"Content-Length: 5"))]
    with edge(HASTY) as running:
        for sent in GARBAGE:
            answer = running.ask(sent)
            assert not answer or status_of(answer) in (200, 400, 401, 404, 405, 408, 426, 431), sent
            for leave in (socket.socket.close, leave_by_reset):
                leave(running.open(sent))
        for _ in range(150):
            parts = (rng.choice(pieces) if rng.random() < 0.6 else rng.randbytes(rng.randrange(60)) for _ in range(6))
            connected = running.open(b"".join(parts))
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_WR)
            leave_by_reset(connected) if rng.random() < 0.3 else connected.close()
        eventually(lambda: len(running.slots) == 0)
        assert status_of(running.ask()) == 200
        assert not running.complaints()


# -- over TLS --------------------------------------------------------------------------------------


def test_connections_in_a_tls_handshake_count_and_give_way(clients, tls):
    with edge(PATIENT, tls) as running:
        idle = [clients(running.open(b"\x16\x03" if number % 2 else b"")) for number in range(40)]
        with secured(running.open(b"")) as connected:
            connected.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert status_of(read_all(connected)) == 200
        eventually(lambda: sum(is_closed(each) for each in idle) >= 20)
        eventually(lambda: len(running.slots) <= 20)
        assert not running.complaints()


def test_slow_and_broken_tls_is_closed_without_a_word_in_the_log(clients, tls):
    with edge(HASTY, tls) as running:
        clients(running.open())
        clients(running.open(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"))
        clients(running.open(bytes.fromhex("16030100c8010000c40303")))
        silent = secured(clients(running.open()))
        assert read_all(silent) == b""
        slow = secured(running.open())
        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        read_all(slow)
        slow.close()
        eventually(lambda: len(running.slots) == 0)
        assert not running.complaints()


# -- answers before the end of a body -------------------------------------------------------------

MIB = 1 << 20


def post(path: str, size: int, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {size}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def sent(connected: socket.socket, size: int) -> int:
    """Send ``size`` bytes without reading; return how many went out before the server closed."""
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


@pytest.mark.parametrize(("size", "headers"), [(5 * MIB // 4, ()), (3 * MIB // 2, ("Connection: close",))])
def test_a_client_that_sends_all_of_a_too_large_body_first_gets_the_answer(size, headers):
    with (
        serving(ToyEngine(), Settings()) as verifier,
        socket.create_connection(("127.0.0.1", verifier.port), 30) as connected,
    ):
        connected.sendall(post("/v1/decode", size, *headers))
        assert sent(connected, size) == size
        answer = b""
        while b"\r\n\r\n" not in answer:  # the connection's end comes later
            answer += connected.recv(65536)
        assert status_of(answer) == 413 and answer.lower().count(b"connection: close") == 1


@pytest.mark.parametrize("headers", [(), ("Connection: close",)])
def test_an_early_answer_is_whole_and_the_last_one(headers):
    with edge(PATIENT) as running, refused(running, 10, *headers) as connected:
        connected.sendall(b"1234567890" + post("/echo", 0))
        answer = read_all(connected)
        assert status_of(answer) == 401 and answer.endswith(b"\r\n\r\nno") and answer.count(b"HTTP/1.1") == 1
        assert not running.complaints()


def test_few_bytes_are_read_after_an_answer():
    with edge(EdgeLimits(discard_bytes=MIB)) as running, refused(running, 100 * MIB) as connected:
        assert sent(connected, 100 * MIB) < 20 * MIB  # what the system holds for both ends is more than the bound
        eventually(lambda: len(running.slots) == 0)
        assert not running.complaints()


def test_bytes_are_read_for_a_short_time_after_an_answer():
    with edge(EdgeLimits(close_seconds=0.5)) as running, refused(running, 100) as connected:
        assert status_of(read_all(connected)) == 401
        eventually(lambda: len(running.slots) == 0 and not running.server.guard.lingering)
        assert not running.complaints()


# -- framing that a proxy may read otherwise -------------------------------------------------------

CHUNKS = b"POST /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


def cut_up(running: Edge, request: bytes, cut: bool) -> bytes:
    """The answer to a request that comes whole or byte by byte."""
    with running.open(b"" if cut else request) as connected:
        with contextlib.suppress(OSError):  # it may be answered before its end
            for at in range(len(request) if cut else 0):
                connected.sendall(request[at : at + 1])
        return read_all(connected)


@pytest.fixture(scope="module")
def framing():
    with edge(EdgeLimits(close_seconds=0.05)) as served:
        yield served
        assert not served.complaints()


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_nothing_after_an_ambiguous_request_is_answered(framing: Edge, request_: bytes, cut: bool) -> None:
    assert cut_up(framing, request_ + SMUGGLED, cut).count(b"HTTP/1.1 ") <= 1


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "byte by byte"])
def test_chunks_with_and_without_trailers_are_taken(framing, cut):
    for end in (b"\r\n", b"X-A: b\r\nX-C: d\r\n\r\n"):
        chunks = b"5;name=value\r\n1\n2\r\n\r\nC\r\n\r\n\n\n12345 67\r\n0\r\n"
        answer = cut_up(framing, CHUNKS + chunks + end, cut)
        assert status_of(answer) == 200 and answer.endswith(b"\r\n\r\n17")


def leave_in_a_body(victim: Victim, slots: ConnectionSlots) -> None:
    with victim.open() as connected:
        connected.sendall(victim.head("POST /v1/decode", "Content-Length: 10\r\n") + b"x")
        eventually(lambda: slots.busy)


@pytest.mark.parametrize("visit", [leave_in_a_body, lambda victim, slots: victim.session().close()])
def test_what_ended_does_not_wait_for_garbage_collection(visit):
    """Until then granian would keep the connection."""
    with serving(ToyEngine(), Settings()) as verifier:
        guard, slots = verifier.server.guard, verifier.server.slots
        gc.collect()
        gc.disable()
        try:
            visit(Victim(verifier.port, PRINTS), slots)
            eventually(lambda: slots.busy == 0 and not guard.tasks)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = {type(each).__name__ for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not found & {"ASGIHTTPProtocol", "ASGIWebsocketProtocol", "Task", "Connection"}
