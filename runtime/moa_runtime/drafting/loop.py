"""The drafting loop: what the device does next. Without I/O, threads and clock."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.drafters.base import Drafter
from moa_runtime.drafting.arrivals import Arrivals
from moa_runtime.drafting.draft_controllers import Controller
from moa_runtime.drafting.draft_policy import Decisions
from moa_runtime.drafting.drafter_selection import Placement
from moa_runtime.drafting.events import Draft, Drafted, LinkLost, PauseBegan, Wait
from moa_runtime.drafting.in_flight import Rounds
from moa_runtime.drafting.lessons import Lessons
from moa_runtime.drafting.loop_view import LoopView
from moa_runtime.drafting.settings import LoopSettings
from moa_runtime.drafting.shadow_draft import Trial
from moa_runtime.drafting.timeouts import Alarm, LinkWatch
from moa_runtime.events import LinkStatus, PauseReason
from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.events import Origin, Sampling
from moa_runtime.session.tree import DraftTree


class DraftingLoop(LoopView):
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
        settings = settings or LoopSettings()
        self._watch, self._rounds = watch, rounds = LinkWatch(settings), Rounds(len(session.tentative))
        self._placement, self._trial = Placement(settings.drafting, able=drafter is not None), Trial()
        lessons = Lessons(session, controller, rounds, self._placement, self._trial)
        super().__init__(
            session,
            Decisions(session, drafter, writer, controller, settings, watch, rounds, self._placement),
        )
        self._drafter = drafter
        self._tell, self._set_link = self._listeners.tell, self._listeners.set_link
        self._arrivals = Arrivals(session, drafter, lessons, watch, rounds, self._placement, self._listeners)
        self._paused: PauseReason | None = None

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
        self._arrivals.take(frame, now)

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
        self._rounds.sent(len(self._session.tentative), tree)
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

    def _place(self) -> None:
        """Have the server go on by itself, or take over."""
        if self._decisions.device_due:
            self._session.revoke_credit()
        elif (credit := self._decisions.credit_due) is not None:
            self._session.grant_credit(credit)

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
