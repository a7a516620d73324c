"""Answers that are written in a task of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from moa_chat.gateway.answers import Ending, answer
from moa_chat.gateway.errors import ApiError, as_api_error
from moa_chat.gateway.pool import ChatPool
from moa_chat.gateway.request import AnswerRequest
from moa_runtime.chat import Chat
from moa_runtime.errors import MoaError


class Writing:
    """Writes a request's answers, all at once, from the moment it is made; :meth:`stop` it when nobody reads them any
    longer.

    The web framework cancels a response again at each step of its clean-up, which would leave the verifier with an
    answer that was never stopped. A task of our own is cancelled once.
    """

    def __init__(self, pool: ChatPool, request: AnswerRequest) -> None:
        self._request = request
        self._pieces: asyncio.Queue[tuple[int, str | Ending] | ApiError] = asyncio.Queue()
        self._task = asyncio.create_task(self._write(pool))

    async def pieces(self) -> AsyncGenerator[tuple[int, str | Ending], None]:
        """What comes of which answer; see :func:`moa_chat.gateway.answers.answer`, also for what is raised."""
        left = self._request.count
        while left:
            piece = await self._pieces.get()
            if isinstance(piece, ApiError):
                raise piece
            yield piece
            left -= isinstance(piece[1], Ending)

    def stop(self) -> None:
        """Stop the answers that have not ended."""
        self._task.cancel()

    async def _write(self, pool: ChatPool) -> None:
        request = self._request
        try:
            needs_verifier = request.offline != "writer"
            lending = pool.lend(request.history, request.question, count=request.count, needs_verifier=needs_verifier)
            async with lending as chats:
                writing = [asyncio.create_task(self._write_one(chat, index)) for index, chat in enumerate(chats)]
                try:
                    await asyncio.gather(*writing)
                finally:
                    # A chat goes back to the others when its answer has stopped.
                    for task in writing:
                        task.cancel()
                    await asyncio.gather(*writing, return_exceptions=True)
        except MoaError as error:
            self._pieces.put_nowait(as_api_error(error, request.asked_in))
        except Exception as error:  # whoever reads would wait for ever
            failed = ApiError(500, f"the answer failed: {type(error).__name__}: {error}", code="internal_error")
            self._pieces.put_nowait(failed)

    async def _write_one(self, chat: Chat, index: int) -> None:
        async for piece in answer(chat, self._request, index):
            self._pieces.put_nowait((index, piece))
