"""The drafting loop: what the device does next. Without I/O, threads and clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from moa_runtime.answer import FinishReason, LinkChanged, LinkStatus, PauseReason
from moa_runtime.budgets import ONE, behind, within
from moa_runtime.control import Controller
from moa_runtime.drafters.base import Budget, Drafter
from moa_runtime.errors import MoaError
from moa_runtime.link_watch import Alarm, LinkWatch
from moa_runtime.loop_events import (
    Draft,
    Drafted,
    LinkLost,
    LoopEvent,
    PauseBegan,
    Problem,
    RoundEnded,
    Wait,
)
from moa_runtime.loop_settings import Conditions, LoopSettings
from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.events import (
    Decided,
    Faulted,
    Origin,
    Policy,
    RowsReceived,
    Sampling,
    Welcomed,
)
from moa_runtime.session.tree import DraftTree


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
                tree = drafter.propose(todo.prefix, todo.budget)
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

    Attributes:
        link: its last change.
    """

    def __init__(
        self,
        session: ClientSession,
        drafter: Drafter | None,
        controller: Controller,
        settings: LoopSettings | None = None,
    ) -> None:
        self._conditions = Conditions()
        self.link = LinkChanged(LinkStatus.OFFLINE)
        self._session, self._drafter, self._controller = session, drafter, controller
        self._settings = settings or LoopSettings()
        self._watch = LinkWatch(self._settings)
        self._listeners: list[Callable[[LoopEvent], None]] = []
        self._logprobs: dict[int, float] = {}  # of what was drafted last, by position
        # Tentative tokens when the draft on its way was sent; all that a restored session has.
        self._sent_path = len(session.tentative)
        self._sent_depth = 0
        self._steps: tuple[int, ...] = ()  # of the draft for the next round, or of the one on its way
        self._draft_s = 0.0
        self._resumed = False  # the tentative tokens were written before the connection: they took no round
        self._exhausted = False  # the drafter has nothing to propose: only the target can go on
        self._paused: PauseReason | None = None

    def listen(self, listener: Callable[[LoopEvent], None]) -> None:
        """Have ``listener`` called with each event."""
        self._listeners.append(listener)

    # -- what is known -----------------------------------------------------------------------------

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
        return self._conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._session.wants_rows = not conditions.metered
        self._session.held = conditions.background

    @property
    def policy(self) -> Policy:
        """What becomes of text written offline; may be set at any time."""
        return self._session.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._session.policy = policy

    # -- what the user wants -----------------------------------------------------------------------

    def ask(
        self, kept: int, tokens: Sequence[int], sampling: Sampling, max_new_tokens: int, *, while_away: bool = True
    ) -> None:
        """Begin an answer: to ``tokens`` after the first ``kept`` committed ones of the whole conversation.

        Args:
            while_away: whether the server may finish it while there is no link.
        """
        self._logprobs.clear()
        self._forget_rows(kept)
        self._sent_path = 0
        self._watch.idle()
        self._session.rewind(kept)
        self._session.prompt(tokens, sampling, max_new_tokens, while_away=while_away)
        self._paused = None

    def cancel(self) -> None:
        """End the answer where the target has confirmed it."""
        for event in self._session.cancel():
            self._tell(event)

    def keep(self, start: int, tokens: Sequence[int]) -> None:
        """Put ``tokens`` in place of the answer's end, see :meth:`ClientSession.keep`.

        Raises:
            LocalProtocolError: see there.
        """
        self._forget_rows(start)
        for event in self._session.keep(start, tokens):
            self._tell(event)
        self._sent_path = 0
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
        self._exhausted = False
        events = self._session.receive(frame)
        # What the frame says besides is taken first: the session has taken it.
        events += [fault for event in events if isinstance(event, RowsReceived) and (fault := self._add_rows(event))]
        for event in events:
            if isinstance(event, Welcomed):
                self._watch.up()
                # What is no offline text by now never will be; most of it is on its way again.
                self._sent_path = self._sent_depth = len(self._session.tentative)
                self._steps, self._draft_s, self._resumed = (), 0.0, self._sent_path > 0
                self._set_link(LinkStatus.ONLINE)
            elif isinstance(event, Decided):
                self._decided(event, now)
            elif isinstance(event, Faulted):
                self._faulted(event, now)
            self._tell(event)

    # -- what the device does ----------------------------------------------------------------------

    def next(self, now: float) -> Draft | Wait:
        """What to do now."""
        for alarm in self._watch.passed(now):
            self._take_alarm(alarm)
        for event in self._session.resume():
            self._tell(event)
        draft = self._draft_due()
        if draft is not None:
            return draft
        if self._round_due:
            self._send(DraftTree())
        self._note_pause()
        return Wait(self._watch.wake_at())

    def drafted(self, draft: Draft, tree: DraftTree, seconds: float, now: float) -> None:
        """The drafter proposed ``tree`` for ``draft``, in so many seconds.

        Raises:
            ValueError: it has more tokens than the budget's nodes.
        """
        if len(tree.tokens) > draft.budget.nodes:
            raise ValueError(f"the drafter proposed {len(tree.tokens)} tokens where {draft.budget.nodes} were allowed")
        session, start = self._session, len(draft.prefix)
        path = tree.likeliest_path()
        for at, index in enumerate(path):
            parent = tree.parents[index]
            self._logprobs[start + at] = tree.scores[index] - (tree.scores[parent - 1] if parent else 0.0)
        extension = [tree.tokens[index] for index in path]
        # Without levels or nodes to spend, an empty draft says nothing of the drafter.
        self._exhausted = not tree.tokens and draft.budget.levels > 0 and draft.budget.nodes > 0
        if self._round_due:
            stem = session.tentative
            self._steps, self._draft_s = tree.steps, seconds
            whole = tree.behind(stem, self._logprobs_of(start - len(stem), start))
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
        if not self._session.awaiting_verdict:
            self._watch.idle()
        elif frames:
            self._watch.sent(now, prefill=self._session.awaiting_prefill)
        return frames

    def resend(self) -> None:
        """Send what is in flight once more."""
        self._session.resend()

    # -- decisions ---------------------------------------------------------------------------------

    @property
    def _prepared(self) -> bool:
        """Whether there is anything to draft from."""
        if self._drafter is None:
            return False
        copies_only = self._conditions.metered and self._round_due
        rows_matter = self._drafter.needs_rows and not copies_only
        return bool(self._session.rows if rows_matter else self._session.committed)

    @property
    def _alone(self) -> bool:
        """Whether the device has to go on without the target."""
        return self._session.link is not LinkState.UP or self._watch.late

    @property
    def _round_due(self) -> bool:
        """Whether the target waits for a draft."""
        return self._session.may_propose and not self._conditions.background

    def _draft_due(self) -> Draft | None:
        session = self._session
        if not session.answering or session.tentatively_finished or self._conditions.background:
            return None
        budget = None if self._exhausted or not self._prepared else self._budget()
        if budget is None:
            return None
        return Draft(session.tokens, budget, Origin.OFFLINE if self._watch.outage else Origin.DRAFTED)

    def _budget(self) -> Budget | None:
        """Of what is to be drafted now, if anything is."""
        tentative = len(self._session.tentative)
        if self._round_due:
            session, logprob = self._session, self._tentative_logprob(tentative)
            asked = within(self._controller.budget(), session.limits, session.room, self._conditions)
            return behind(asked, tentative, logprob)
        if self._conditions.low_power:
            return None
        one = replace(ONE, tentative=tentative)
        if self._alone:
            return one if tentative < self._settings.offline_limit else None
        if self._session.awaiting_prefill or self._conditions.metered:
            return None
        probability = math.exp(self._tentative_logprob(tentative))
        return one if self._controller.ahead(tentative - self._sent_path, probability) else None

    def _send(self, tree: DraftTree) -> None:
        """Have the tentative tokens verified, with what branches off them."""
        tentative = self._session.tentative
        self._sent_path = len(tentative)
        self._sent_depth = max(tree.depth, len(tentative))
        self._session.propose(tree=tree if tree.tokens else None)

    def _tentative_logprob(self, tentative: int) -> float:
        """Of all tentative tokens (nats)."""
        end = self._session.length
        return sum(self._logprobs_of(end - tentative, end))

    def _logprobs_of(self, start: int, end: int) -> list[float]:
        return [self._logprobs.get(at, 0.0) for at in range(start, end)]

    # -- time --------------------------------------------------------------------------------------

    def _take_alarm(self, alarm: Alarm) -> None:
        if alarm is Alarm.LATE:
            self._set_link(LinkStatus.ONLINE, "the verdict is late; the device writes on")
        elif alarm is Alarm.RESEND:
            self.resend()
        elif self._session.declare_offline(self._sent_path):
            self._tell(Drafted(0.0))

    def _note_pause(self) -> None:
        reason = self._pause_reason() if self._session.answering else None
        if reason is not None and reason is not self._paused:
            self._tell(PauseBegan(reason))
        self._paused = reason

    def _pause_reason(self) -> PauseReason | None:
        session = self._session
        if self._conditions.background and (self._alone or not session.awaiting_verdict):
            return PauseReason.BACKGROUND
        if not self._alone:
            return None
        if not self._prepared:
            return PauseReason.UNPREPARED
        if self._conditions.low_power:
            return PauseReason.LOW_POWER
        finish = session.tentative_finish
        if finish is None:
            return PauseReason.LIMIT
        return PauseReason.END if finish is FinishReason.STOP else PauseReason.LENGTH

    # -- what came ---------------------------------------------------------------------------------

    def _decided(self, verdict: Decided, now: float) -> None:
        was_late, waited_s = self._watch.late, self._watch.answered(now)
        steps, draft_s, depth = (self._steps, self._draft_s, self._sent_depth) if verdict.drafted else ((), 0.0, 0)
        accepted, depth = min(verdict.accepted, verdict.drafted), min(depth, verdict.drafted)
        outcome = RoundEnded(
            verdict.supplied, verdict.drafted, depth, accepted, steps, draft_s, waited_s, verdict.compute_s
        )
        self._steps, self._draft_s, self._sent_path = (), 0.0, 0
        if was_late:
            self._set_link(LinkStatus.ONLINE)
        if verdict.asked and not (self._resumed and verdict.drafted):
            self._controller.observe(outcome)
        self._resumed = self._resumed and bool(self._session.tentative)
        self._tell(outcome)

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

    def _forget_rows(self, length: int) -> None:
        if self._drafter is not None:
            self._drafter.truncate_rows(length)
        self._exhausted = False

    def _tell(self, event: LoopEvent) -> None:
        for listener in self._listeners:
            listener(event)

    def _set_link(self, status: LinkStatus, detail: str = "", retry_in_s: float | None = None) -> None:
        changed = LinkChanged(status, detail, retry_in_s)
        if changed != self.link:
            self.link = changed
            self._tell(changed)
