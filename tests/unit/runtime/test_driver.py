"""What the driver passes to the loop."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moa_runtime import driver
from moa_runtime.drafters.base import GREEDY, Budget
from moa_runtime.drafting.events import Draft, Wait
from moa_runtime.driver import Driver
from moa_runtime.events import LinkChanged, LinkStatus
from moa_runtime.session.events import Origin
from moa_runtime.session.tree import DraftTree
from moa_runtime.transport import Endpoint, TransportHandlers


def test_a_frame_that_arrives_during_a_draft_has_the_time_of_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[TransportHandlers] = []
    took: dict[str, float] = {}

    def transport(endpoint: object, handlers: TransportHandlers, *_: object) -> Any:
        given.append(handlers)
        return SimpleNamespace(send=None, taken_up=lambda data: None)

    async def run() -> None:
        events, arrived = asyncio.get_running_loop(), asyncio.Event()

        def arrive() -> None:
            given[0].frame(b"a verdict")
            arrived.set()

        def propose(*_: object) -> DraftTree:
            events.call_soon_threadsafe(arrive)
            asyncio.run_coroutine_threadsafe(arrived.wait(), events).result()
            took["arrived"] = time.monotonic()
            while time.monotonic() == took["arrived"]:
                pass
            return DraftTree()

        def received(data: bytes, now: float) -> None:
            took["told"] = now
            running.cancel()

        todo = iter([Draft(SimpleNamespace(propose=propose), [1], Budget(1, 1), Origin.DRAFTED, GREEDY)])  # type: ignore[arg-type]
        loop = SimpleNamespace(
            link=LinkChanged(LinkStatus.ONLINE),
            listen=lambda hear: None,
            next=lambda now: next(todo, Wait()),
            drafted=lambda *_: None,
            frames_to_send=lambda now: [],
            received=received,
        )
        one = Driver(loop, Endpoint("ws://verifier"), on_problem=lambda *_: None, on_rest=lambda: None)  # type: ignore[arg-type]
        running = asyncio.ensure_future(one.run())
        await asyncio.wait({running})

    monkeypatch.setattr(driver, "Transport", transport)
    asyncio.run(run())
    assert took["told"] <= took["arrived"]


def test_a_connection_that_comes_during_a_draft_begins_with_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    given, calls = list[TransportHandlers](), list[str]()

    def transport(endpoint: object, handlers: TransportHandlers, *_: object) -> Any:
        given.append(handlers)
        return SimpleNamespace(send=None)

    async def run() -> None:
        events, todo = asyncio.get_running_loop(), [Draft(None, [1], Budget(1, 1), Origin.DRAFTED, GREEDY)]  # type: ignore[arg-type]

        def propose(*_: object) -> DraftTree:
            events.call_soon_threadsafe(given[0].opened)
            return DraftTree()

        todo[0] = replace(todo[0], by=SimpleNamespace(propose=propose))  # type: ignore[arg-type]
        loop = SimpleNamespace(
            link=LinkChanged(LinkStatus.ONLINE),
            listen=lambda hear: None,
            next=lambda now: todo.pop() if todo else Wait(),
            drafted=lambda *_: calls.append("drafted"),
            opened=lambda: calls.append("opened"),
            frames_to_send=lambda now: calls.append("frames") or [],
        )
        one = Driver(loop, Endpoint("ws://verifier"), on_problem=lambda *_: None, on_rest=lambda: None)  # type: ignore[arg-type]
        running = asyncio.ensure_future(one.run())
        while "frames" not in calls or "opened" not in calls:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})

    monkeypatch.setattr(driver, "Transport", transport)
    asyncio.run(run())
    assert calls[:3] == ["drafted", "opened", "frames"]


@pytest.mark.parametrize("status", [LinkStatus.ONLINE, LinkStatus.OFFLINE, None])
def test_nothing_is_drafted_before_the_first_connection_comes_or_fails(
    monkeypatch: pytest.MonkeyPatch, status: LinkStatus | None
) -> None:
    """Or takes long: the writer would be loaded in vain."""

    async def never() -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        asked, told = list[float](), list[Any]()

        def following(now: float) -> Wait:
            asked.append(now)
            return Wait()

        link = LinkChanged(LinkStatus.OFFLINE)
        loop = SimpleNamespace(link=link, listen=told.append, next=following, frames_to_send=lambda now: [])
        one = Driver(loop, Endpoint("ws://verifier"), on_problem=lambda *_: None, on_rest=lambda: None)  # type: ignore[arg-type]
        one.begin()
        running = asyncio.ensure_future(one.run())
        await asyncio.sleep(0.1)
        assert not asked
        if status is not None:
            one.post(lambda: told[0](LinkChanged(status)))
        await asyncio.sleep(1.1 if status is None else 0.1)
        assert asked
        running.cancel()
        await asyncio.wait({running})
        await one.close()

    monkeypatch.setattr(driver, "Transport", lambda *_: SimpleNamespace(run=never))
    asyncio.run(run())
