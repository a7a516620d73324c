"""Servers that are none, or misuse their connection. Each ends in a sentence, or the chat waits for the link, within a
deadline. More: test_connect_error.py."""

from __future__ import annotations

import asyncio
import re
import struct
import time
import zlib
from typing import Any

import pytest

from moa_runtime.session.tree import DraftTree
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.system.hostile import CLOSE, CONTINUED, PING, TEXT, Guesser, Peer, Server, Step, listening, outcome

# -- what answers is no verifier ------------------------------------------------------------------------


async def _slowly(peer: Peer, data: bytes, opcode: int | None = None) -> None:
    """Byte by byte, for longer than anybody waits."""
    for at in range(10_000):
        peer.raw(data[at : at + 1] or b"x")
        await peer.flush()
        await asyncio.sleep(0.02)


async def _endless_headers(peer: Peer) -> None:
    peer.raw(b"HTTP/1.1 101 Switching Protocols\r\n")
    for number in range(100_000):
        peer.raw(f"X-{number}: {'a' * 4000}\r\n".encode())
        await peer.flush()


def _page(peer: Peer) -> None:
    peer.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>")


def _sent_to(location: str) -> Step:
    return lambda peer: peer.raw(f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode())


def _upgraded_and(data: bytes) -> Step:
    def step(peer: Peer) -> None:
        peer.upgrade()
        peer.raw(data)

    return step


@pytest.mark.parametrize(
    ("http", "said"),
    [
        (_page, r"refused: \[http_status\] .* 200"),
        (_sent_to("ws://evil.example/"), r"refused: \[redirect\] .*HTTP 302"),
        (_sent_to("http://[bad"), r"refused: \[redirect\]"),
        (_sent_to("/v1/session"), r"refused: \[redirect\]"),
        (lambda peer: asyncio.sleep(60), r"refused: \[timeout\] .* 0\.5 s"),
        (lambda peer: _slowly(peer, b"HTTP/1.1 101 Switching Protocols\r\nX: "), r"refused: \[timeout\] .* 0\.5 s"),
        (_endless_headers, r"refused: \[(no_websocket|timeout)\]"),
        (lambda peer: peer.raw(b"HTTP/1.1 999999 \x1b[2J\r\n\r\n"), r"refused: \[no_websocket\]"),
        (lambda peer: peer.raw(b"\x00" * 100_000), r"refused: \[no_websocket\]"),
        (lambda peer: peer.upgrade(accept="bm8="), r"refused: \[no_websocket\]"),
        (lambda peer: peer.upgrade("Sec-WebSocket-Extensions: permessage-deflate"), r"refused: \[no_websocket\]"),
        (lambda peer: peer.upgrade("Sec-WebSocket-Protocol: evil"), r"refused: \[no_websocket\]"),
        (_upgraded_and(b"\x00\xff" * 1000), r"refused: \[closed\]"),
        (_upgraded_and(b""), r"refused: \[closed\]"),
    ],
)
def test_what_is_no_verifier(http: Step, said: str, small_bundle: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert re.match(said, heard := outcome(Server(http=http), small_bundle, caplog)), heard


def test_a_redirect_does_not_receive_the_token(small_bundle: Any, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = Server()

    async def run() -> None:
        async with listening(elsewhere) as port:
            server = Server(http=_sent_to(f"ws://127.0.0.1:{port}/v1/session"))
            assert "elsewhere" in await asyncio.to_thread(outcome, server, small_bundle, caplog)

    asyncio.run(run())
    assert not elsewhere.connections


# -- a connection that stands ---------------------------------------------------------------------------


async def _fragments(peer: Peer) -> None:
    peer.frame(b"a" * 100_000, first=0)
    for _ in range(10_000):
        peer.frame(b"a" * 100_000, CONTINUED, first=0)
        await peer.flush()


async def _half_a_frame(peer: Peer) -> None:
    peer.frame(b"half", length=100)
    await asyncio.sleep(60)


async def _flood(peer: Peer, message: bytes) -> None:
    while True:
        peer.frame(message)
        await peer.flush()


async def _answer_pings(peer: Peer) -> None:
    while True:
        await peer.hear()


def _closing(code: int, reason: bytes) -> Step:
    return lambda peer: peer.frame(struct.pack("!H", code) + reason, CLOSE)


_BOMB = zlib.compress(b"\0" * (64 << 20))[2:-4]
_PONGS = wire.ServerMessage(pong=wire.Pong(echo=wire.Echo(stamp=1))).SerializeToString()
#: A field that no version knows, of a megabyte.
_HEAVY = _PONGS + b"\xfa\x7f" + b"\x80\x80\x40" + b"x" * (1 << 20)


#: What ends a connection whenever it comes.
_MISUSES: list[Step] = [
    lambda peer: peer.frame(b"\0" * (5 << 20)),
    lambda peer: peer.frame(b"", length=1 << 62),
    _fragments,
    lambda peer: peer.frame(_BOMB, first=0xC0),
    lambda peer: peer.frame(b"", 7),
    lambda peer: peer.frame(b"\xff", TEXT),
    lambda peer: peer.frame(b"p" * 126, PING),
    _half_a_frame,
    lambda peer: _slowly(peer, b"\x82\x7f" + bytes(5) + b"\xff" * 3),
    *(_closing(code, b"\x1b[2Jgo away") for code in (1000, 1001, 1008, 1011, 1013, 4000)),
    _closing(99, b""),
]


@pytest.mark.parametrize("step", _MISUSES)
def test_a_connection_that_is_misused(step: Step, small_bundle: Any, caplog: pytest.LogCaptureFixture) -> None:
    heard = outcome(Server(asked=lambda peer, verdict: step(peer)), small_bundle, caplog)
    assert heard.startswith("offline: ")
    heard = outcome(Server(greeted=step), small_bundle, caplog)
    assert re.match(r"refused: \[(closed|no_welcome)\]", heard), heard


@pytest.mark.parametrize(
    "step", [lambda peer: None, lambda peer: _flood(peer, _PONGS), lambda peer: _flood(peer, _HEAVY)]
)
def test_a_verifier_that_sends_no_welcome(step: Step, small_bundle: Any, caplog: pytest.LogCaptureFixture) -> None:
    heard = outcome(Server(greeted=step), small_bundle, caplog)
    assert re.match(r"refused: \[no_welcome\] .* 0\.5 s", heard), heard


def test_a_flood_waits_at_the_door(small_bundle, caplog, monkeypatch):
    """While the device drafts, frames are not taken up: 473 MB waited after a second."""
    propose = Guesser.propose

    def slowly(*asked: Any) -> DraftTree:
        time.sleep(1.0)
        return propose(*asked)

    async def flood(peer: Peer, verdict: wire.Verdict) -> None:
        peer.say(verdict=verdict)
        hearing = asyncio.create_task(_answer_pings(peer))
        try:
            await _flood(peer, _HEAVY)
        finally:
            hearing.cancel()

    monkeypatch.setattr(Guesser, "propose", slowly)
    monkeypatch.setattr(Guesser, "needs_rows", False)
    assert outcome(Server(asked=flood), small_bundle, caplog).startswith(("waits", "offline: "))
