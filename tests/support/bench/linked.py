"""A connection through a link, with both of its ends in the test's hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from moa_bench.link import Link, LinkProfile


@dataclass
class Ends:
    """A connection through a link, seen from both ends, and the connections the verifier gets after it."""

    link: Link
    client_reader: asyncio.StreamReader
    client: asyncio.StreamWriter
    server_reader: asyncio.StreamReader
    server: asyncio.StreamWriter
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


@asynccontextmanager
async def connected(profile: LinkProfile, idle_s: float = 0.0) -> AsyncIterator[Ends]:
    """``idle_s``: how long the link is there before it is first used."""
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    writers: list[asyncio.StreamWriter] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        accepted.put_nowait((reader, writer))

    target = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with Link(profile, "127.0.0.1", target.sockets[0].getsockname()[1]) as link:
        await asyncio.sleep(idle_s)
        client_reader, client = await asyncio.open_connection("127.0.0.1", link.port)
        server_reader, server = await asyncio.wait_for(accepted.get(), 5)
        yield Ends(link, client_reader, client, server_reader, server, accepted)
        for writer in (client, *writers):
            writer.transport.abort()
    target.close()
