"""The edge over WebSocket: floods, peers that do not read, and frames that are none."""

from __future__ import annotations

import contextlib
import random
import socket
import struct

import pytest
from websockets.exceptions import ConnectionClosed

from moa_server.edge.connection_limits import EdgeLimits
from moa_server.edge.websocket import EdgeWebSocket
from support.server.edge_running import edge, eventually, read_all

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
        eventually(lambda: not running.server.server_state.tasks)
        assert not running.complaints()


VIOLATIONS = {
    1007: [frame(TEXT, b"\xff\xfe"), frame(TEXT, b"\xe2\x82", fin=False) + frame(CONT, b"\x28")],
    1002: [frame(CONT, b"a"), frame(TEXT, b"a", fin=False) + frame(TEXT, b"b"), frame(CLOSE, b"\x03")],
    1001: [frame(CLOSE, struct.pack("!H", 1001))],
    1009: [b"\x82\xff" + struct.pack("!Q", 1 << 62) + bytes(4)],
    1008: [frame(PING) * 1000, frame(PONG) * 1000],
    4000: [frame(BINARY, b"close") + frame(PING) * 20],
}
VIOLATIONS[1007] += [frame(CLOSE, struct.pack("!H", 1000) + b"\xff")]
VIOLATIONS[1002] += [frame(PING, b"a" * 126), frame(PING, b"a", fin=False)]
VIOLATIONS[1002] += [b"\xf2\x80" + bytes(4), b"\x83\x80" + bytes(4), b"\x82\x00"]  # reserved bits, opcode; no mask
VIOLATIONS[1009] += [frame(BINARY, b"a" * 60000, fin=False) + frame(CONT, b"a" * 60000)]
VIOLATIONS[1009] += [frame(BINARY, b"", fin=False) + frame(CONT, b"", fin=False) * 2000]


@pytest.mark.parametrize(("sent", "code"), [(sent, code) for code, cases in VIOLATIONS.items() for sent in cases])
def test_a_violation_of_the_protocol_is_closed_with_its_code(running, sent, code):
    with upgraded(running) as connected:
        connected.sendall(sent)
        connected.shutdown(socket.SHUT_WR) if code == 4000 else None
        assert close_code(read_all(connected)) == code
    eventually(lambda: len(running.ended) == 1 or code == 4000)
    eventually(lambda: len(running.slots) == 0)


def test_a_message_that_is_too_large_is_refused_while_it_is_sent(running):
    with running.websocket() as websocket, pytest.raises(ConnectionClosed) as closed:
        websocket.send(b"a" * 4_000_000)
        websocket.recv(30)
    assert closed.value.rcvd.code == 1009


def test_a_close_frame_is_not_lost_to_data_sent_after(running):
    with upgraded(running) as connected:
        connected.sendall(frame(CONT) + bytes(2_000_000))
        parts = [*iter(lambda: connected.recv(65536), b"")]  # raises if the server just closed: that is a reset
    assert close_code(b"".join(parts)) == 1002


@pytest.mark.parametrize("size", [0, 125])
def test_a_ping_flood_that_never_reads_is_cut_and_leaves_no_buffer(monkeypatch, size):
    largest, handle = [], EdgeWebSocket.handle_ping

    def watched(self) -> None:
        handle(self)
        largest.append(self.transport.get_write_buffer_size())

    monkeypatch.setattr(EdgeWebSocket, "handle_ping", watched)
    with edge(HASTY) as running:
        with upgraded(running) as connected, contextlib.suppress(OSError):
            for _ in range(200):  # 2.6 MB at most
                connected.sendall(frame(PING, b"p" * size) * 100)
            read_all(connected)
        eventually(lambda: len(running.slots) == 0)
        assert len(largest) < 2000 and max(largest) < 1 << 17  # most of them are not even parsed
        assert not running.complaints()


def test_messages_are_parsed_only_as_the_app_takes_them(running):
    running.take.clear()
    with upgraded(running) as connected:
        count = 20_000
        connected.sendall(frame(BINARY, b"m") * count)  # 140 kB: less than the sockets' buffers hold
        (protocol,) = running.server.server_state.connections
        eventually(lambda: protocol.queue.qsize())
        sizes: list[int] = []  # seen between two turns of the loop, not in the midst of parsing
        protocol.loop.call_soon_threadsafe(lambda: sizes.append(protocol.queue.qsize()))
        eventually(lambda: sizes)
        assert 0 < sizes[0] <= (4 << 10) // 7 + 1
        running.take.set()
        assert received(connected, 3 * count) == b"\x82\x01m" * count


def test_frames_sent_before_the_handshake_is_answered_wait_for_it(running):
    with running.open(UPGRADE % b"" + frame(PING, b"p") + frame(BINARY, b"early")) as connected:
        frames = b""
        while not frames.endswith(b"early"):
            frames += connected.recv(65536)
    head, _, frames = frames.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101") and frames == b"\x8a\x01p\x82\x05early"


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


def test_a_violation_while_the_app_works_is_no_fault_of_the_app(running):
    running.take.clear()
    with upgraded(running) as connected:
        connected.sendall(frame(BINARY, b"a question"))
        eventually(lambda: len(running.slots) == 1)
        connected.sendall(frame(BINARY, b"another"))
        connected.sendall(frame(TEXT, b"\xff"))
        running.take.set()
        assert close_code(read_all(connected)) == 1007
    eventually(lambda: running.ended)


# -- before the first message ----------------------------------------------------------------------


def test_a_crowd_without_a_whole_message_keeps_no_client_out():
    with edge(EdgeLimits(connections=20, per_address=1000)) as running, contextlib.ExitStack() as crowd:
        for sent in [b"", frame(BINARY, b"Hel", fin=False), frame(BINARY, b"Hello")[:8], frame(PING)] * 10:
            crowd.enter_context(upgraded(running)).sendall(sent)
        with running.websocket() as websocket:
            websocket.send(b"hello")
            assert websocket.recv(30) == b"hello"
            assert running.slots.busy == 1
        eventually(lambda: len(running.slots) <= 20)
        assert not running.complaints()


def test_a_websocket_is_no_longer_busy_once_it_is_being_closed(running):
    with upgraded(running) as connected:
        connected.sendall(frame(BINARY, b"hello"))
        assert connected.recv(100) == b"\x82\x05hello"
        assert running.slots.busy == 1
        connected.sendall(frame(BINARY, b"close"))
        assert close_code(connected.recv(100)) == 4000
        eventually(lambda: not running.slots.busy)
        assert len(running.slots) == 1
    with upgraded(running) as connected:
        connected.sendall(frame(BINARY, b"hello") + frame(CONT))
        eventually(lambda: running.ended.count(1002))
        assert running.slots.busy == 0


PARTS = frame(BINARY, b"a" * 100, fin=False) + frame(CONT, b"a" * 100, fin=False) * 90


@pytest.mark.parametrize("sent", [frame(BINARY, b"a" * 13_000), frame(BINARY, b"a" * 60000)[:9000], PARTS])
def test_the_first_message_must_be_short(running, sent):
    with upgraded(running) as connected:
        connected.sendall(sent)
        answer = read_all(connected)
        assert close_code(answer) == 1009 and b"8192" in answer


def test_later_messages_may_be_long_and_come_at_once(running):
    with upgraded(running) as connected:
        connected.sendall(frame(BINARY, b"hello") + frame(BINARY, b"a" * 60000))
        expected = b"\x82\x05hello\x82\x7e\xea\x60" + b"a" * 60000
        assert received(connected, len(expected)) == expected
