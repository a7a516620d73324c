"""The edge over HTTP: connections that wait, slow ones and broken ones cost others nothing, and fill no log."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import struct

import pytest

from moa_server.edge import server as edge_module
from moa_server.edge.connection_limits import EdgeLimits
from support.server.edge_running import edge, error_of, eventually, is_closed, read_all, status_of

PATIENT = EdgeLimits(connections=20, per_address=1000, header_seconds=60)
HASTY = EdgeLimits(header_seconds=1, body_seconds=1, send_seconds=0.5, close_seconds=0.5)
UPGRADED = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
HOLD = b"GET /hold HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def clients():
    with contextlib.ExitStack() as stack:
        yield lambda connected: stack.enter_context(connected)


# -- the ceiling -----------------------------------------------------------------------------------


def test_idle_connections_beyond_the_ceiling_give_way_to_a_request(clients):
    with edge(PATIENT) as running:
        idle = [clients(running.open()) for _ in range(40)]
        assert status_of(running.ask()) == 200
        eventually(lambda: sum(is_closed(each) for each in idle) >= 20)
        assert len(running.slots) <= 20
        assert not any(is_closed(each) for each in idle[-10:]), "the oldest go first"
        assert not running.complaints()


def test_half_sent_headers_give_way_as_well(clients):
    with edge(PATIENT) as running:
        for _ in range(60):
            clients(running.open(b"GET / HTTP/1.1\r\nHost: local"))
        assert status_of(running.ask()) == 200
        eventually(lambda: len(running.slots) <= 20)


def test_requests_that_are_being_answered_do_not_give_way(clients):
    with edge(PATIENT) as running:
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


def test_when_all_are_busy_a_request_is_told_when_to_come_back(clients):
    with edge(PATIENT) as running:
        running.hold.clear()
        held = [clients(running.open(HOLD)) for _ in range(running.slots.most_busy)]
        eventually(lambda: running.slots.busy == len(held))
        answer = running.ask()
        assert (
            status_of(answer) == 503 and b"retry-after: 5" in answer.lower() and "try again later" in error_of(answer)
        )
        answer = running.ask(UPGRADED)
        assert status_of(answer) == 503 and b"retry-after: 5" in answer.lower()
        running.hold.set()
        assert all(status_of(each.recv(65536)) == 200 for each in held)
        eventually(lambda: running.slots.busy == 0)
        assert status_of(running.ask()) == 200


POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"


def test_a_crowd_of_unfinished_bodies_keeps_nobody_out(clients):
    with edge(PATIENT) as running:
        crowd = [clients(running.open(POST + b"12345")) for _ in range(40)]
        assert status_of(running.ask()) == 200
        eventually(lambda: len(running.slots) <= 20)
        assert running.slots.busy == 0
        crowd[-1].sendall(b"67890")
        assert status_of(crowd[-1].recv(65536)) == 200
        assert not running.complaints()


def test_whose_request_is_whole_only_when_all_are_busy_is_told_so(clients):
    with edge(PATIENT) as running:
        running.hold.clear()
        late = clients(running.open(POST))
        eventually(lambda: len(running.slots) == 1)
        for _ in range(running.slots.most_busy):
            clients(running.open(HOLD))
        eventually(lambda: running.slots.busy == running.slots.most_busy)
        late.sendall(b"1234567890")
        answer = read_all(late)
        assert status_of(answer) == 503 and b"retry-after: 5" in answer.lower()
        assert "try again later" in error_of(answer)
        head = running.ask(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status_of(head) == 503 and head.endswith(b"\r\n\r\n")
        assert all("connections are busy" in line for line in running.complaints())


@pytest.mark.parametrize("unfinished", [POST, UPGRADED])
def test_what_follows_a_request_is_no_part_of_it(clients, unfinished):
    with edge(PATIENT) as running:
        connected = clients(running.open(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + unfinished))
        assert status_of(connected.recv(65536)) == 200
        eventually(lambda: running.slots.busy == 0)
        assert len(running.slots) == 1


def test_one_address_may_have_only_so_many_without_a_header(clients):
    with edge(EdgeLimits(connections=100, per_address=5)) as running:
        idle = [clients(running.open()) for _ in range(12)]
        eventually(lambda: sum(is_closed(each) for each in idle) >= 7)
        assert len(running.slots) <= 5
        other = clients(running.open(source_address=("127.0.0.2", 0)))
        eventually(lambda: len(running.slots) == 6)
        assert not is_closed(other) and not is_closed(idle[-1])
        assert status_of(running.ask()) == 200


def test_a_full_descriptor_table_is_one_line_in_the_log(monkeypatch):
    refusals = 20
    accept = asyncio.SelectorEventLoop.sock_accept

    async def exhausted(self, listening):
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(self, listening)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", exhausted)
    monkeypatch.setattr(edge_module, "_EXHAUSTED_PAUSE_S", 0.01)
    with edge(PATIENT) as running:
        assert status_of(running.ask()) == 200
        assert not refusals
        (line,) = running.complaints()
        assert "no descriptor is left for a new connection: Too many open files None" in line


# -- deadlines -------------------------------------------------------------------------------------


def test_a_silent_connection_is_closed(clients):
    with edge(HASTY) as running:
        assert read_all(clients(running.open())) == b""
        assert not running.complaints()


def trickle(connected: socket.socket, parts: bytes) -> None:
    """One byte after the other until the server has closed; it stops by itself."""
    with contextlib.suppress(OSError):
        connected.settimeout(0.05)
        for at in range(len(parts)):
            connected.send(parts[at : at + 1])
            with contextlib.suppress(TimeoutError):
                if connected.recv(1, socket.MSG_PEEK):
                    break
    connected.settimeout(30)


def test_a_slow_header_is_refused(clients):
    with edge(HASTY) as running:
        connected = clients(running.open(b"GET / HTTP/1.1\r\n"))
        trickle(connected, b"X-A: " + b"a" * 500)
        answer = read_all(connected)
        assert status_of(answer) == 408 and "no whole request header arrived within 1 seconds" in error_of(answer)


def test_a_slow_header_on_a_connection_that_had_an_answer_is_refused(clients):
    with edge(HASTY) as running:
        connected = clients(running.open(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        assert status_of(connected.recv(65536)) == 200
        trickle(connected, b"GET / HTTP/1.1\r\nX-A: " + b"a" * 500)
        assert status_of(read_all(connected)) == 408


def test_an_answer_may_take_longer_than_a_header(clients):
    with edge(HASTY) as running:
        running.hold.clear()
        held = clients(running.open(HOLD))
        eventually(lambda: running.slots.busy == 1)
        assert read_all(clients(running.open())) == b"", "a later one that is silent is closed first"
        running.hold.set()
        assert status_of(held.recv(65536)) == 200


@pytest.mark.parametrize("path", [b"/echo", b"/refusing"])
def test_a_slow_body_ends_the_connection(clients, path):
    with edge(HASTY) as running:
        connected = clients(running.open(b"POST " + path + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"))
        trickle(connected, b"b" * 500)
        answer = read_all(connected)
        if path == b"/echo":
            assert status_of(answer) == 408 and "the body did not arrive within 1 seconds" in error_of(answer)
        else:
            assert status_of(answer) == 401
        eventually(lambda: len(running.slots) == 0)
        assert not running.complaints()


def test_a_header_that_is_too_large_is_refused(clients):
    with edge(PATIENT) as running:
        for size in (70_000, 300_000):
            answer = running.ask(b"GET / HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * size + b"\r\n\r\n")
            assert status_of(answer) == 431 and "more than 65536 bytes" in error_of(answer)
        fitting = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-A: " + b"a" * 40_000 + b"\r\n\r\n"
        assert status_of(running.ask(fitting)) == 200


def test_a_peer_that_does_not_read_an_answer_is_cut_off(clients):
    with edge(HASTY) as running:
        clients(running.open(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n"))
        eventually(lambda: len(running.slots) == 1)
        eventually(lambda: len(running.slots) == 0)
        assert not running.complaints()


def test_a_body_arrives_whole_however_it_is_cut(clients):
    with edge(PATIENT) as running:
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
    with edge(HASTY) as running:
        for sent in GARBAGE:
            answer = running.ask(sent)
            assert not answer or status_of(answer) in (200, 400, 401, 404, 405, 408, 426, 431), sent
            for leave in (socket.socket.close, leave_by_reset):
                connected = running.open(sent)
                leave(connected)
        eventually(lambda: len(running.slots) == 0)
        assert status_of(running.ask()) == 200
        assert not running.complaints()


def test_random_bytes_are_refused_without_a_word_in_the_log():
    rng = random.Random(7)
    pieces = [
        b"GET / HTTP/1.1\r\n",
        b"Host: a\r\n",
        b"\r\n",
        b"Content-Length: 5\r\n",
        b"Connection: upgrade\r\n",
        UPGRADE,
    ]
    with edge(HASTY) as running:
        for _ in range(150):
            sent = b"".join(
                rng.choice(pieces) if rng.random() < 0.6 else rng.randbytes(rng.randrange(60)) for _ in range(6)
            )
            connected = running.open(sent)
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_WR)
            leave_by_reset(connected) if rng.random() < 0.3 else connected.close()
        eventually(lambda: len(running.slots) == 0)
        assert status_of(running.ask()) == 200
        assert not running.complaints()


# -- latency ---------------------------------------------------------------------------------------


def test_small_frames_do_not_wait_for_acknowledgements(clients):
    with edge(PATIENT) as running:
        clients(running.open())
        protocol = eventually(lambda: next(iter(running.server.server_state.connections), None))
        accepted = protocol.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
