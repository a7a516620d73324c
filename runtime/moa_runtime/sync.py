"""The chat without asyncio: the same calls, blocking, with the event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.chat_template import Message
from moa_runtime.conversation import Unconfirmed
from moa_runtime.events import ChatEvent, LinkStatus
from moa_runtime.options import Conditions
from moa_runtime.session.events import Sampling
from moa_runtime.transport import Endpoint

T = TypeVar("T")


class SyncChat:
    """Blocking wrapper around :class:`moa_runtime.chat.Chat`; usable from one thread at a time.

    >>> with SyncChat(bundle, Endpoint("ws://127.0.0.1:8765")) as chat:   # doctest: +SKIP
    ...     for event in chat.send("Name three primary colours."):
    ...         ...

    Args:
        options: as for :meth:`moa_runtime.chat.Chat.connect`, which also lists the exceptions.
    """

    def __init__(self, bundle: Bundle, endpoint: Endpoint, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="moa-chat", daemon=True)
        self._thread.start()
        try:
            self.chat = self._run(Chat.connect(bundle, endpoint, **options))
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> SyncChat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def status(self) -> LinkStatus:
        return self.chat.status

    def send(
        self, text: str | Message, *, max_new_tokens: int = 512, sampling: Sampling | None = None
    ) -> Iterator[ChatEvent]:
        """See :meth:`moa_runtime.chat.Chat.send`. Leaving the loop early stops the answer."""
        return self._follow(self.chat.send(text, max_new_tokens=max_new_tokens, sampling=sampling))

    def continue_answer(self, *, max_new_tokens: int = 512, sampling: Sampling | None = None) -> Iterator[ChatEvent]:
        """See :meth:`moa_runtime.chat.Chat.continue_answer`. Leaving the loop early stops the answer."""
        return self._follow(self.chat.continue_answer(max_new_tokens=max_new_tokens, sampling=sampling))

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.chat.messages

    @property
    def question(self) -> str:
        """See :attr:`moa_runtime.chat.Chat.question`."""
        return self.chat.question

    def pending(self) -> Iterator[ChatEvent] | None:
        """See :meth:`moa_runtime.chat.Chat.pending`. Leaving the loop early stops the answer."""
        return self._follow_if_any(self.chat.pending)

    def keep_mine(self) -> Iterator[ChatEvent] | None:
        """See :meth:`moa_runtime.chat.Chat.keep_mine`."""
        return self._follow_if_any(self.chat.keep_mine)

    @property
    def unconfirmed(self) -> Sequence[Unconfirmed]:
        """See :attr:`moa_runtime.chat.Chat.unconfirmed`."""
        return self.chat.unconfirmed

    def check(self) -> Iterator[ChatEvent]:
        """See :meth:`moa_runtime.chat.Chat.check`."""
        return self._follow(self.chat.check())

    def _follow_if_any(self, begin: Callable[[], AsyncGenerator[ChatEvent, None] | None]) -> Iterator[ChatEvent] | None:
        events = self._run(_call(begin))
        return None if events is None else self._follow(events)

    def _follow(self, events: AsyncGenerator[ChatEvent, None]) -> Iterator[ChatEvent]:
        try:
            while not self._loop.is_closed():
                event = self._run(_next(events))
                if event is None:
                    return
                yield event
        finally:
            if not self._loop.is_closed():
                self._run(events.aclose())

    def restore(self, messages: Sequence[Message], unconfirmed: Sequence[Unconfirmed] = ()) -> None:
        """See :meth:`moa_runtime.chat.Chat.restore`."""
        self._run(_call(self.chat.restore, messages, unconfirmed))

    def work_offline(self, offline: bool) -> None:
        """See :meth:`moa_runtime.chat.Chat.work_offline`."""
        self._run(self.chat.work_offline(offline))

    def tell_conditions(self, conditions: Conditions) -> None:
        """See :meth:`moa_runtime.chat.Chat.tell_conditions`."""
        self._run(_call(self.chat.tell_conditions, conditions))

    def network_changed(self) -> None:
        """See :meth:`moa_runtime.chat.Chat.network_changed`."""
        self._run(self.chat.network_changed())

    def close(self) -> None:
        """Close the chat and end its thread; also in the middle of an answer."""
        if self._loop.is_closed():
            return
        self._run(self.chat.close())
        self._stop_loop()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C in the waiting thread must also end the work that it waited for.
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _call(function: Callable[..., T], *arguments: Any) -> T:
    """Call a plain function in the loop's thread."""
    return function(*arguments)


async def _next(events: AsyncIterator[ChatEvent]) -> ChatEvent | None:
    return await anext(events, None)
