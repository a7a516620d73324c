"""A pool of chats: a request names no conversation but brings all of its messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from moa_chat.gateway.errors import RETRY_LATER, ApiError
from moa_runtime.chat import Chat
from moa_runtime.chat_template import Message
from moa_runtime.tokens import common_length
from moa_runtime.transport import ConnectError

#: A text that begins with an earlier one of at least this many characters is the same one, as when an editor completes.
_LONG = 100


class ChatPool:
    """Lends a chat for each request: the one that knows most of the conversation already. ``connect`` opens another
    one, given whether the verifier must be there; at most ``size`` answers are written at once."""

    def __init__(self, connect: Callable[[bool], Awaitable[Chat]], size: int = 8) -> None:
        self._connect, self._size = connect, size
        self._idle: list[Chat] = []  # the most recently used last
        self._lent = 0

    def check_room(self, count: int = 1) -> None:
        """Raise ApiError (429) if there are no places for ``count`` answers."""
        if self._lent + count > self._size:
            text = f"at most {self._size} answers are written at once, {self._lent} are already: try again later"
            raise ApiError(429, text, code="rate_limit_exceeded", headers=RETRY_LATER)

    @asynccontextmanager
    async def lend(
        self,
        history: Sequence[Message],
        question: str | Message,
        *,
        count: int = 1,
        needs_verifier: bool = True,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncIterator[list[Chat]]:
        """Lend ``count`` chats that are set to the turns of ``history``, ready for ``question``; first, with a place
        for each, ``prepare``. Raises ApiError (429) if the pool is exhausted, ConnectError if it ``needs_verifier``
        for a new chat and there is none."""
        self.check_room(count)
        self._lent += count
        chats: list[Chat] = []
        try:
            if prepare is not None:
                await prepare()
            turns = [*history, {"role": "user", "content": question} if isinstance(question, str) else question]
            while len(chats) < count:
                chats.append(await self._take(turns, needs_verifier))
                chats[-1].restore(history)
            yield chats
        finally:
            self._lent -= count
            self._idle += [chat for chat in chats if not chat.gave_up]
            for chat in chats:
                if chat.gave_up:  # another one may be let in, or come by
                    await chat.close()

    async def warm(self) -> None:
        """Open a chat before the first request. Raises MoaError if the verifier is away, or refuses."""
        self._lent += 1
        try:
            self._idle.append(await self._connect(True))
        finally:
            self._lent -= 1

    async def close(self) -> None:
        """Close the chats that are not lent."""
        while self._idle:
            await self._idle.pop().close()

    async def _take(self, turns: Sequence[Message], needs_verifier: bool) -> Chat:
        best = max(self._idle, key=lambda chat: _common(chat, turns), default=None)
        # A system message in common is no conversation in common.
        if best is not None and _common(best, turns) > (int(turns[0]["role"] == "system"), _LONG):
            self._idle.remove(best)
            return best
        if self._lent + len(self._idle) <= self._size:
            try:
                return await self._connect(needs_verifier)
            except ConnectError:
                # The tokens of an older chat may be enough to answer without the verifier.
                if not self._idle:
                    raise
        return self._idle.pop(0)


def _common(chat: Chat, turns: Sequence[Message]) -> tuple[int, int]:
    """Return the number of turns in common, and of characters by which the next turn begins like the chat's own."""
    known = chat.messages
    turns_known = common_length(known, turns)
    if turns_known < min(len(known), len(turns)):
        begins, text = known[turns_known]["content"], turns[turns_known]["content"]
        return turns_known, len(begins) if text.startswith(begins) else 0
    return turns_known, 0
