"""Run the drafting loop: asyncio, a thread for the drafter, the transport, the clock."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from moa_runtime.drafting.events import Draft, LoopEvent, RoundEnded, Wait
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.errors import MoaError
from moa_runtime.events import LinkChanged, LinkStatus
from moa_runtime.options import Conditions
from moa_runtime.session.events import Faulted, Welcomed
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_runtime.transport import ConnectError, Endpoint, Timing, Transport, TransportHandlers, unexpected_error

#: Faults after which connecting again would only repeat them.
_REFUSALS = {"VERSION_MISMATCH", "FINGERPRINT_MISMATCH", "ROWS_MISMATCH", "REPLACED"}
#: Seconds for which a chat that begins waits for its first connection, before the device goes on with an answer alone.
_FIRST_LINK_S = 1.0


class Driver:
    """Perform the actions of a :class:`DraftingLoop` in one task. The drafter runs in a thread, so that it blocks
    neither frames nor the application.

    Args:
        timeline: gets a span ``draft`` for each draft on the track ``draft``; ``send``, ``wait`` (from sending a draft
            to processing its verdict) and ``receive`` on the track ``link``, and a mark for each change of its status.
        on_problem: called with an error of the connection, and whether it is final.
        on_rest: called when no connection will be made until the host says so: offline by choice, or in the background.
        store: called before each Hello, which is sent when the future that it returns is done; None for at once.
        session_id: see :class:`~moa_runtime.transport.Transport`.
    """

    def __init__(
        self,
        loop: DraftingLoop,
        endpoint: Endpoint,
        timing: Timing | None = None,
        timeline: Timeline | None = None,
        *,
        on_problem: Callable[[MoaError, bool], None],
        on_rest: Callable[[], None],
        store: Callable[[], asyncio.Future[None] | None] = lambda: None,
        session_id: str | None = None,
    ) -> None:
        self._loop, self._endpoint = loop, endpoint
        self._on_problem, self._on_rest, self._store = on_problem, on_rest, store
        loop.listen(self._hear)
        self._timeline = timeline or NO_TIMELINE
        self._inbox: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moa-drafter")
        handlers = TransportHandlers(
            held=lambda: self.post(lambda: self._rest("no connection is made in the background")),
            connecting=lambda: self.post(loop.connecting),
            opened=lambda: self.post(self._opened),
            frame=self._arrived,
            closed=lambda problem, retry_in_s: self.post(lambda: self._closed(problem, retry_in_s)),
        )
        self._transport = Transport(endpoint, handlers, timing, self._timeline, session_id)
        self.conditions = Conditions()  # of the last tell_conditions
        self._link_task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()  # links that are being closed
        self._online: bool | None = None  # as the user wants it; None before a choice
        self._link_known_by = -math.inf  # until then it is not known whether the first connection comes
        self._refused = False  # by the verifier that was connected to last
        self._reconnecting: asyncio.Task[None] | None = None
        self._greeting: asyncio.Future[None] | None = None  # done when the Hello of this connection may be sent
        self._sent_ns = self._taken_up_ns = 0  # wall-clock times of the frame in flight and the last one received
        self._status = loop.link.status

    def post(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the driver's task, between two actions of the loop."""
        self._inbox.put_nowait(action)

    def begin(self) -> None:
        """Begin to connect, unless the user has chosen to be offline already."""
        if self._online is False:
            self.post(lambda: self._rest("working offline", on_purpose=True))
        else:
            self._link_known_by = time.monotonic() + _FIRST_LINK_S
            self.go_online()

    def go_online(self) -> None:
        """Begin to connect, and reconnect as long as the driver runs."""
        self._online, self._refused = True, False
        if self._link_task is None or self._link_task.done():
            self._link_task = asyncio.create_task(self._link())
            self._link_task.add_done_callback(self._on_task_end)

    async def go_offline(self) -> None:
        """Close the connection and make no other until :meth:`go_online`."""
        wanted, self._online, self._refused = self._online, False, False
        self._end_link()
        if wanted:
            self.post(lambda: self._rest("working offline", on_purpose=True))
        await self._closed_links()

    async def reconnect(self, why: str = "the network changed") -> None:
        """Drop the connection and make another at once; nothing while offline."""
        self._transport.drop()
        if (self._end_link() or self._refused) and self._online:
            self.post(lambda: self._loop.lost(why, 0.0, time.monotonic()))
            self.go_online()
        await self._closed_links()

    def tell_conditions(self, conditions: Conditions) -> None:
        """Set the conditions. Nothing connects in the background; a change of ``metered`` needs a new connection."""
        self.conditions = conditions
        self._transport.hold(conditions.background)
        self.post(lambda: self._take_conditions(conditions))

    @property
    def gave_up(self) -> bool:
        """Whether the verifier refused in a way that connecting again cannot mend."""
        return self._refused or (self._link_task is not None and self._link_task.done())

    async def close(self) -> None:
        await self.go_offline()
        if self._reconnecting is not None:
            await asyncio.gather(self._reconnecting, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def bytes_moved(self) -> tuple[int, int]:
        """Return the payload bytes sent and received so far."""
        return self._transport.bytes_up, self._transport.bytes_down

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self._take_inbox()
            now = time.monotonic()
            # A draft would load the writer in vain.
            todo = Wait(self._link_known_by) if now < self._link_known_by else self._loop.next(now)
            if isinstance(todo, Draft):
                await self._draft(todo)
                self._take_inbox()  # a new connection may have come meanwhile, which begins with Hello
            self._send_frames()
            if not isinstance(todo, Draft):
                await self._wait(todo.until)

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._inbox.get_nowait()()

    async def _draft(self, draft: Draft) -> None:
        began = time.monotonic()
        with self._timeline.measure("draft", "draft", position=len(draft.prefix), origin=draft.origin.value):
            try:
                tree = await asyncio.get_running_loop().run_in_executor(
                    self._thread, draft.by.propose, draft.prefix, draft.budget, draft.sampling
                )
            except Exception as error:
                if not self._loop.failed(draft, str(error) if isinstance(error, MoaError) else repr(error)):
                    raise
                return
        now = time.monotonic()
        self._loop.drafted(draft, tree, now - began, now)

    def _send_frames(self) -> None:
        if self._greeting is None:
            for frame in self._loop.frames_to_send(time.monotonic()):
                self._sent_ns = time.time_ns()
                self._transport.send(frame)

    async def _wait(self, until: float | None) -> None:
        timeout = None if until is None else max(until - time.monotonic(), 0.0) + 0.01
        # Not wait_for: before Python 3.12 it swallows a cancellation that coincides with an action.
        getting = asyncio.ensure_future(self._inbox.get())
        try:
            await asyncio.wait({getting}, timeout=timeout)
        finally:
            getting.cancel()
        if getting.done() and not getting.cancelled():
            getting.result()()

    def _end_link(self) -> bool:
        """Begin to close the connection; return whether one was wanted."""
        ended, self._link_task = self._link_task, None
        if ended is None:
            return False
        ended.cancel()
        self._ending.add(ended)
        ended.add_done_callback(self._ending.discard)
        return True

    async def _link(self) -> None:
        """Connect after the connection before is closed: the server takes the one that it sees last for the newest."""
        await self._closed_links()
        await self._transport.run()

    async def _closed_links(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending)  # not gather, which cancels the closing with its caller

    def _take_conditions(self, conditions: Conditions) -> None:
        another = conditions.metered is not self._loop.conditions.metered
        self._loop.conditions = conditions
        if another:
            why = f"connecting anew: the network is {'metered' if conditions.metered else 'no longer metered'}"
            self._reconnecting = asyncio.create_task(self.reconnect(why))
            self._reconnecting.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Report a defect that ended a task, or a cancellation from elsewhere: the application would wait for ever."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and task not in self._ending:
            problem = unexpected_error(self._endpoint.url, error)
            self.post(lambda: self._closed(problem, None))

    # -- events of transport and loop --------------------------------------------------------------

    def _opened(self) -> None:
        """Greet; in a stored chat after the state of the Hello is on the disk. Meanwhile the loop sends nothing."""
        self._loop.opened()
        stored = self._greeting = self._store()
        if stored is not None:
            stored.add_done_callback(lambda _: self.post(lambda: self._greet(stored)))

    def _greet(self, stored: asyncio.Future[None]) -> None:
        if stored is self._greeting:  # else another connection has come
            self._greeting = None

    def _arrived(self, data: bytes) -> None:
        at = time.monotonic()  # a draft may be under way until much later
        self.post(lambda: self._received(data, at))

    def _received(self, data: bytes, at: float) -> None:
        self._taken_up_ns = time.time_ns()
        with self._timeline.measure("receive", "link", bytes=len(data)):
            self._loop.received(data, at)
        self._transport.taken_up(data)

    def _closed(self, problem: ConnectError, retry_in_s: float | None) -> None:
        self._loop.lost(str(problem), retry_in_s, time.monotonic())
        self._on_problem(problem, problem.final)

    def _rest(self, why: str, *, on_purpose: bool = False) -> None:
        self._loop.lost(why, None, time.monotonic(), on_purpose=on_purpose)
        self._on_rest()

    def _hear(self, event: LoopEvent) -> None:
        if isinstance(event, LinkChanged) and event.status is not LinkStatus.RECONNECTING:
            self._link_known_by = -math.inf
        if isinstance(event, Welcomed):
            self._transport.welcomed()
        elif isinstance(event, Faulted) and event.code in _REFUSALS and self._end_link():
            self._refused = True
            self.post(lambda: self._loop.lost(event.text, None, time.monotonic()))
        elif isinstance(event, RoundEnded):
            trip_ms = round(1000 * event.waited_s, 3)
            figures = {"drafted": event.drafted, "accepted": event.accepted, "round_trip_ms": trip_ms}
            self._timeline.span("wait", self._sent_ns, self._taken_up_ns, "link", **figures)
        elif isinstance(event, LinkChanged) and event.status is not self._status:
            self._status = event.status
            self._timeline.mark(event.status.value, "link", detail=event.detail)
