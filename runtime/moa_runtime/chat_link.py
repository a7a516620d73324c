"""A chat's link to its verifier: opening, closing, and what the host knows of network and device."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, TypeVar

from moa_runtime.answer_events import AnswerEvents
from moa_runtime.chat_keeper import ChatKeeper
from moa_runtime.connect_error import ConnectError
from moa_runtime.drafting.events import LoopEvent, Problem
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.drafting.settings import Conditions
from moa_runtime.driver import Driver
from moa_runtime.errors import ChatError, MoaError
from moa_runtime.events import LinkChanged, LinkStatus
from moa_runtime.options import Offline
from moa_runtime.session.events import Policy
from moa_runtime.timeline import Timeline
from moa_runtime.transport import Endpoint, Timing

Own = TypeVar("Own", bound="ChatLink")


class ChatLink:
    """All of a chat but its questions and answers. :class:`~moa_runtime.chat.Chat` is the class to use."""

    def __init__(
        self,
        loop: DraftingLoop,
        endpoint: Endpoint,
        timing: Timing | None,
        timeline: Timeline | None,
        keeper: ChatKeeper,
        session_id: str,
    ) -> None:
        self._events = AnswerEvents()
        self._keeper, self._session_id = keeper, session_id
        self._refusal: ChatError | None = None
        self._opening: asyncio.Future[None] | None = None  # what open() waits for
        self._running: asyncio.Task[None] | None = None
        self._closed = False
        self._loop = loop
        self._loop.listen(self._hear)
        self._driver = Driver(
            self._loop,
            endpoint,
            timing,
            timeline,
            on_problem=self._on_problem,
            on_rest=self._opened,
            store=lambda: keeper.save() if keeper.keeps else None,
            session_id=session_id,
        )

    async def __aenter__(self: Own) -> Own:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self, *, wait: bool = True) -> None:
        """Begin to connect.

        Args:
            wait: until the verifier has answered. Otherwise the chat begins offline, and a refusal is raised by
                :meth:`~moa_runtime.chat.Chat.send`. So it does with ``wait`` where no connection is made: in the
                background (:meth:`tell_conditions`), or when the user goes offline meanwhile.

        Raises:
            ConnectError: the chat was closed meanwhile; for the rest see :meth:`moa_runtime.chat.Chat.connect`.
        """
        if wait:
            self._opening = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._driver.run())
        self._running.add_done_callback(self._on_loop_end)
        self._driver.go_online()
        if self._opening is not None:
            await self._opening

    async def close(self) -> None:
        """Leave the verifier. An :meth:`open` that waits is ended with an error; the events of an answer under way
        end, and where the chat is stored, the answer goes on with the next program."""
        self._closed = True
        self._keeper.save()
        self._events.end()
        if opening := self._connecting():
            opening.set_exception(ConnectError("the chat was closed before the verifier had answered", final=True))
        try:
            await self._driver.close()
            if self._running is not None:
                self._running.cancel()
                await asyncio.gather(self._running, return_exceptions=True)
        finally:
            await self._keeper.close()

    @property
    def link(self) -> LinkChanged:
        """The link's last change, also one between answers."""
        return self._loop.link

    @property
    def status(self) -> LinkStatus:
        """The link as the user should see it."""
        return self._loop.link.status

    @property
    def gave_up(self) -> bool:
        """Whether each question is refused until :meth:`work_offline` connects again: by the verifier, or after a
        defect."""
        return self._refusal is not None and (self._driver.gave_up or self._running is None or self._running.done())

    @property
    def store_problem(self) -> str:
        """Why the stored chat did not go on, or why this one is not stored now, in a sentence; empty where all is
        well."""
        return self._keeper.problem

    @property
    def policy(self) -> Policy:
        """What becomes of text written offline; may be set at any time."""
        return self._loop.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._loop.policy = policy

    @property
    def offline(self) -> Offline:
        """What writes while there is no verifier; may be set at any time."""
        return self._loop.offline

    @offline.setter
    def offline(self, offline: Offline) -> None:
        self._loop.offline = offline

    async def work_offline(self, offline: bool) -> None:
        """Drop the connection and make no other, or connect again."""
        if offline:
            await self._driver.go_offline()
        else:
            self._driver.go_online()

    @property
    def conditions(self) -> Conditions:
        """What the host said last, see :meth:`tell_conditions`."""
        return self._loop.conditions

    def tell_conditions(self, conditions: Conditions) -> None:
        """The app went to the background or came back, power is low, the network is metered: see
        :class:`~moa_runtime.drafting.settings.Conditions`."""
        self._driver.tell_conditions(conditions)

    async def network_changed(self) -> None:
        """The device has another network: the connection, which may be dead, is made anew at once, not after the next
        ping or backoff. Nothing while working offline."""
        await self._driver.reconnect()

    # -- helpers -------------------------------------------------------------------------------

    def _check_accepted(self) -> None:
        """Raises ChatError: the verifier refused, or the loop has ended."""
        if self.gave_up and self._refusal is not None:
            raise self._refusal

    async def _done(self, something: asyncio.Future[Any]) -> bool:
        """Wait for what the loop or the disk does; says whether it did, before the loop ended."""
        await asyncio.wait({something, *([self._running] if self._running else [])}, return_when="FIRST_COMPLETED")
        return something.done()

    def _hear(self, event: LoopEvent) -> None:
        """What the loop says."""
        if isinstance(event, LinkChanged) and event.status is LinkStatus.ONLINE:
            self._opened()
        elif isinstance(event, Problem):
            self._on_problem(event.error, event.final)

    def _on_problem(self, problem: MoaError, final: bool) -> None:
        if opening := self._connecting():
            opening.set_exception(problem)
        if final:
            self._refusal = problem if isinstance(problem, ChatError) else ChatError(str(problem))
            self._refusal.__cause__ = problem.__cause__
            self._events.put(self._refusal)

    def _opened(self) -> None:
        if opening := self._connecting():
            opening.set_result(None)

    def _connecting(self) -> asyncio.Future[None] | None:
        """What :meth:`open` waits for, while it does."""
        return None if self._opening is None or self._opening.done() else self._opening

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        """The loop only ends by :meth:`close`, by a bundle that cannot draft, or by a defect; no application may be
        left waiting."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not self._closed:
            told = f"{error}" if isinstance(error, MoaError) else f"{error!r}"
            failure = ChatError(f"the drafting loop failed: {told}")
            failure.__cause__ = error
            self._on_problem(failure, True)
