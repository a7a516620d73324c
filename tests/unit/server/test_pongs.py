"""Pings are answered while a verdict is being made, and keep nobody. A toy target, a virtual clock."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from starlette.websockets import WebSocketDisconnect

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.memory_link import ServerEnd
from support.server.in_memory import SETTINGS, Served, in_served, receive, send, with_served
from support.server.raw import prompt


def ping(stamp: int = 0) -> wire.ClientMessage:
    return wire.ClientMessage(ping=wire.Ping(stamp=stamp))


def asked(stamp: int) -> wire.ClientMessage:
    message = prompt(1, 0, [7, 8, 9])
    message.prompt.stamp = stamp
    return message


@with_served()
async def test_a_ping_does_not_wait_for_the_verdict_before_it(served: Served):
    served.engine.slow_s = 60.0
    end, _ = await served.session()
    began = asyncio.get_running_loop().time()
    await send(end, asked(stamp=4), ping(stamp=5))
    pong = await receive(end)
    assert pong.pong.echo == wire.Echo(stamp=5)
    assert asyncio.get_running_loop().time() - began < 1
    verdict = (await receive(end)).verdict
    assert verdict.echo.stamp == 4 and verdict.echo.held_us > 60e6


@with_served()
async def test_pings_in_a_hurry_wait_their_turn(served: Served):
    served.engine.slow_s = 60.0
    end, _ = await served.session()
    await send(end, asked(stamp=4), *(ping(stamp) for stamp in (5, 6, 7)))
    order = [(await receive(end)).WhichOneof("event") for _ in range(4)]
    assert order == ["pong", "verdict", "pong", "pong"]


@with_served(replace(SETTINGS, idle_seconds=10.0))
async def test_pings_alone_are_silence(served: Served):
    end, _ = await served.session()
    for _ in range(2):
        await asyncio.sleep(4)
        await send(end, ping())
        assert (await receive(end)).HasField("pong")
    await asyncio.sleep(4)
    assert (await receive(end)).fault.code == wire.FAULT_CODE_IDLE


def test_a_pong_that_finds_nobody_is_the_end_and_no_failure(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    async def gone(end: ServerEnd, data: bytes) -> None:
        """As Starlette: the first one hears that the client left, the next one that he should have known."""
        if end._closed:
            raise RuntimeError("send after close")
        end._closed = True
        raise WebSocketDisconnect(1006)

    async def scenario(served: Served) -> None:
        served.engine.slow_s = 1.0
        end, _ = await served.session()
        monkeypatch.setattr(ServerEnd, "send_bytes", gone)
        await send(end, asked(stamp=4), ping(stamp=5))
        await asyncio.sleep(10)
        await served.link.closed()

    caplog.set_level(logging.INFO, logger="moa_server")
    in_served(scenario)
    assert [record.levelname for record in caplog.records if record.levelno > logging.INFO] == []
    assert any(record.getMessage().startswith("session ended: the client left") for record in caplog.records)
