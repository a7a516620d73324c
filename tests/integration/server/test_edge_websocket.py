"""The edge over WebSocket: floods, peers that do not read, and frames that are none."""

from __future__ import annotations

import contextlib
import random
import socket
import struct

import pytest

from moa_server.edge.connection_limits import EdgeLimits
from support.server.edge_running import edge, eventually, read_all, status_of

PATIENT = EdgeLimits()
HASTY = EdgeLimits(send_seconds=0.5, close_seconds=0.5)
UPGRADE = (
    b"GET /ws%s HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
CONT, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA


def frame(opcode: int, payload: bytes = b"", fin: bool = True) -> bytes:
    """A frame with a mask of zeros, of less than 64 KiB."""
    head = bytes([(0x80 if fin else 0) | opcode])
    size = bytes([0x80 | len(payload)]) if len(payload) < 126 else bytes([0xFE]) + struct.pack("!H", len(payload))
    return head + size + bytes(4) + payload


def upgraded(running, **options) -> socket.socket:
    connected = running.open(UPGRADE % b"", **options)
    answer = b""
    while not answer.endswith(b"\r\n\r\n") and (byte := connected.recv(1)):
        answer += byte
    assert answer.startswith(b"HTTP/1.1 101")
    assert b"\r\nconnection: upgrade\r\n" in answer.lower()  # OkHttp takes nothing besides
    return connected


def received(connected: socket.socket, count: int) -> bytes:
    """The next ``count`` bytes, and what came with them."""
    found = bytearray()
    while len(found) < count:
        found += connected.recv(65536)
    return bytes(found)


def close_code(received: bytes) -> int:
    """Of the last frame, which is a close frame with a reason of less than 126 bytes."""
    at = next(at for at in range(len(received)) if received[at] == 0x88 and at + 2 + received[at + 1] == len(received))
    return struct.unpack_from("!H", received, at + 2)[0]


@pytest.fixture
def running():
    with edge(PATIENT) as running:
        yield running
        eventually(lambda: not running.server.guard.tasks)
        assert not running.complaints()


VIOLATIONS = {
    "no UTF-8": frame(TEXT, b"\xff\xfe"),
    "a fragment of nothing": frame(CONT, b"a"),
    "a message in a message": frame(TEXT, b"a", fin=False) + frame(TEXT, b"b"),
    "half a close code": frame(CLOSE, b"\x03"),
    "a long ping": frame(PING, b"a" * 126),
    "reserved bits": b"\xf2\x80" + bytes(4),
    "an unknown opcode": b"\x83\x80" + bytes(4),
    "no mask": b"\x82\x00",
    "a huge length": b"\x82\xff" + struct.pack("!Q", 1 << 62) + bytes(4),
    "a close frame": frame(CLOSE, struct.pack("!H", 1001)),
}


@pytest.mark.parametrize("sent", VIOLATIONS.values(), ids=VIOLATIONS)
def test_a_violation_of_the_protocol_ends_the_connection(running, sent):
    with upgraded(running) as connected:
        connected.sendall(sent)
        read_all(connected)
    eventually(lambda: len(running.ended) == 1 and len(running.slots) == 0)


@pytest.mark.parametrize(
    "sent",
    [frame(PONG, b"p" * 100) * 600, frame(BINARY, b"a" * 60000, fin=False) + frame(CONT, b"a" * 60000, fin=False) * 9],
    ids=["pongs", "a message without an end"],
)
def test_bytes_that_are_no_whole_messages_have_a_limit(sent):
    with edge(EdgeLimits(unused_bytes=1 << 20)) as running:
        with upgraded(running) as connected, contextlib.suppress(OSError):
            while True:
                connected.sendall(sent)
        eventually(lambda: len(running.slots) == 0)
        assert not running.complaints()


def test_messages_that_are_taken_have_none():
    with edge(EdgeLimits(unused_bytes=1 << 20, header_seconds=1)) as running, running.websocket() as websocket:
        for _ in range(60):
            websocket.send(b"a" * 60000)
            assert websocket.recv(30) == b"a" * 60000
            running.server.slots.overdue(running.server._sockets.peers())


def test_a_close_frame_is_not_lost_to_data_sent_after(running):
    with upgraded(running) as connected:
        connected.sendall(frame(BINARY, b"close") + frame(BINARY, bytes(60000)) * 30)
        parts = [*iter(lambda: connected.recv(65536), b"")]  # raises if the server just closed: that is a reset
    assert close_code(b"".join(parts)) == 4000


@pytest.mark.parametrize("size", [0, 125])
def test_a_ping_flood_that_never_reads_is_no_burden(size):
    with edge(EdgeLimits(send_seconds=0.5, unused_bytes=1 << 20)) as running:
        with upgraded(running) as connected, contextlib.suppress(OSError):
            while True:
                connected.sendall(frame(PING, b"p" * size) * 100)
        eventually(lambda: len(running.slots) == 0)
        assert status_of(running.ask()) == 200 and not running.complaints()


def test_frames_that_the_app_does_not_take_are_not_read(running):
    running.take.clear()
    with upgraded(running) as connected:
        connected.settimeout(0.5)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 64 << 20:
                sent += connected.send(frame(BINARY, b"m" * 1000) * 100)
        assert sent < 32 << 20  # what the system holds of both ends
        running.take.set()


def test_frames_sent_before_the_handshake_is_answered_wait_for_it(running):
    with running.open(UPGRADE % b"" + frame(PING, b"p") + frame(BINARY, b"early")) as connected:
        frames = b""
        while not frames.endswith(b"early"):
            frames += connected.recv(65536)
    head, _, frames = frames.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101") and frames == b"\x8a\x01p\x82\x05early"


def test_no_request_follows_a_refused_upgrade(running):
    with running.open(UPGRADE % b"?refuse=1" + b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") as connected:
        answer = read_all(connected)
    assert status_of(answer) == 401 and answer.count(b"HTTP/1.1") == 1


def test_a_refused_upgrade_is_answered_whatever_follows_it(running):
    with running.open(UPGRADE % b"?refuse=1" + frame(BINARY, b"early") * 1000) as connected:
        assert read_all(connected).startswith(b"HTTP/1.1 401")


def test_random_frames_log_no_traceback():
    rng = random.Random(3)
    opcodes = [CONT, TEXT, BINARY, CLOSE, PING, PONG, 0x3, 0xF]
    with edge(HASTY) as running:
        for _ in range(150):
            with upgraded(running) as connected, contextlib.suppress(OSError):
                for _ in range(4):
                    sent = frame(rng.choice(opcodes), rng.randbytes(rng.randrange(140)), rng.random() < 0.7)
                    if rng.random() < 0.3:
                        sent = rng.randbytes(rng.randrange(40))
                    connected.sendall(sent)
                if rng.random() < 0.3:
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: len(running.slots) == 0)
        assert not running.complaints()


def test_later_messages_may_be_long_and_come_at_once(running):
    with upgraded(running) as connected:
        connected.sendall(frame(BINARY, b"hello") + frame(BINARY, b"a" * 60000))
        expected = b"\x82\x05hello\x82\x7e\xea\x60" + b"a" * 60000
        assert received(connected, len(expected)) == expected
