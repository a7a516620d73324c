"""The drafting loop: one task that owns session and drafter and does whatever is due next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from moa_runtime.answer import FinishReason, LinkChanged, LinkStatus, PauseReason, Statistics
from moa_runtime.control import Controller, RoundOutcome
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafting import lengthen
from moa_runtime.errors import MoaError
from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.events import (
    Committed,
    Event,
    Faulted,
    Origin,
    RolledBack,
    RowsReceived,
    Sampling,
    Welcomed,
)
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_runtime.transport import ConnectError, Endpoint, Timing, Transport, TransportHandlers

#: Faults after which connecting again would only repeat them.
_REFUSALS = {"VERSION_MISMATCH", "FINGERPRINT_MISMATCH", "REPLACED"}


@dataclass(frozen=True)
class DriverSettings:
    """Limits of the drafting loop.

    Attributes:
        offline_limit: tentative tokens written at most without the target.
        late_after_s: a draft's verdict that takes longer counts as a lost link: the device goes on alone.
        prefill_late_after_s: the same for a prompt's verdict.
    """

    offline_limit: int = 256
    late_after_s: float = 2.0
    prefill_late_after_s: float = 6.0
    timing: Timing = Timing()  # noqa: RUF009 (frozen)


class Driver:
    """Runs a :class:`ClientSession` over a :class:`Transport` with a drafter.

    Everything happens in one task, in this order: handle what came in, send what is due, draft one
    token, or wait. Drafting runs in a thread, so that frames, and the application, are never blocked.

    Args:
        on_event: called with each session event.
        on_tentative: called when tentative tokens were added.
        on_link: called when the link changes.
        on_pause: called when the verifier is away and the device cannot write on without it.
        on_problem: called with what went wrong, and whether waiting cannot mend it.
        timeline: gets a span ``draft`` for each token on the track ``draft``; ``send``, ``wait`` (from handing a
            frame over to taking up its verdict) and ``receive`` on the track ``link``, and a mark for each change
            of the link's status.
    """

    def __init__(
        self,
        session: ClientSession,
        drafter: Drafter | None,
        controller: Controller,
        endpoint: Endpoint,
        settings: DriverSettings,
        *,
        on_event: Callable[[Event], None],
        on_tentative: Callable[[], None],
        on_link: Callable[[LinkChanged], None],
        on_pause: Callable[[PauseReason], None],
        on_problem: Callable[[MoaError, bool], None],
        timeline: Timeline | None = None,
    ) -> None:
        self.session = session
        self.statistics = Statistics()
        self.link = LinkChanged(LinkStatus.OFFLINE)
        self._drafter, self._controller, self._settings = drafter, controller, settings
        self._on_event, self._on_tentative = on_event, on_tentative
        self._on_link, self._on_pause, self._on_problem = on_link, on_pause, on_problem
        self._endpoint = endpoint
        self._timeline = timeline or NO_TIMELINE
        self._inbox: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moa-drafter")
        self._transport = self._new_transport()
        self._link_task: asyncio.Task[None] | None = None
        self._launched: float | None = None  # when the frame in flight was sent
        self._launched_ns = 0  # the same, wall-clock
        self._late = False
        self._drafter_full = False
        self._paused = False
        self._logprobs: dict[int, float] = {}  # of what was drafted last, by position
        self._steps, self._steps_s = 0, 0.0  # taken for the round under way

    # -- called by the chat, in the loop's thread ------------------------------------------------

    def post(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the driver's task, between two steps."""
        self._inbox.put_nowait(action)

    def ask(self, kept: int, tokens: Sequence[int], sampling: Sampling, max_new_tokens: int) -> None:
        """Begin an answer: to ``tokens`` after the first ``kept`` committed ones."""

        def begin() -> None:
            self._logprobs.clear()
            self._forget_rows(kept)
            self.session.rewind(kept)
            self.session.prompt(tokens, sampling, max_new_tokens)
            self._paused = False

        self.post(begin)

    def keep(self, start: int, tokens: Sequence[int]) -> None:
        """Put ``tokens`` in place of the answer's end; call it in the driver's task.

        See :meth:`moa_runtime.session.client.ClientSession.keep`.
        """
        self._forget_rows(start)
        for event in self.session.keep(start, tokens):
            self._take(event)
        self._paused = False

    def go_online(self) -> None:
        """Begin to connect, and reconnect for as long as the driver runs."""
        if self._link_task is None or self._link_task.done():
            self._link_task = asyncio.create_task(self._transport.run())

    async def go_offline(self) -> None:
        """Close the connection and make no other until :meth:`go_online`."""
        if self._link_task is not None:
            self._link_task.cancel()
            await asyncio.gather(self._link_task, return_exceptions=True)
            self._link_task = None
            self._inbox.put_nowait(lambda: self._disconnected("working offline"))

    @property
    def gave_up(self) -> bool:
        """Whether the verifier refused in a way that connecting again cannot mend."""
        return self._link_task is not None and self._link_task.done()

    async def close(self) -> None:
        await self.go_offline()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def bytes_moved(self) -> tuple[int, int]:
        """Payload bytes sent and received so far."""
        return self._transport.bytes_up, self._transport.bytes_down

    async def run(self) -> None:
        """The loop; runs until cancelled."""
        while True:
            while not self._inbox.empty():
                self._inbox.get_nowait()()
            self._check_late()
            self._propose_if_due()
            self._send_frames()
            if self._may_draft():
                await self._draft_one()
            else:
                self._note_pause()
                await self._wait()

    # -- the steps -----------------------------------------------------------------------------

    @property
    def _alone(self) -> bool:
        """Whether the device has to go on without the target."""
        return self.session.link is not LinkState.UP or self._late

    def _seconds_until_late(self) -> float | None:
        """None while no verdict is awaited, or once it is known to be late."""
        if self._launched is None or self._late or not self.session.awaiting_verdict:
            return None
        settings = self._settings
        patience = settings.prefill_late_after_s if self.session.awaiting_prefill else settings.late_after_s
        return self._launched + patience - time.monotonic()

    def _check_late(self) -> None:
        left = self._seconds_until_late()
        if left is not None and left <= 0:
            self._late = True
            self._set_link(LinkStatus.OFFLINE, "the verdict is late; the device writes on")

    def _propose_if_due(self) -> None:
        if self.session.awaiting_verdict or not self.session.answering:
            return
        if not self._may_draft():
            self._lengthen()
            self.session.propose()

    def _lengthen(self) -> None:
        """Send with a draft what its drafter knows besides; nothing where the device writes alone, up to its limit."""
        if self._drafter is None or self._alone:
            return
        if lengthen(self.session, self._drafter, self._draft_logprob()):
            self._on_tentative()

    def _wants_more(self) -> bool:
        """Whether the tentative suffix should be longer now."""
        length = len(self.session.tentative)
        if self._alone:
            return length < self._settings.offline_limit
        if self.session.awaiting_verdict:
            return length < self.session.in_flight_drafted + self._controller.ahead()
        return self._controller.goes_on(length, self._draft_logprob())

    def _draft_logprob(self) -> float:
        """Of all tentative tokens that were drafted one by one (nats)."""
        end = len(self.session.tokens)
        return sum(self._logprobs.get(at, 0.0) for at in range(end - len(self.session.tentative), end))

    def _may_draft(self) -> bool:
        session = self.session
        if self._drafter is None or not session.answering or session.tentatively_finished:
            return False
        # Before the first memory rows there is nothing to draft from.
        return session.rows > 0 and not self._drafter_full and self._wants_more()

    def _note_pause(self) -> None:
        pauses = self._alone and self.session.answering
        if pauses and not self._paused:
            self._on_pause(self._pause_reason())
        self._paused = pauses

    def _pause_reason(self) -> PauseReason:
        if self._drafter is None or not self.session.rows:
            return PauseReason.UNPREPARED
        finish = self.session.tentative_finish
        if finish is None:
            return PauseReason.LIMIT
        return PauseReason.END if finish is FinishReason.STOP else PauseReason.LENGTH

    async def _draft_one(self) -> None:
        assert self._drafter is not None
        prefix = self.session.tokens
        origin = Origin.OFFLINE if self._alone else Origin.DRAFTED
        began = time.monotonic()
        with self._timeline.measure("draft", "draft", position=len(prefix), origin=origin.value):
            drafted = await asyncio.get_running_loop().run_in_executor(self._thread, self._drafter.draft, prefix, 1)
        taken = time.monotonic() - began
        self.statistics.draft_seconds += taken
        if origin is Origin.DRAFTED:
            self._steps += 1
            self._steps_s += taken
        if not drafted:  # the drafter's context is full: only the target can go on
            self._drafter_full = True
            return
        # Nothing else changes the session while the thread drafts: this task handles the inbox.
        self._logprobs[len(prefix)] = drafted[0].logprob
        self.session.extend([drafted[0].token], origin)
        self._paused = False
        self._on_tentative()

    async def _wait(self) -> None:
        left = self._seconds_until_late()
        try:
            action = await asyncio.wait_for(self._inbox.get(), None if left is None else max(left, 0.0) + 0.01)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            return
        action()

    def _send_frames(self) -> None:
        for frame in self.session.frames_to_send():
            if self.session.awaiting_verdict:
                self._launched, self._launched_ns = time.monotonic(), time.time_ns()
            self._transport.send(frame)

    # -- what the transport says ---------------------------------------------------------------

    def _new_transport(self) -> Transport:
        post = self._inbox.put_nowait
        handlers = TransportHandlers(
            connecting=lambda: post(lambda: self._set_link(LinkStatus.RECONNECTING)),
            opened=lambda: post(self.session.connect),
            frame=lambda data: post(lambda: self._received(data)),
            closed=lambda problem, retry_in_s: post(lambda: self._closed(problem, retry_in_s)),
        )
        return Transport(self._endpoint, handlers, self._settings.timing, self._timeline)

    def _received(self, data: bytes) -> None:
        taken_up_ns = time.time_ns()
        with self._timeline.measure("receive", "link", bytes=len(data)):
            self._handle(data, taken_up_ns)

    def _handle(self, data: bytes, taken_up_ns: int) -> None:
        drafted = self.session.in_flight_drafted
        awaited = self.session.awaiting_verdict
        self._drafter_full = False
        events = self.session.receive(data)
        for event in events:
            if isinstance(event, RowsReceived) and self._drafter is not None:
                self._drafter.add_rows(event.start, event.keys, event.values)
            elif isinstance(event, Welcomed):
                self._set_link(LinkStatus.ONLINE)
        if awaited and any(isinstance(event, Committed) for event in events):
            self._count_round(drafted, events, taken_up_ns)
        for event in events:
            if isinstance(event, Faulted):
                self._faulted(event)
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, RolledBack):
            self.statistics.rolled_back += len(event.tokens)
        self._on_event(event)

    def _forget_rows(self, length: int) -> None:
        if self._drafter is not None:
            self._drafter.truncate_rows(length)
        self._drafter_full = False

    def _count_round(self, drafted: int, events: list[Event], taken_up_ns: int) -> None:
        statistics = self.statistics
        committed = [event for event in events if isinstance(event, Committed)]
        origins = [origin for event in committed for origin in event.origins]
        kept = sum(origin is Origin.KEPT for origin in origins)
        accepted = sum(origin in (Origin.DRAFTED, Origin.OFFLINE) for origin in origins)
        statistics.rounds += 1
        statistics.tokens += len(origins)
        statistics.kept += kept
        statistics.drafted += drafted
        # An optimistic token that equals the bonus token was not part of this round's draft.
        statistics.accepted += min(accepted, drafted)
        statistics.offline += kept + sum(origin is Origin.OFFLINE for origin in origins)
        if self._launched is not None:
            trip = time.monotonic() - self._launched
            statistics.round_trips.append(trip)
            statistics.wait_seconds += trip
            if drafted:  # a prompt's verdict says nothing about drafts
                outcome = RoundOutcome(drafted, min(accepted, drafted), self._steps, self._steps_s, trip)
                self._controller.observe(outcome)
            figures = {"drafted": drafted, "accepted": min(accepted, drafted), "round_trip_ms": round(1000 * trip, 3)}
            self._timeline.span("wait", self._launched_ns, taken_up_ns, "link", **figures)
        self._launched = None
        self._steps, self._steps_s = 0, 0.0
        if self._late:
            self._late = False
            self._set_link(LinkStatus.ONLINE)

    def _faulted(self, fault: Faulted) -> None:
        if fault.code == "IDLE":
            return  # the server closes a silent connection; the transport makes another
        if fault.code in _REFUSALS and self._link_task is not None:
            self._link_task.cancel()
        if fault.retry_after_ms:
            loop = asyncio.get_running_loop()
            loop.call_later(fault.retry_after_ms / 1000, self._inbox.put_nowait, self._resend)
        self._on_problem(MoaError(fault.text), not fault.retry_after_ms)

    def _resend(self) -> None:
        self.session.resend()

    def _closed(self, problem: ConnectError, retry_in_s: float | None) -> None:
        if self.session.link is not LinkState.DOWN:
            self.statistics.reconnects += 1
        self._disconnected(str(problem), retry_in_s)
        self._on_problem(problem, problem.final)

    def _disconnected(self, why: str, retry_in_s: float | None = None) -> None:
        self.session.disconnected()
        self._launched = None
        self._late = False
        self._set_link(LinkStatus.OFFLINE, why, retry_in_s)

    def _set_link(self, status: LinkStatus, detail: str = "", retry_in_s: float | None = None) -> None:
        changed = LinkChanged(status, detail, retry_in_s)
        if changed == self.link:
            return
        if status is not self.link.status:
            self._timeline.mark(status.value, "link", detail=detail)
        self.link = changed
        self._on_link(changed)
