"""What can happen to a conversation while it is being fuzzed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from moa_runtime.options import Conditions
from moa_runtime.session.events import Policy, Sampling
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine.base import new_sequence
from moa_server.scheduling.verify_job import EngineFailedError, ExpiredError, Job
from support.system.fuzz_world import World


async def _cut(world: World, a: float, b: float) -> None:
    world.link.cut(8 * a * a, 40 * b * b)


async def _outage(world: World, a: float, b: float) -> None:
    world.link.open = False
    world.link.cut(8 * b, 40 * b)
    await asyncio.sleep(20 * a)
    world.link.open = True


async def _slow(world: World, a: float, b: float) -> None:
    world.delay = 6 * a
    await asyncio.sleep(10 * b)
    world.delay = world.limits.delay_s


async def _restart(world: World, a: float, b: float) -> None:
    await world.restart(3 * a)


async def _evict(world: World, a: float, b: float) -> None:
    world.engine._caches.clear()


async def _break(world: World, a: float, b: float) -> None:
    engine = world.engine
    engine.broken = _Everything()  # type: ignore[assignment]
    await asyncio.sleep(4 * a)
    engine.broken = set()


async def _jump(world: World, a: float, b: float) -> None:
    world.loop.jump(60 * a)


async def _resend(world: World, a: float, b: float) -> None:
    world.chat._driver.post(world.chat._loop.resend)


async def _copy_up(world: World, a: float, b: float) -> None:
    connection = world.link.current
    frame = None if connection is None else connection.up.last_frame
    if frame is not None and not wire.ClientMessage.FromString(frame).HasField("hello"):
        connection.up.put(frame, 2 * a)


async def _copy_down(world: World, a: float, b: float) -> None:
    connection = world.link.current
    if connection is not None and connection.down.last_frame is not None:
        connection.down.put(connection.down.last_frame, 2 * a)


async def _offline(world: World, a: float, b: float) -> None:
    await world.chat.work_offline(True)
    await asyncio.sleep(15 * a)
    await world.chat.work_offline(False)


async def _background(world: World, a: float, b: float) -> None:
    world.chat.tell_conditions(Conditions(background=True))
    await asyncio.sleep(15 * a)
    world.chat.tell_conditions(Conditions())


async def _policy(world: World, a: float, b: float) -> None:
    world.chat.policy = [*Policy][int(3 * a)]


async def _sweep(world: World, a: float, b: float) -> None:
    world.verifier.store.sweep()


async def _neighbour(world: World, a: float, b: float) -> None:
    """Somebody else's prompts, for some seconds from now on."""

    async def prompts() -> None:
        until = world.loop.time() + 10 * a
        while world.loop.time() < until:
            if not world.up:  # a verifier that is down takes no jobs
                await asyncio.sleep(0.01)
                continue
            worker, job = world.verifier.worker, Job(new_sequence(), [1] * (1 + int(60 * b)), Sampling())
            with contextlib.suppress(ExpiredError, EngineFailedError, asyncio.TimeoutError):
                await asyncio.wait_for(worker.run(job, 5), 5)  # a verifier that is killed does not answer
            worker.release(job.sequence)
            await asyncio.sleep(0.01)

    world.others.append(asyncio.create_task(prompts()))


async def _kill(world: World, a: float, b: float) -> None:
    """The program is killed, and started again."""
    if world.stored is None:
        return
    await world.kill_program()
    await asyncio.sleep(30 * a * a)
    world.start_program()
    await world.chat.open(wait=False)


async def _switch(world: World, a: float, b: float) -> None:
    """Another drafts than before, and perhaps once more so."""
    driver, placement = world.chat._driver, world.chat._loop._selection

    def turn() -> None:
        placement._server = not placement._server

    driver.post(turn)
    await asyncio.sleep(2 * a * a)
    if b < 0.7:
        driver.post(turn)


async def _break_drafts(world: World, a: float, b: float) -> None:
    """Who drafts at the server in these seconds does not again."""
    drafts = world.drafts
    if drafts is not None:
        drafts.broken = True
        await asyncio.sleep(2 * a)
        drafts.broken = False


async def _forget_drafts(world: World, a: float, b: float) -> None:
    """The server's drafters make room for others'."""
    if world.drafts is not None:
        world.drafts._conversations.clear()


#: By their names, in words.
HAPPENINGS: dict[str, Callable[[World, float, float], Awaitable[None]]] = {
    each.__name__[1:].replace("_", " "): each
    for each in (
        _cut,
        _outage,
        _slow,
        _restart,
        _evict,
        _break,
        _jump,
        _resend,
        _copy_up,
        _copy_down,
        _offline,
        _background,
        _policy,
        _sweep,
        _neighbour,
        _kill,
        _switch,
        _break_drafts,
        _forget_drafts,
    )
}


class _Everything(frozenset[int]):
    """Every sequence is broken."""

    def __rand__(self, other: object) -> object:
        return other
