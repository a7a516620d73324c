"""What frames of the verifier change in the drafting loop."""

from __future__ import annotations

from moa_runtime.drafters.base import Drafter
from moa_runtime.drafting.drafter_selection import Placement
from moa_runtime.drafting.events import Problem
from moa_runtime.drafting.in_flight import Rounds
from moa_runtime.drafting.lessons import Lessons
from moa_runtime.drafting.listeners import Listeners
from moa_runtime.drafting.timeouts import LinkWatch
from moa_runtime.errors import MoaError
from moa_runtime.events import LinkStatus
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Decided, Echoed, Faulted, RowsReceived, Welcomed


class Arrivals:
    """Frames are taken by the session; what they say is told to those whom it concerns, then to the listeners."""

    def __init__(
        self,
        session: ClientSession,
        drafter: Drafter | None,
        lessons: Lessons,
        watch: LinkWatch,
        rounds: Rounds,
        placement: Placement,
        listeners: Listeners,
    ) -> None:
        self._session, self._drafter = session, drafter
        self._lessons, self._watch, self._rounds, self._placement = lessons, watch, rounds, placement
        self._listeners = listeners

    def take(self, frame: bytes, now: float) -> None:
        """A frame came at ``now``, in seconds."""
        events = self._session.receive(frame)
        # What the frame says besides is taken first: the session has taken it.
        events += [fault for event in events if isinstance(event, RowsReceived) and (fault := self._add_rows(event))]
        for event in events:
            if isinstance(event, Welcomed):
                self._welcomed(event)
            elif isinstance(event, Decided):
                self._decided(event, now)
            elif isinstance(event, Echoed):
                self._echoed(event, now)
            elif isinstance(event, Faulted):
                self._faulted(event, now)
            self._listeners.tell(event)

    def _welcomed(self, welcome: Welcomed) -> None:
        self._watch.up()
        self._placement.server_drafts = welcome.drafts
        self._rounds.resume(len(self._session.tentative))
        self._listeners.set_link(LinkStatus.ONLINE)

    def _decided(self, verdict: Decided, now: float) -> None:
        was_late, waited_s = self._watch.late, self._watch.answered(now)
        if was_late:
            self._listeners.set_link(LinkStatus.ONLINE)
        if self._session.awaiting_verdict:
            self._watch.sent(now, prefill=False)  # the server goes on: from here on silence is late
        if self._session.rows_coming:
            self._watch.await_rows(now)
        learnt = self._lessons.learn(verdict, waited_s)
        if learnt is not None:
            self._listeners.tell(learnt)

    def _echoed(self, echo: Echoed, now: float) -> None:
        trip_s = self._watch.echoed(echo.stamp, echo.held_s, now)
        if trip_s is not None:
            self._session.note_round_trip(self._placement.trip(trip_s))

    def _faulted(self, fault: Faulted, now: float) -> None:
        if fault.code == "IDLE":
            return  # the server closes a silent connection; the transport makes another
        if fault.retry_after_ms:
            self._watch.resend(now + fault.retry_after_ms / 1000)
        self._listeners.tell(Problem(MoaError(fault.text), final=not fault.retry_after_ms))

    def _add_rows(self, received: RowsReceived) -> Faulted | None:
        """Give them to the drafter; a fault where it cannot read them."""
        if self._drafter is None:
            return None
        try:
            self._drafter.add_rows(received.start, received.keys, received.values)
        except ValueError as error:
            self._session.rows = self._drafter.rows
            text = f"the verifier's memory rows are not those of this bundle's drafter: {error}"
            return Faulted("ROWS_MISMATCH", text, 0)
        return None
