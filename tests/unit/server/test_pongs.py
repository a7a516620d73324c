"""Pings are answered before verdicts, and are no activity. A toy target, a virtual clock."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from starlette.websockets import WebSocketDisconnect

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.connection import CloseReason
from support.memory_link import ServerEnd
from support.server.in_memory import SETTINGS, Served, receive, send, with_served
from support.server.raw import prompt


def ping(stamp: int = 0) -> wire.ClientMessage:
    return wire.ClientMessage(ping=wire.Ping(stamp=stamp))


def asked(stamp: int) -> wire.ClientMessage:
    message = prompt(1, 0, [7, 8, 9])
    message.prompt.stamp = stamp
    return message


@with_served()
async def test_a_ping_is_answered_before_the_verdict_and_further_ones_wait(served: Served):
    served.engine.slow_s = 60.0
    end, _ = await served.session()
    began = asyncio.get_running_loop().time()
    await send(end, asked(stamp=4), *(ping(stamp) for stamp in (5, 6, 7)))
    assert (await receive(end)).pong.echo == wire.Echo(stamp=5)
    assert asyncio.get_running_loop().time() - began < 1
    verdict = (await receive(end)).verdict
    assert verdict.echo.stamp == 4 and verdict.echo.held_us > 60e6
    assert [(await receive(end)).WhichOneof("event") for _ in range(2)] == ["pong", "pong"]


@with_served(replace(SETTINGS, idle_seconds=10.0))
async def test_pings_alone_are_silence(served: Served):
    end, _ = await served.session()
    for _ in range(2):
        await asyncio.sleep(4)
        await send(end, ping())
        assert (await receive(end)).HasField("pong")
    await asyncio.sleep(4)
    assert (await receive(end)).fault.code == wire.FAULT_CODE_IDLE


@with_served()
async def test_a_pong_to_a_client_that_left_ends_the_session_without_a_failure(served: Served, caplog, monkeypatch):
    async def gone(end: ServerEnd, data: bytes) -> None:
        """Raise like Starlette: the first call learns that the client left, further ones are errors."""
        if end._closed:
            raise RuntimeError("send after close")
        end._closed = True
        raise WebSocketDisconnect(1006)

    caplog.set_level(logging.INFO, logger="moa_server")
    served.engine.slow_s = 1.0
    end, _ = await served.session()
    monkeypatch.setattr(ServerEnd, "send_bytes", gone)
    await send(end, asked(stamp=4), ping(stamp=5))
    await asyncio.sleep(10)
    await served.link.closed()
    assert not [record.levelname for record in caplog.records if record.levelno > logging.INFO]
    assert any(getattr(record, "data", {}).get("why") == CloseReason.LEFT.value for record in caplog.records)
