"""The drafting loop: decides what the device does next, without I/O, threads or a clock.

``docs/drafting.md`` shows the modules of this package and what each of them knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moa_runtime.drafters.base import Drafter
from moa_runtime.drafting.draft_controllers import Controller
from moa_runtime.drafting.draft_policy import DraftInFlight, DraftPolicy
from moa_runtime.drafting.drafter_selection import DrafterSelection
from moa_runtime.drafting.events import (
    Draft,
    Drafted,
    LinkLost,
    LoopEvent,
    PauseBegan,
    Problem,
    Pushed,
    RoundEnded,
    Wait,
)
from moa_runtime.drafting.timeouts import Alarm, Timeouts
from moa_runtime.drafting.unsolicited import UnsolicitedDrafts
from moa_runtime.errors import MoaError
from moa_runtime.events import LinkChanged, LinkStatus, PauseReason
from moa_runtime.options import Conditions, LoopSettings, Offline
from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.client_table import State
from moa_runtime.session.events import (
    Cause,
    Decided,
    Echoed,
    Faulted,
    GrammarState,
    Origin,
    RowsReceived,
    Sampling,
    Welcomed,
)
from moa_runtime.session.tree import DraftTree

_ONLINE = "connected to the server"


class DraftingLoop:
    """Drive a :class:`ClientSession`, a drafter and a controller.

    The host has sockets, threads and a clock. It reports events and does what :meth:`next` returns, one thing after
    the other. Between a :class:`Draft` and :meth:`drafted` it calls no other method::

        loop.opened()                                    # a connection is established
        loop.ask(0, tokens, Sampling(), 256)
        while loop.answering:
            todo = loop.next(clock())
            if isinstance(todo, Draft):
                began = clock()
                tree = todo.by.propose(todo.prefix, todo.budget, todo.sampling)
                loop.drafted(todo, tree, clock() - began, clock())
            for frame in loop.frames_to_send(clock()):   # before any waiting
                ...
            if isinstance(todo, Wait):
                ...                                      # until then, or for a frame: loop.received(frame, arrival)

    A session is ``ClientSession(manifest.fingerprints, stop_tokens=manifest.stop_tokens)`` of a bundle's manifest,
    tokens are ``ChatTokenizer.from_bundle(bundle).encode_chat(messages)``.

    ``now`` is in seconds of any monotonic clock. Listeners, such as the application, are called at once; they must
    change neither session nor drafter.

    Args:
        drafter: None if each round asks the target for one token.
        writer: writes in place of the drafter during an outage; it needs no memory rows.

    Attributes:
        link: the link's last change.
    """

    def __init__(
        self,
        session: ClientSession,
        drafter: Drafter | None,
        controller: Controller,
        settings: LoopSettings | None = None,
        writer: Drafter | None = None,
    ) -> None:
        settings = settings or LoopSettings()
        self._session, self._drafter, self._controller = session, drafter, controller
        self._timeouts = Timeouts(settings)
        self._in_flight = DraftInFlight(len(session.tentative))
        self._selection = DrafterSelection(settings.drafting, able=drafter is not None)
        self._unsolicited = UnsolicitedDrafts()
        parts = self._timeouts, self._in_flight, self._selection, self._unsolicited
        self._policy = DraftPolicy(session, drafter, writer, controller, settings, *parts)
        self._listeners: list[Callable[[LoopEvent], None]] = []
        self.link = LinkChanged(LinkStatus.OFFLINE, "no connection has been made yet")
        self._paused: PauseReason | None = None

    # -- the application reads and sets these at any time -------------------------------------------

    def listen(self, listener: Callable[[LoopEvent], None]) -> None:
        """Call ``listener`` with each event from now on."""
        self._listeners.append(listener)

    @property
    def committed(self) -> list[int]:
        """Tokens that the target has confirmed."""
        return self._session.committed

    @property
    def unconfirmed(self) -> tuple[tuple[int, Origin], ...]:
        """Answer tokens after the committed ones, with their origins."""
        return self._session.unconfirmed

    @property
    def answering(self) -> bool:
        """Whether an answer is not finished yet."""
        return self._session.answering

    @property
    def conditions(self) -> Conditions:
        """Conditions of the device that the host reports. ``metered`` stops memory rows from the next connection on."""
        return self._policy.conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        self._policy.conditions = conditions
        self._session.wants_rows = not conditions.metered
        self._session.held = conditions.background

    @property
    def offline(self) -> Offline:
        """The part of the bundle that writes during an outage, if any."""
        return self._policy.offline

    @offline.setter
    def offline(self, offline: Offline) -> None:
        self._policy.offline = offline

    def follow_grammar(self, state: GrammarState | None, *, compiling: bool = False) -> None:
        """Set the state of the running answer's grammar, which the device's drafts and its text obey from now on.

        Args:
            state: None without a grammar, or for one that the device cannot follow; with the latter it writes nothing
                without the target.
            compiling: whether the state comes later.
        """
        self._session.grammar, self._policy.compiling = state, compiling
        self._policy.exhausted = None

    # -- the user's requests -----------------------------------------------------------------------

    def ask(
        self,
        kept: int,
        tokens: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int,
        *,
        while_away: bool = True,
        draft: Sequence[int] = (),
    ) -> None:
        """Begin an answer to ``tokens``, which follow the first ``kept`` committed ones: :meth:`ClientSession.prompt`.

        Args:
            draft: an answer that was written without the target, and that the target verifies first.
        """
        self._begin_at(kept)
        self._session.prompt(tokens, sampling, max_new_tokens, while_away=while_away)
        if draft:
            self._session.extend(draft[: self._session.room], Origin.OFFLINE)
            self._in_flight.resume(len(self._session.tentative))

    def continue_answer(
        self,
        kept: int,
        tokens: Sequence[int],
        answer_start: int,
        sampling: Sampling,
        max_new_tokens: int,
        *,
        while_away: bool = True,
    ) -> None:
        """Continue an answer whose last ``tokens`` follow the first ``kept`` committed ones.

        See :meth:`ClientSession.continue_answer`.
        """
        self._begin_at(kept)
        self._session.continue_answer(tokens, answer_start, sampling, max_new_tokens, while_away=while_away)

    def cancel(self) -> None:
        """End the answer at its last committed token."""
        self._tell(*self._session.cancel())

    def may_keep(self, start: int, tokens: Sequence[int]) -> bool:
        """Return whether :meth:`keep` could keep any of ``tokens``: answer and context may be full."""
        return bool(self._session.keepable(tokens, start))

    def keep(self, start: int, tokens: Sequence[int]) -> None:
        """Replace the answer from position ``start`` on by ``tokens``; raises as :meth:`ClientSession.keep` does."""
        self._forget_rows(start)
        self._tell(*self._session.keep(start, tokens))
        self._in_flight.begin()
        self._timeouts.idle()
        self._paused = None

    # -- the link ----------------------------------------------------------------------------------

    def connecting(self) -> None:
        """Note that the host tries to connect."""
        self._set_link(LinkStatus.RECONNECTING, "a connection to the server is being made")

    def opened(self) -> None:
        """Note that a connection is established; the Hello is among the :meth:`frames_to_send`.

        Raises:
            LocalProtocolError: if there is a connection already.
        """
        self._session.connect()

    def lost(self, why: str, retry_in_s: float | None, now: float, *, on_purpose: bool = False) -> None:
        """Note that the connection is gone, or could not be made.

        Args:
            retry_in_s: seconds until the next attempt; None for no attempt.
            on_purpose: whether the user works offline.
        """
        if self._session.link is not LinkState.DOWN:
            self._tell(LinkLost())
        self._session.disconnected()
        self._timeouts.down(now, on_purpose=on_purpose)
        self._set_link(LinkStatus.OFFLINE, why, retry_in_s)

    def received(self, frame: bytes, now: float) -> None:
        """Take a frame of the server. ``now`` is the time of its arrival; a draft may have been made since then."""
        self._policy.exhausted = None
        events = self._session.receive(frame)
        # Rows first: the session has taken the whole frame, and the drafter has to agree before listeners hear of it.
        events += [fault for event in events if isinstance(event, RowsReceived) and (fault := self._add_rows(event))]
        for event in events:
            if isinstance(event, Welcomed):
                self._take_welcome(event)
            elif isinstance(event, Decided):
                self._take_verdict(event, now)
            elif isinstance(event, Echoed):
                self._take_echo(event, now)
            elif isinstance(event, Faulted):
                self._take_fault(event, now)
            self._tell(event)

    def frames_to_send(self, now: float) -> list[bytes]:
        """Remove and return the frames to send, in order."""
        frames = self._session.frames_to_send()
        self._timeouts.stamped(self._session.stamp, now)
        if not self._session.awaiting_verdict:
            self._timeouts.idle()
        elif frames and not (self._session.state is State.STREAMING and self._timeouts.waiting):
            self._timeouts.sent(now, prefill=self._session.awaiting_prefill)
        return frames

    def resend(self) -> None:
        """Send again the frame that awaits a verdict."""
        self._session.resend()

    # -- the device's tasks ------------------------------------------------------------------------

    def next(self, now: float) -> Draft | Wait:
        """Return what the host has to do now."""
        for alarm in self._timeouts.passed(now):
            self._take_alarm(alarm)
        self._tell(*self._session.resume())
        self._select_drafter()
        if not self._policy.rows_due(now):
            draft = self._policy.draft() or self._policy.unsolicited_draft()
            if draft is not None:
                return draft
            if self._policy.round_due:
                self._send(DraftTree())
        self._note_pause()
        return Wait(self._timeouts.wake_at(now))

    def drafted(self, draft: Draft, tree: DraftTree, seconds: float, now: float) -> None:
        """Take the ``tree`` that the drafter proposed for ``draft``; it took ``seconds``.

        Raises:
            ValueError: the tree has more tokens than the budget has nodes.
        """
        if len(tree.tokens) > draft.budget.nodes:
            raise ValueError(f"the drafter proposed {len(tree.tokens)} tokens where {draft.budget.nodes} were allowed")
        session, start = self._session, len(draft.prefix)
        if self._policy.unsolicited_due:
            self._unsolicited.begin(start, tree, seconds, self._policy.round_budget)
            sends = bool(tree.tokens) and session.may_send_unsolicited
            if sends:
                session.send_unsolicited(tree, start)
            self._tell(Drafted(seconds, len(tree.tokens) if sends else 0))
            return
        extension = self._in_flight.drafted(start, tree)
        # Without levels or nodes to spend, an empty draft does not mean that the drafter is exhausted.
        nothing = not tree.tokens and draft.budget.levels > 0 and draft.budget.nodes > 0
        self._policy.exhausted = draft.by if nothing else None
        if self._policy.round_due:
            stem = session.tentative
            whole = tree.prepended(stem, self._in_flight.logprobs(start - len(stem), start))
            session.extend(extension, draft.origin)
            self._send(whole, seconds, claims=self._in_flight.knows(start - len(stem), start))
        else:
            session.extend(extension, draft.origin)
        if extension:
            self._paused = None
        self._tell(Drafted(seconds))

    def failed(self, draft: Draft, why: str) -> bool:
        """Take that ``draft`` could not be made; return whether the loop goes on. It does without an offline writer,
        as if the bundle had none; not without its drafter."""
        if not self._policy.lose_writer(draft.by):
            return False
        self._paused = None
        self._set_link(self.link.status, f"the offline writer failed: {why}", self.link.retry_in_s, late=self.link.late)
        return True

    # -- frames of the server ----------------------------------------------------------------------

    def _take_welcome(self, welcome: Welcomed) -> None:
        self._timeouts.up()
        self._selection.takes_drafts = self._session.takes_unsolicited
        self._in_flight.resume(len(self._session.tentative))
        self._set_link(LinkStatus.ONLINE, _ONLINE)

    def _take_verdict(self, verdict: Decided, now: float) -> None:
        was_late, waited_s = self._timeouts.late, self._timeouts.answered(now)
        if was_late:
            self._set_link(LinkStatus.ONLINE, _ONLINE)
        if self._session.awaiting_verdict:
            self._timeouts.sent(now, prefill=False)  # the server continues: from now on silence is late
        if self._session.rows_coming:
            self._timeouts.await_rows(now)
        outcome = self._record_outcome(verdict, waited_s)
        if outcome is not None:
            self._tell(outcome)

    def _take_echo(self, echo: Echoed, now: float) -> None:
        round_trip_s = self._timeouts.echoed(echo.stamp, echo.held_s, now)
        if round_trip_s is not None:
            self._session.note_round_trip(self._selection.note_round_trip(round_trip_s))

    def _take_fault(self, fault: Faulted, now: float) -> None:
        if fault.code == "IDLE":
            return  # the server closes a silent connection; the transport makes another
        if fault.retry_after_ms:
            self._timeouts.resend(now + fault.retry_after_ms / 1000)
        self._tell(Problem(MoaError(fault.text, code=fault.code.lower()), final=not fault.retry_after_ms))

    def _add_rows(self, received: RowsReceived) -> Faulted | None:
        """Give memory rows to the drafter; return a fault if it cannot read them."""
        if self._drafter is None:
            return None
        try:
            self._drafter.add_rows(received.start, received.keys, received.values)
        except ValueError as error:
            self._session.rows = self._drafter.rows
            text = f"the verifier's memory rows are not those of this bundle's drafter: {error}"
            return Faulted("ROWS_MISMATCH", text, 0)
        return None

    def _record_outcome(self, verdict: Decided, waited_s: float) -> Pushed | RoundEnded | None:
        """Feed a verdict's outcome to the controller and to the selection of the drafter.

        Args:
            waited_s: seconds since its frame was sent; for a pushed verdict, since the verdict before.

        Returns:
            the event that describes it; None for a verdict that ends no round of this device.
        """
        if verdict.cause is Cause.PUSHED:
            return self._record_pushed(verdict, waited_s)
        outcome, in_flight = self._in_flight.ended(verdict, waited_s), self._in_flight
        asked = verdict.cause is Cause.ASKED
        # The verdict on a draft from before the connection does not show a round's time.
        if asked and not (in_flight.resumed and verdict.drafted):
            self._controller.observe(outcome)
            spared_s = self._controller.token_s * outcome.drafted
            self._selection.round_ended(outcome, verdict.accepted + 1, spared_s)
        in_flight.resumed = in_flight.resumed and bool(self._session.tentative)
        return outcome if asked else None

    def _record_pushed(self, verdict: Decided, waited_s: float) -> Pushed:
        controller, selection = self._controller, self._selection
        pushed = Pushed(verdict.drafted, verdict.accepted, waited_s, verdict.compute_s, verdict.draft_stamp)
        controller.observe(pushed)
        spared_s = verdict.draft_s + controller.token_s * verdict.drafted
        used = verdict.draft_stamp > 0 and verdict.accepted > 0
        selection.pushed(verdict.accepted + 1, waited_s, spared_s, used=used)
        for outcome in self._unsolicited.decided(self._session.committed, selection.round_s, controller.token_s):
            controller.observe(outcome)
            selection.drafted(outcome, controller.token_s * outcome.drafted)
        return pushed

    # -- helpers -----------------------------------------------------------------------------------

    def _take_alarm(self, alarm: Alarm) -> None:
        if alarm is Alarm.LATE:
            self._set_link(LinkStatus.ONLINE, "the server answers late; this device writes on", late=True)
        elif alarm is Alarm.RESEND:
            self.resend()
        elif self._session.declare_offline(self._in_flight.sent_path):
            self._tell(Drafted(0.0))

    def _select_drafter(self) -> None:
        """Grant the server credit to draft and stream, or revoke it."""
        if self._policy.device_due:
            self._session.revoke_credit()
        elif (credit := self._policy.credit_due) is not None:
            self._session.grant_credit(credit)

    def _send(self, tree: DraftTree, seconds: float = 0.0, *, claims: bool = True) -> None:
        """Have the tentative tokens verified, with the branches of ``tree``, which was drafted in ``seconds``."""
        self._in_flight.sent(len(self._session.tentative), tree, seconds)
        self._session.propose(tree=tree if tree.tokens else None, claims=claims)

    def _note_pause(self) -> None:
        reason = self._policy.pause_reason() if self._session.answering else None
        if reason is not None and reason is not self._paused:
            self._tell(PauseBegan(reason))
        self._paused = reason

    def _begin_at(self, kept: int) -> None:
        """Drop everything after the first ``kept`` committed tokens."""
        self._forget_rows(kept)
        self._in_flight.begin()
        self._timeouts.idle()
        self._session.rewind(kept)
        self._paused = None

    def _forget_rows(self, length: int) -> None:
        if self._drafter is not None:
            self._drafter.truncate_rows(length)
        self._unsolicited.forget()
        self._policy.exhausted = None

    def _tell(self, *events: LoopEvent) -> None:
        for event in events:
            for listener in self._listeners:
                listener(event)

    def _set_link(
        self, status: LinkStatus, detail: str, retry_in_s: float | None = None, *, late: bool = False
    ) -> None:
        changed = LinkChanged(status, detail, retry_in_s, late)
        if changed != self.link:
            self.link = changed
            self._tell(changed)
