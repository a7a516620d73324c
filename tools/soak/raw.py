"""A connection to the verifier byte by byte: frames and requests that no library would send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from moa_runtime.manifest import Fingerprints
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.server import in_memory
from support.server.attacks import BINARY, CLOSE, frame
from support.server.running import Verifier, trusting

_UPGRADE = (
    b"GET /v1/session HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@dataclass(frozen=True)
class Target:
    """A verifier: its port, and what its clients must know of it.

    Attributes:
        vocabulary: token ids below it are the target's.
        context: tokens that the target's context holds.
        tls: whether it speaks TLS.
    """

    port: int
    fingerprints: Fingerprints
    vocabulary: int
    context: int
    tls: bool = False

    @property
    def verifier(self) -> Verifier:
        """What clients in tests connect to."""
        context = trusting() if self.tls else None
        if context is not None:
            # Tickets of TLS 1.3 come while a request is sent, and until Python 3.13 two threads that use one SSL object
            # at once, as those of websockets' blocking client, may lose it.
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        return Verifier(None, self.port, "", tls=context)  # type: ignore[arg-type]

    def hello(self, resume_token: str = "", row_encoding: int = wire.ROW_ENCODING_INT8) -> wire.ClientMessage:
        return in_memory.hello(resume_token, row_encoding, self.fingerprints)


class Raw:
    """One TCP connection, perhaps a WebSocket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send(self, message: wire.ClientMessage) -> None:
        await self.write(frame(BINARY, message.SerializeToString()))

    async def receive(self) -> wire.ServerMessage | None:
        """The next message; None once the server closes."""
        while True:
            first, second = await self.reader.readexactly(2)
            size = second & 0x7F
            if size >= 126:
                wide = size == 127
                (size,) = struct.unpack("!Q" if wide else "!H", await self.reader.readexactly(8 if wide else 2))
            payload = await self.reader.readexactly(size)
            if first & 0xF == CLOSE:
                return None
            if first & 0xF == BINARY:
                return wire.ServerMessage.FromString(payload)

    async def greet(self, hello: wire.ClientMessage) -> str:
        """Say Hello. Returns the resume token, empty where the verifier refuses."""
        await self.send(hello)
        answer = await self.receive()
        return "" if answer is None else answer.welcome.resume_token

    async def verdict(self) -> wire.Verdict | None:
        """The next verdict; None where the verifier refuses or closes."""
        answer = await self.receive()
        return answer.verdict if answer is not None and answer.HasField("verdict") else None


@contextlib.asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Raw]:
    """A TCP connection, reset at the end without a farewell."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1 << 16)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def upgraded(target: Target) -> AsyncIterator[Raw]:
    """A WebSocket."""
    async with connected(target) as raw:
        await raw.write(_UPGRADE)
        head = await raw.reader.readuntil(b"\r\n\r\n")
        if b" 101 " not in head:
            raise ConnectionRefusedError(head.split(b"\r\n")[0].decode())
        yield raw


def decode_request(tokens: Sequence[int], **fields: object) -> bytes:
    """A request for plain decoding, whole."""
    body = json.dumps({"tokens": list(tokens), **fields}).encode()
    head = f"POST /v1/decode HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
