"""The guard's turnstile: a burst of requests is spread over turns of the event loop."""

from __future__ import annotations

import asyncio

from moa_server.edge.guard import Turnstile


def test_few_requests_of_a_burst_begin_in_a_turn() -> None:
    begun: list[int] = []

    async def begin(turnstile: Turnstile, number: int) -> None:
        await turnstile.enter()
        begun.append(number)

    async def burst() -> None:
        turnstile, counts = Turnstile(), []
        tasks = [asyncio.create_task(begin(turnstile, number)) for number in range(50)]
        await asyncio.sleep(0)
        tasks[20].cancel()
        while not all(task.done() for task in tasks):
            before = len(begun)
            await asyncio.sleep(0)
            counts.append(len(begun) - before)
        assert max(counts) <= 4
        begun.clear()
        await asyncio.gather(*(begin(turnstile, number) for number in range(3)))

    asyncio.run(burst())
    assert begun == [0, 1, 2]
