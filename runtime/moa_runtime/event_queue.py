"""The queue of events between the drafting loop and the application."""

from __future__ import annotations

import asyncio

from moa_runtime.errors import ChatError
from moa_runtime.events import AnswerUpdate, ChatEvent, LinkChanged, TokenOrigin


class EventQueue:
    """A queue with one reader.

    The reader may take back a part of the answer while events about it are still queued. So each event carries the
    *edition* of the answer that it is about, and the reader gets only those of the edition that it asked for last.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, ChatEvent | ChatError | None]] = asyncio.Queue()
        self._edition = self._edition_asked = 0
        self._published: tuple[TokenOrigin, ...] = ()
        self._ended = False

    def clear(self) -> None:
        """Drop all events: another answer begins."""
        self._queue, self._published = asyncio.Queue(), ()
        if self._ended:
            self.end()

    def ask_for_edition(self) -> int:
        """Take back a part of the answer, or all of it; return the edition without it."""
        self._edition_asked += 1
        return self._edition_asked

    def begin_edition(self, edition: int) -> None:
        """Note that the loop has taken it back; later events are of ``edition``."""
        self._edition, self._published = edition, ()

    def put(self, event: ChatEvent | ChatError) -> None:
        """Queue an event, or an error for :meth:`get` to raise."""
        self._queue.put_nowait((self._edition, event))

    def publish(self, update: AnswerUpdate, *, even_without_tokens: bool = False) -> None:
        """Queue an update, unless the last one had the same tokens: a draft may be empty."""
        if update.tokens != self._published or (even_without_tokens and not update.tokens):
            self._published = update.tokens
            self.put(update)

    def end(self) -> None:
        """Queue the end: the chat is closed."""
        self._ended = True
        self._queue.put_nowait((self._edition, None))

    async def get(self) -> ChatEvent | None:
        """Return the next event of the edition; None at the end.

        Raises:
            ChatError: one that was queued.
        """
        while True:
            edition, event = await self._queue.get()
            if isinstance(event, ChatError):
                raise event
            if event is None or edition == self._edition_asked or isinstance(event, LinkChanged):
                return event
