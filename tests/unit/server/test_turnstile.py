"""The turnstile: a burst of requests is spread over turns of the event loop, and no network waits for another's."""

from __future__ import annotations

import asyncio

from moa_server.edge.turnstile import Turnstile


def test_one_request_of_a_burst_begins_in_a_turn() -> None:
    begun: list[int] = []

    async def begin(turnstile: Turnstile, number: int) -> None:
        assert await turnstile.enter("a")
        begun.append(number)

    async def burst() -> list[int]:
        turnstile, counts = Turnstile(64), []
        tasks = [asyncio.create_task(begin(turnstile, number)) for number in range(50)]
        await asyncio.sleep(0)
        tasks[20].cancel()
        while not all(task.done() for task in tasks):
            before = len(begun)
            await asyncio.sleep(0)
            counts.append(len(begun) - before)
        return counts

    counts = asyncio.run(burst())
    assert max(counts) == 1
    assert begun == [number for number in range(50) if number != 20]


def test_a_request_beyond_the_queue_of_its_network_is_refused_and_others_wait_for_few() -> None:
    entered: list[str] = []

    async def begin(turnstile: Turnstile, network: str) -> bool:
        admitted = await turnstile.enter(network)
        entered.extend([network] * admitted)
        return admitted

    async def flood() -> list[bool]:
        turnstile = Turnstile(64)
        tasks = [asyncio.create_task(begin(turnstile, "flood")) for _ in range(100)]
        await asyncio.sleep(0)
        other = asyncio.create_task(begin(turnstile, "other"))
        assert await other
        assert len(entered) < 20
        return await asyncio.gather(*tasks)

    admitted = asyncio.run(flood())
    assert admitted == [True] * 65 + [False] * 35
