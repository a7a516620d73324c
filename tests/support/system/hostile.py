"""A real chat against servers that do what no verifier does, over real sockets, and what becomes of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from moa_runtime.chat import Chat
from moa_runtime.drafters.base import GREEDY, Budget, Float32
from moa_runtime.drafters.moa import GrowingRows
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.errors import MoaError
from moa_runtime.events import AnswerFinished, LinkChanged, LinkStatus
from moa_runtime.options import LoopSettings
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree, chain
from moa_runtime.transport import Endpoint, Timing
from moa_runtime.wire.moa.v1 import session_pb2 as wire

ANSWER = 12  # tokens asked for
CONTEXT = 200
DEADLINE_S = 3.0
TIMING = Timing(
    open_timeout=0.5, welcome_timeout=0.5, ping_interval=0.3, ping_timeout=0.3, first_backoff=0.05, longest_backoff=0.05
)
_MOST_BYTES = 100 << 20  # that a server may cost: a frame has 4 MiB at most, and this one is in the same process
BINARY, TEXT, CONTINUED, CLOSE, PING = 2, 1, 0, 8, 9


class Guesser:
    """Always drafts the same tokens; its rows are of one head of one number."""

    needs_rows, stopping_rule = True, None

    def __init__(self) -> None:
        self._rows = GrowingRows((1, 1))

    @property
    def rows(self) -> int:
        return self._rows.length

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        self._rows.write(start, keys, values)

    def truncate_rows(self, length: int) -> None:
        self._rows.truncate(length)

    def propose(self, prefix: Any, budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        parents = tuple(chain(2))
        return DraftTree((7, 8), parents, (-1.0, -1.0))


class Peer:
    """The server's end of a connection: HTTP and frames are written by hand, as no library lies well enough."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.head = ""

    async def request(self) -> None:
        self.head = (await self._reader.readuntil(b"\r\n\r\n")).decode()

    def raw(self, data: bytes) -> None:
        self._writer.write(data)

    async def flush(self) -> None:
        await self._writer.drain()
        await asyncio.sleep(0)  # the chat is in the same loop

    def upgrade(self, *headers: str, accept: str | None = None) -> None:
        key = re.search(r"(?im)^sec-websocket-key: (.*)\r$", self.head)
        if key is None:
            raise EOFError  # a request that asks why there was no connection
        if re.search(r"(?im)^sec-websocket-protocol:", self.head) and not headers:
            headers = ("Sec-WebSocket-Protocol: moa.v1",)
        digest = hashlib.sha1(f"{key[1]}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
        accept = base64.b64encode(digest).decode() if accept is None else accept
        lines = ["Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Accept: {accept}", *headers]
        self.raw("\r\n".join(["HTTP/1.1 101 Switching Protocols", *lines, "\r\n"]).encode())

    def frame(self, data: bytes, opcode: int = BINARY, *, first: int = 0x80, length: int | None = None) -> None:
        """``first``: FIN and reserved bits; ``length``: that is announced."""
        length = len(data) if length is None else length
        sizes = bytes([length]) if length < 126 else struct.pack("!BQ", 127, length)
        self.raw(bytes([first | opcode]) + sizes + data)

    def say(self, **event: Any) -> None:
        self.frame(wire.ServerMessage(**event).SerializeToString())

    async def hear(self) -> wire.ClientMessage:
        """The next message; pings are answered."""
        while True:
            first, size = await self._reader.readexactly(2)
            length = size & 0x7F
            if length == 126:
                [length] = struct.unpack("!H", await self._reader.readexactly(2))
            elif length == 127:
                [length] = struct.unpack("!Q", await self._reader.readexactly(8))
            mask = await self._reader.readexactly(4)
            data = bytes(b ^ mask[i % 4] for i, b in enumerate(await self._reader.readexactly(length)))
            if first & 0xF == CLOSE:
                raise EOFError
            if first & 0xF == PING:
                self.frame(data, 10)
            else:
                return wire.ClientMessage.FromString(data)


Step = Callable[[Peer], Awaitable[None] | None]


@dataclass
class Server:
    """Speaks as a verifier does, but for what it is given.

    Attributes:
        http: in the place of the handshake.
        greeted: in the place of the Welcome.
        welcome: fields of it that differ.
        asked: in the place of verdicts, given the right one.
        verdict: changes each.
    """

    http: Step | None = None
    greeted: Step | None = None
    welcome: dict[str, Any] = field(default_factory=dict)
    asked: Callable[[Peer, wire.Verdict], Awaitable[None] | None] | None = None
    verdict: Callable[[wire.Verdict], None] = lambda verdict: None
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        peer = Peer(reader, writer)
        with contextlib.suppress(EOFError, OSError, asyncio.CancelledError):
            await peer.request()
            if self.http is not None:
                await _done(self.http(peer))
            else:
                peer.upgrade()
                await self._talk(peer)
        writer.close()

    async def _talk(self, peer: Peer) -> None:
        ends = 0
        while True:
            message = await peer.hear()
            event = message.WhichOneof("event")
            if event == "hello":
                if self.greeted is not None:
                    await _done(self.greeted(peer))
                    continue
                limits = wire.Limits(max_context=CONTEXT, max_draft_tokens=8)
                peer.say(
                    welcome=wire.Welcome(
                        **{"protocol_version": 2, "resume_token": "t", "limits": limits, **self.welcome}
                    )
                )
            elif event == "credit":
                peer.say(standing=wire.CreditRevoked(epoch=message.credit.epoch, serial=message.credit.serial))
            elif event in ("prompt", "draft"):
                frame = message.prompt if event == "prompt" else message.draft
                supplied = len(frame.tokens) if event == "prompt" else 0
                verdict = wire.Verdict(epoch=frame.epoch, base_len=frame.base_len + supplied, tokens=[5])
                ends = message.prompt.max_length or ends
                if verdict.base_len + 1 == ends:
                    verdict.finish = wire.FINISH_LENGTH
                if self.asked is not None:
                    await _done(self.asked(peer, verdict))
                elif self.verdict(verdict) is None:
                    peer.say(verdict=verdict)
            elif event == "ping":
                peer.say(pong=wire.Pong())
            elif event == "bye":
                return


async def _done(step: Awaitable[None] | None) -> None:
    if step is not None:
        await step


@contextlib.asynccontextmanager
async def listening(server: Server) -> AsyncIterator[int]:
    tcp = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield tcp.sockets[0].getsockname()[1]
    finally:
        tcp.close()


async def asked(chat: Chat) -> str:
    """How a question ends: "answered", "offline: why" or "failed: why"."""
    try:
        async with contextlib.aclosing(chat.send("Hi", max_new_tokens=ANSWER)) as events:
            async for event in events:
                if isinstance(event, AnswerFinished):
                    assert len(event.tokens) <= ANSWER
                    return "answered"
                if isinstance(event, LinkChanged) and event.status is LinkStatus.OFFLINE:
                    return f"offline: {event.detail}"
    except MoaError as error:
        return f"failed: {error}"
    raise AssertionError("no AnswerFinished")


def outcome(server: Server, bundle: Any, caplog: pytest.LogCaptureFixture, wait_s: float = DEADLINE_S) -> str:
    """What a user hears within ``wait_s`` of a question, "refused: [code] why" if the chat does not even open."""
    lost: list[str] = []
    rss = psutil.Process().memory_info
    before = most = rss().rss

    async def weigh() -> None:
        nonlocal most
        while True:
            most = max(most, rss().rss)
            await asyncio.sleep(0.02)

    async def run() -> str:
        weighing = asyncio.create_task(weigh())
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: lost.append(str(context)))
        async with listening(server) as port:
            settings = LoopSettings(offline="off", drafting="device", late_after_s=60, prefill_late_after_s=60)
            shape = FixedShape(Budget.chain(2))
            endpoint = Endpoint(f"ws://127.0.0.1:{port}", token="secret")
            chat = Chat(bundle, endpoint, drafter=Guesser(), controller=shape, settings=settings, timing=TIMING)
            try:
                await asyncio.wait_for(chat.open(), DEADLINE_S)
                return await asyncio.wait_for(asked(chat), wait_s)
            except asyncio.TimeoutError:
                return "waits"  # as for a verifier that hangs; the user may stop it, or the device write on
            except MoaError as error:
                return f"refused: [{error.code}] {error}"
            finally:
                await asyncio.wait_for(chat.close(), DEADLINE_S)
                weighing.cancel()

    with caplog.at_level(logging.WARNING):
        said = asyncio.run(run())
    assert not lost and not [record for record in caplog.records if record.exc_info]
    assert said.isprintable() and len(said) < 700
    assert most - before < _MOST_BYTES
    return said
