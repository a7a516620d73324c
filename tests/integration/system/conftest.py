"""A chat with a verifier of the tiny target, and one in a world of toys on a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from support.server.running import Verifier
from support.system.asking import chatting, endpoint, online
from support.system.fuzz_world import RIGHT, Limits, World, living


@pytest.fixture
def chat(bundle: Bundle, verifier: Verifier) -> AbstractAsyncContextManager[Chat]:
    return chatting(bundle, endpoint(verifier))


@pytest.fixture
def limits() -> Limits:
    return RIGHT


@pytest.fixture
def store() -> Path | None:
    """The file of the world's chat."""
    return None


@pytest.fixture
def opened() -> bool:
    """Whether the world's chat is connected before the test begins."""
    return True


@pytest.fixture
def world(toys: Any, limits: Limits, store: Path | None, opened: bool) -> AbstractAsyncContextManager[World]:
    @contextlib.asynccontextmanager
    async def live() -> AsyncIterator[World]:
        loop, rules = asyncio.get_running_loop(), replace(limits, drafting=toys.drafting)
        if opened:
            async with living(loop, rules, toys, random.Random(1), store) as world:  # type: ignore[arg-type]
                await online(world.chat)
                yield world
            return
        world = World(loop, rules, toys, random.Random(1))  # type: ignore[arg-type]
        with mock.patch("moa_runtime.transport.connect", world.link.connect):
            yield world
            await world.end()

    return live()
