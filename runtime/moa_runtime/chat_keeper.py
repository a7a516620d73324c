"""When a chat's file is written: what must not be lost at once, the rest about once a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from moa_runtime.chat_store import ChatStore, StoreError
from moa_runtime.errors import MoaError

T = TypeVar("T")

_SECONDS_BETWEEN = 1.0


class ChatKeeper:
    """Writes a chat's state into its :class:`ChatStore`, in a thread: waiting for a disk must not keep the event loop
    from its connection. Without a store it does nothing.

    One write is under way at a time. All who want one meanwhile share the next, which takes the state as it is then.

    Args:
        state: the chat as it is now, in JSON; called in the event loop between two things that happen to the chat, and
            not changed by what happens later.
    """

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self._state = state
        self._store: ChatStore | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moa-store")
        self._wanted: asyncio.Future[None] | None = None  # the next write
        self._writing: asyncio.Task[None] | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._not_restored = self._not_written = ""

    @property
    def keeps(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    @property
    def problem(self) -> str:
        """Why the chat is not stored, or why the one that was there did not go on; empty where all is well."""
        return self._not_written or self._not_restored

    def open(self, path: str | Path, restore: Callable[[Any], T]) -> T | None:
        """Keep the chat in this file.

        Args:
            restore: makes something of what is there.

        Returns:
            what it made; None where nothing is there, or nothing of use: that is set aside then.

        Raises:
            StoreError: another program has the file, or it can be neither used nor set aside; or there is a store.
        """
        if self._store is not None:
            raise StoreError(f"the chat is kept in {self._store.path} already")
        store = ChatStore(path)
        try:
            try:
                content = store.read()
                restored = None if content is None else restore(content)
            except MoaError as error:
                self._not_restored = f"{error}; the old file is {store.set_aside()}"
                restored = None
        except BaseException:
            store.close()
            raise
        self._store = store
        return restored

    def touch(self) -> None:
        """Something changed that can be lost: it is written soon."""
        if self._store is not None and self._clock is None and self._wanted is None:
            self._clock = asyncio.get_running_loop().call_later(_SECONDS_BETWEEN, self.save)

    def save(self) -> asyncio.Future[None]:
        """Write what is; done when that is on the disk, or could not be written. Not to be cancelled."""
        loop = asyncio.get_running_loop()
        self._stop_clock()
        if self._store is None:
            done = loop.create_future()
            done.set_result(None)
            return done
        if self._wanted is None:
            self._wanted = loop.create_future()
            if self._writing is None or self._writing.done():
                self._writing = loop.create_task(self._write(self._store))
        return self._wanted

    async def close(self) -> None:
        """Write what is, and let other programs have the file."""
        self.save()
        if self._writing is not None:
            await asyncio.wait({self._writing})
        self._stop_clock()
        store, self._store = self._store, None
        if store is not None:
            store.close()
        self._thread.shutdown(wait=False)

    async def _write(self, store: ChatStore) -> None:
        loop = asyncio.get_running_loop()
        while self._wanted is not None:
            written, self._wanted = self._wanted, None
            try:
                await loop.run_in_executor(self._thread, store.write, self._state())
                self._not_written = ""
            except Exception as error:  # a defect, too: all who want the next write would wait for ever
                told = str(error) if isinstance(error, StoreError) else f"storing it failed unexpectedly: {error!r}"
                self._not_written = told
            finally:
                written.set_result(None)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
