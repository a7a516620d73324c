"""How many requests begin in a turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

# Requests and WebSockets that begin in one turn of the event loop, each of which takes half a millisecond.
_A_TURN = 4
# Requests of one network that wait: more would wait for longer than it takes to come again.
_MOST_WAITING = 64


class Turnstile:
    """Spreads a burst of requests over turns of the event loop, so that sessions do not wait for all of them.

    Networks take turns, and few requests of each wait: the queue of a flood does not grow, and delays no other network.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._entered = 0  # in this turn

    async def enter(self, network: str) -> bool:
        """Wait for the turn of a request; return False if too many of its network wait already.

        Args:
            network: see :func:`moa_server.edge.connection_limits.network_of`.
        """
        loop = asyncio.get_running_loop()
        if self._entered < _A_TURN:
            self._entered += 1
            if self._entered == 1:
                loop.call_soon(self._next_turn)
            return True
        queue = self._waiting.setdefault(network, deque())
        if len(queue) >= _MOST_WAITING:
            return False
        queue.append(loop.create_future())
        await queue[-1]
        return True

    def _next_turn(self) -> None:
        self._entered = 0
        while self._waiting and self._entered < _A_TURN:
            network, queue = next(iter(self._waiting.items()))
            del self._waiting[network]
            if not (waiting := queue.popleft()).done():
                waiting.set_result(None)
                self._entered += 1
            if queue:
                self._waiting[network] = queue  # after the others
        if self._entered:
            asyncio.get_running_loop().call_soon(self._next_turn)
