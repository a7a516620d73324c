"""The drafting loop: what the device does next. Without I/O, threads and clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moa_runtime.answer import LinkChanged, LinkStatus, PauseReason
from moa_runtime.control import Controller
from moa_runtime.decisions import Decisions
from moa_runtime.drafters.base import Drafter
from moa_runtime.errors import MoaError
from moa_runtime.lessons import Lessons
from moa_runtime.link_watch import Alarm, LinkWatch
from moa_runtime.listeners import Listeners
from moa_runtime.loop_events import Draft, Drafted, LinkLost, LoopEvent, PauseBegan, Problem, Wait
from moa_runtime.loop_settings import Conditions, LoopSettings
from moa_runtime.offline import Offline
from moa_runtime.placement import Placement
from moa_runtime.rounds import Rounds
from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.events import (
    Decided,
    Echoed,
    Faulted,
    Origin,
    Policy,
    RowsReceived,
    Sampling,
    Welcomed,
)
from moa_runtime.session.tree import DraftTree
from moa_runtime.trial import Trial

#: The server may go on by itself for so many tokens; after so many it hears that it may go on further, and its answer
#: says what the link takes by then.
_CREDIT, _RENEWED_AFTER = 256, 32


class DraftingLoop:
    """A :class:`ClientSession`, a drafter and a controller, and what to do with them next.

    The host, which has sockets, threads and a clock, tells what happened and does what :meth:`next` says, one thing
    after the other; between a :class:`Draft` and :meth:`drafted` it calls nothing else::

        loop.opened()                                    # a connection stands
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
                ...                                      # until then, or for a frame: loop.received(frame, clock())

    A session is ``ClientSession(manifest.fingerprints, stop_tokens=manifest.stop_tokens)`` of a bundle's manifest,
    tokens are ``ChatTokenizer.from_bundle(bundle).encode_chat(messages)``. Whether memory rows are wanted
    (:class:`Conditions`) is told with the next connection: a host that changes it makes one.

    ``now`` is in seconds of any monotonic clock. What happens is told to listeners at once; the application is one of
    them and touches neither session nor drafter.

    Args:
        drafter: None, and each round asks the target for one token.
        writer: what writes in an outage in the drafter's place, and needs no memory rows.
    """

    def __init__(
        self,
        session: ClientSession,
        drafter: Drafter | None,
        controller: Controller,
        settings: LoopSettings | None = None,
        writer: Drafter | None = None,
    ) -> None:
        self._session, self._drafter = session, drafter
        settings = settings or LoopSettings()
        self._watch, self._rounds = LinkWatch(settings), Rounds(len(session.tentative))
        self._placement, self._trial = Placement(settings.drafting, able=drafter is not None), Trial()
        self._lessons = Lessons(session, controller, self._rounds, self._placement, self._trial)
        self._decisions = Decisions(
            session, drafter, writer, controller, settings, self._watch, self._rounds, self._placement
        )
        self._listeners = Listeners()
        self._tell, self._set_link = self._listeners.tell, self._listeners.set_link
        self._paused: PauseReason | None = None

    def listen(self, listener: Callable[[LoopEvent], None]) -> None:
        """Have ``listener`` called with each event."""
        self._listeners.add(listener)

    # -- what is known -----------------------------------------------------------------------------

    @property
    def link(self) -> LinkChanged:
        """Its last change."""
        return self._listeners.link

    @property
    def committed(self) -> list[int]:
        """Tokens that the target has confirmed."""
        return self._session.committed

    @property
    def unconfirmed(self) -> tuple[tuple[int, Origin], ...]:
        """Answer tokens behind these, with their origins."""
        return self._session.unconfirmed

    @property
    def answering(self) -> bool:
        return self._session.answering

    @property
    def conditions(self) -> Conditions:
        """What the host says; may be set at any time. Whether rows are wanted is told with the next connection."""
        return self._decisions.conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        self._decisions.conditions = conditions
        self._session.wants_rows = not conditions.metered
        self._session.held = conditions.background

    @property
    def policy(self) -> Policy:
        """What becomes of text written offline; may be set at any time."""
        return self._session.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._session.policy = policy

    @property
    def offline(self) -> Offline:
        """What writes while there is no verifier; may be set at any time."""
        return self._decisions.offline

    @offline.setter
    def offline(self, offline: Offline) -> None:
        self._decisions.offline = offline

    # -- what the user wants -----------------------------------------------------------------------

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
        """Begin an answer: to ``tokens`` after the first ``kept`` committed ones, see :meth:`ClientSession.prompt`.

        Args:
            draft: the answer as it was written without the target, which is asked about it first.
        """
        self._begin_at(kept)
        self._session.prompt(tokens, sampling, max_new_tokens, while_away=while_away)
        if draft:
            self._session.extend(draft[: self._session.room], Origin.OFFLINE)
            self._rounds.resume(len(self._session.tentative))

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
        """Have an answer go on that ends with ``tokens`` after the first ``kept`` committed ones, see
        :meth:`ClientSession.continue_answer`."""
        self._begin_at(kept)
        self._session.continue_answer(tokens, answer_start, sampling, max_new_tokens, while_away=while_away)

    def cancel(self) -> None:
        """End the answer where the target has confirmed it."""
        self._tell(*self._session.cancel())

    def may_keep(self, start: int, tokens: Sequence[int]) -> bool:
        """Whether :meth:`keep` could keep any of them: answer and context may be full."""
        return bool(self._session.keepable(tokens, start))

    def keep(self, start: int, tokens: Sequence[int]) -> None:
        """Put ``tokens`` in place of the answer's end, see :meth:`ClientSession.keep`.

        Raises:
            LocalProtocolError: see there.
        """
        self._forget_rows(start)
        self._tell(*self._session.keep(start, tokens))
        self._rounds.begin()
        self._watch.idle()
        self._paused = None

    # -- what the link does ------------------------------------------------------------------------

    def connecting(self) -> None:
        """A connection is being made."""
        self._set_link(LinkStatus.RECONNECTING)

    def opened(self) -> None:
        """A connection stands: the Hello is among the :meth:`frames_to_send`.

        Raises:
            LocalProtocolError: one stands already.
        """
        self._session.connect()

    def lost(self, why: str, retry_in_s: float | None, now: float, *, on_purpose: bool = False) -> None:
        """It is gone, or could not be made.

        Args:
            retry_in_s: seconds until another will be made, None for never.
            on_purpose: the user works offline.
        """
        if self._session.link is not LinkState.DOWN:
            self._tell(LinkLost())
        self._session.disconnected()
        self._watch.down(now, on_purpose=on_purpose)
        self._set_link(LinkStatus.OFFLINE, why, retry_in_s)

    def received(self, frame: bytes, now: float) -> None:
        """A frame came."""
        self._decisions.exhausted = None
        events = self._session.receive(frame)
        # What the frame says besides is taken first: the session has taken it.
        events += [fault for event in events if isinstance(event, RowsReceived) and (fault := self._add_rows(event))]
        for event in events:
            if isinstance(event, Welcomed):
                self._watch.up()
                self._placement.server_drafts = event.drafts
                self._rounds.resume(len(self._session.tentative))
                self._set_link(LinkStatus.ONLINE)
            elif isinstance(event, Decided):
                self._decided(event, now)
            elif isinstance(event, Echoed):
                self._echoed(event, now)
            elif isinstance(event, Faulted):
                self._faulted(event, now)
            self._tell(event)

    # -- what the device does ----------------------------------------------------------------------

    def next(self, now: float) -> Draft | Wait:
        """What to do now."""
        for alarm in self._watch.passed(now):
            self._take_alarm(alarm)
        self._tell(*self._session.resume())
        self._place()
        if not self._decisions.rows_due(now):
            draft = self._decisions.draft() or (None if self._trial.runs else self._decisions.trial(self._trial.next))
            if draft is not None:
                return draft
            if self._decisions.round_due:
                self._send(DraftTree())
        self._note_pause()
        return Wait(self._watch.wake_at(now))

    def drafted(self, draft: Draft, tree: DraftTree, seconds: float, now: float) -> None:
        """The drafter proposed ``tree`` for ``draft``, in so many seconds.

        Raises:
            ValueError: it has more tokens than the budget's nodes.
        """
        if len(tree.tokens) > draft.budget.nodes:
            raise ValueError(f"the drafter proposed {len(tree.tokens)} tokens where {draft.budget.nodes} were allowed")
        session, start = self._session, len(draft.prefix)
        if self._decisions.trial_due:
            self._trial.begin(start, tree, seconds)
            return
        extension = self._rounds.drafted(start, tree)
        # Without levels or nodes to spend, an empty draft says nothing of the drafter.
        nothing = not tree.tokens and draft.budget.levels > 0 and draft.budget.nodes > 0
        self._decisions.exhausted = draft.by if nothing else None
        if self._decisions.round_due:
            stem = session.tentative
            self._rounds.took(tree.steps, seconds)
            whole = tree.behind(stem, self._rounds.logprobs(start - len(stem), start))
            session.extend(extension, draft.origin)
            self._send(whole)
        else:
            session.extend(extension, draft.origin)
        if extension:
            self._paused = None
        self._tell(Drafted(seconds))

    def frames_to_send(self, now: float) -> list[bytes]:
        """Take the frames that are to be sent, in order."""
        frames = self._session.frames_to_send()
        self._watch.stamped(self._session.stamp, now)
        if not self._session.awaiting_verdict:
            self._watch.idle()
        elif frames:
            self._watch.sent(now, prefill=self._session.awaiting_prefill)
        return frames

    def resend(self) -> None:
        """Send what is in flight once more."""
        self._session.resend()

    def _send(self, tree: DraftTree) -> None:
        """Have the tentative tokens verified, with what branches off them."""
        self._rounds.sent(len(self._session.tentative), tree.depth)
        self._session.propose(tree=tree if tree.tokens else None)

    # -- time --------------------------------------------------------------------------------------

    def _take_alarm(self, alarm: Alarm) -> None:
        if alarm is Alarm.LATE:
            self._set_link(LinkStatus.ONLINE, "the verdict is late; the device writes on")
        elif alarm is Alarm.RESEND:
            self.resend()
        elif self._session.declare_offline(self._rounds.sent_path):
            self._tell(Drafted(0.0))

    def _note_pause(self) -> None:
        reason = self._decisions.pause_reason() if self._session.answering else None
        if reason is not None and reason is not self._paused:
            self._tell(PauseBegan(reason))
        self._paused = reason

    # -- what came ---------------------------------------------------------------------------------

    def _decided(self, verdict: Decided, now: float) -> None:
        was_late, waited_s = self._watch.late, self._watch.answered(now)
        if was_late:
            self._set_link(LinkStatus.ONLINE)
        if self._session.awaiting_verdict:
            self._watch.sent(now, prefill=False)  # the server goes on: from here on silence is late
        if self._session.rows_coming:
            self._watch.await_rows(now)
        learnt = self._lessons.learn(verdict, waited_s)
        if learnt is not None:
            self._tell(learnt)

    def _echoed(self, echo: Echoed, now: float) -> None:
        trip_s = self._watch.echoed(echo.stamp, echo.held_s, now)
        if trip_s is not None:
            self._session.note_round_trip(self._placement.trip(trip_s))

    def _place(self) -> None:
        """Have the server go on by itself, or take over."""
        session = self._session
        if self._decisions.device_due:
            session.take_over()
        elif self._decisions.server_due:
            reached = len(session.committed) + session.supplied
            if session.credit - reached <= _CREDIT - _RENEWED_AFTER:
                session.lend(reached + _CREDIT)

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

    def _faulted(self, fault: Faulted, now: float) -> None:
        if fault.code == "IDLE":
            return  # the server closes a silent connection; the transport makes another
        if fault.retry_after_ms:
            self._watch.resend(now + fault.retry_after_ms / 1000)
        self._tell(Problem(MoaError(fault.text), final=not fault.retry_after_ms))

    def _begin_at(self, kept: int) -> None:
        """Nothing is under way, and the first ``kept`` committed tokens stay."""
        self._forget_rows(kept)
        self._rounds.begin()
        self._watch.idle()
        self._session.rewind(kept)
        self._paused = None

    def _forget_rows(self, length: int) -> None:
        if self._drafter is not None:
            self._drafter.truncate_rows(length)
        self._trial.forget()
        self._decisions.exhausted = None
