"""How many requests begin in a turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets one request begin in a turn of the event loop, so that sessions do not wait for all of a burst.

    Networks take turns, and few requests of each wait: the queue of a flood does not grow, and delays no other network.

    Args:
        waiting: most requests of a network that wait.
    """

    def __init__(self, waiting: int) -> None:
        self._most = waiting
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        self._entered = False  # in this turn

    async def enter(self, network: str) -> bool:
        """Wait for the turn of a request; return False if too many of its network wait already.

        Args:
            network: see :func:`moa_server.edge.connection_limits.network_of`.
        """
        if not self._entered:
            self._entered = True
            asyncio.get_running_loop().call_soon(self._next_turn)
            return True
        queue = self._queues.setdefault(network, deque())
        if len(queue) >= self._most:
            return False
        queue.append(asyncio.get_running_loop().create_future())
        await queue[-1]
        return True

    def _next_turn(self) -> None:
        self._entered = False
        while self._queues and not self._entered:
            network, queue = next(iter(self._queues.items()))
            del self._queues[network]
            if not (waiting := queue.popleft()).done():
                waiting.set_result(None)
                self._entered = True
            if queue:
                self._queues[network] = queue  # after the others
        if self._entered:
            asyncio.get_running_loop().call_soon(self._next_turn)
