"""An answer that is written in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from moa_chat.gateway.answer import Ending, answer
from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.pool import ChatPool
from moa_chat.gateway.request import ChatRequest
from moa_runtime.errors import MoaError


class Writing:
    """Writes from the moment it is made; :meth:`stop` it when nobody reads it any longer.

    The web framework cancels a response again at each step of its clean-up, which would leave the verifier with an
    answer that was never stopped. A task of our own is cancelled once.
    """

    def __init__(self, pool: ChatPool, request: ChatRequest) -> None:
        self._pieces: asyncio.Queue[str | Ending | MoaError] = asyncio.Queue()
        self._task = asyncio.create_task(self._write(pool, request))

    async def pieces(self) -> AsyncGenerator[str | Ending, None]:
        """See :func:`moa_chat.gateway.answer.answer`; also for what is raised."""
        while True:
            piece = await self._pieces.get()
            if isinstance(piece, MoaError):
                raise piece
            yield piece
            if isinstance(piece, Ending):
                return

    def stop(self) -> None:
        """Stop the answer, unless it has ended."""
        self._task.cancel()

    async def _write(self, pool: ChatPool, request: ChatRequest) -> None:
        try:
            needs_verifier = request.offline != "writer"
            async with pool.lend(request.history, request.question, needs_verifier=needs_verifier) as chat:
                async for piece in answer(chat, request):
                    self._pieces.put_nowait(piece)
        except MoaError as error:
            self._pieces.put_nowait(error)
        except Exception as error:  # whoever reads would wait for ever
            failed = ApiError(500, f"the answer failed: {type(error).__name__}: {error}", code="internal_error")
            self._pieces.put_nowait(failed)
