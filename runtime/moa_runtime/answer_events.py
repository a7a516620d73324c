"""The events of answers on their way from the drafting loop to the application."""

from __future__ import annotations

import asyncio

from moa_runtime.errors import ChatError
from moa_runtime.events import AnswerUpdate, ChatEvent, LinkChanged, TokenOrigin


class AnswerEvents:
    """A queue with one reader.

    The reader may take back a part of the answer while events about it are still in the queue. So each has the
    *edition* of the answer that it is about, and the reader gets those of the edition that it asked for last.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, ChatEvent | ChatError | None]] = asyncio.Queue()
        self._edition = self._edition_asked = 0
        self._published: tuple[TokenOrigin, ...] = ()
        self._ended = False

    def clear(self) -> None:
        """Another answer is asked for."""
        self._queue, self._published = asyncio.Queue(), ()
        if self._ended:
            self.end()

    def ask_for_edition(self) -> int:
        """The reader takes back a part, or all; returns the edition without it."""
        self._edition_asked += 1
        return self._edition_asked

    def begin_edition(self, edition: int) -> None:
        """The loop has taken it back."""
        self._edition, self._published = edition, ()

    def put(self, event: ChatEvent | ChatError) -> None:
        """Have the reader hear of it, or, of an error, raise it."""
        self._queue.put_nowait((self._edition, event))

    def publish(self, update: AnswerUpdate, *, even_without_tokens: bool = False) -> None:
        """Put it, unless the last one had the same tokens: a draft may be empty."""
        if update.tokens != self._published or (even_without_tokens and not update.tokens):
            self._published = update.tokens
            self.put(update)

    def end(self) -> None:
        """There will be no more: the chat is closed."""
        self._ended = True
        self._queue.put_nowait((self._edition, None))

    async def get(self) -> ChatEvent | None:
        """The next event of the edition; None at the end.

        Raises:
            ChatError: one that was put.
        """
        while True:
            edition, event = await self._queue.get()
            if isinstance(event, ChatError):
                raise event
            if event is None or edition == self._edition_asked or isinstance(event, LinkChanged):
                return event
