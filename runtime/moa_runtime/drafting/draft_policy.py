"""The draft that is due now, or the reason for none; and the one that awaits its verdict."""

from __future__ import annotations

import math
from dataclasses import replace

from moa_runtime.drafters.base import Budget, Drafter
from moa_runtime.drafting.draft_controllers import Controller
from moa_runtime.drafting.drafter_selection import DrafterSelection
from moa_runtime.drafting.events import Draft, RoundEnded
from moa_runtime.drafting.timeouts import Timeouts
from moa_runtime.drafting.unsolicited import UnsolicitedDrafts
from moa_runtime.events import FinishReason, PauseReason
from moa_runtime.options import Conditions, LoopSettings, Offline
from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.client_table import State
from moa_runtime.session.events import AnswerSampling, Decided, Origin, Sampling
from moa_runtime.session.handshake import Limits
from moa_runtime.session.tree import DraftTree

#: Tokens of a credit, and tokens after which it is renewed. The answer to a renewal also measures the round trip.
_CREDIT, _RENEWED_AFTER = 256, 32
#: Text that may still change is drafted token by token, so that frames do not wait for drafts.
_ONE_TOKEN = Budget(nodes=1, levels=1)


class DraftInFlight:
    """Remember what was drafted and sent, until the verdict.

    Args:
        tentative: number of tentative tokens of a restored session, any of which may have been sent.

    Attributes:
        sent_path: number of tentative tokens when the draft in flight was sent; 0 for none.
        resumed: whether the tentative tokens are older than the connection; they then count for no round.
    """

    def __init__(self, tentative: int) -> None:
        self.sent_path, self._sent_depth = tentative, 0
        self._sent_scores: tuple[float, ...] = ()
        self.resumed = False
        self._logprobs: dict[int, float] = {}  # of the tokens drafted last, by position
        self._steps: tuple[int, ...] = ()  # of the draft in flight
        self._draft_s = 0.0

    def begin(self) -> None:
        """Note that the answer continues after tokens that were not drafted."""
        self._logprobs.clear()
        self.sent_path = 0

    def resume(self, tentative: int) -> None:
        """Note that a connection is up: the ``tentative`` tokens belong to no round, and most are in flight again."""
        self.sent_path = self._sent_depth = tentative
        self._sent_scores = ()
        self._steps, self._draft_s, self.resumed = (), 0.0, tentative > 0

    def drafted(self, start: int, tree: DraftTree) -> list[int]:
        """Return the likeliest path of ``tree``, which begins at position ``start``, and remember its probabilities."""
        path = tree.likeliest_path()
        for at, index in enumerate(path):
            parent = tree.parents[index]
            self._logprobs[start + at] = tree.scores[index] - (tree.scores[parent - 1] if parent else 0.0)
        return [tree.tokens[index] for index in path]

    def sent(self, tentative: int, tree: DraftTree, seconds: float) -> None:
        """Note that a draft of the ``tentative`` tokens was sent, with the branches of ``tree``, in ``seconds``."""
        self._steps, self._draft_s = tree.steps, seconds
        self.sent_path, self._sent_depth = tentative, max(tree.depth, tentative)
        self._sent_scores = tree.likeliest_scores()

    def ended(self, verdict: Decided, waited_s: float) -> RoundEnded:
        """Return the round that ``verdict`` ended, ``waited_s`` seconds after its draft was sent."""
        steps, draft_s, depth = (self._steps, self._draft_s, self._sent_depth) if verdict.drafted else ((), 0.0, 0)
        accepted, depth = min(verdict.accepted, verdict.drafted), min(depth, verdict.drafted)
        self._steps, self._draft_s, self.sent_path = (), 0.0, 0
        scores, self._sent_scores = self._sent_scores[:depth], ()
        taken = draft_s, waited_s, verdict.compute_s
        return RoundEnded(verdict.supplied, verdict.drafted, depth, accepted, steps, *taken, scores, verdict.sent)

    def knows(self, start: int, end: int) -> bool:
        """Return whether the tokens at these positions were drafted, so that their probabilities are known."""
        return all(at in self._logprobs for at in range(start, end))

    def logprobs(self, start: int, end: int) -> list[float]:
        """Return the log-probabilities (nats) of the tokens at these positions; 0 for those that were not drafted."""
        return [self._logprobs.get(at, 0.0) for at in range(start, end)]


class DraftPolicy:
    """Decide what to draft from the state of session, link and controller, without changing them.

    Attributes:
        conditions: conditions of the device.
        offline: writer during an outage.
        compiling: whether the answer's grammar is being compiled for the device.
        exhausted: the drafter or writer that had nothing to propose, so that only the target can continue; else None.
    """

    def __init__(
        self,
        session: ClientSession,
        drafter: Drafter | None,
        writer: Drafter | None,
        controller: Controller,
        settings: LoopSettings,
        timeouts: Timeouts,
        in_flight: DraftInFlight,
        selection: DrafterSelection,
        unsolicited: UnsolicitedDrafts,
    ) -> None:
        self.conditions = Conditions()
        self.offline: Offline = settings.offline
        self.compiling = False
        self.exhausted: Drafter | None = None
        self._session, self._controller = session, controller
        self._drafter, self._writer = drafter, writer
        self._settings, self._timeouts, self._in_flight = settings, timeouts, in_flight
        self._selection, self._unsolicited = selection, unsolicited

    def lose_writer(self, failed: Drafter) -> bool:
        """Do without the offline writer from now on if it has failed; return whether it has."""
        lost = failed is self._writer
        if lost:
            self._writer = None
        return lost

    @property
    def round_due(self) -> bool:
        """Whether the target waits for a draft."""
        return self._session.may_propose and not self.conditions.background

    @property
    def credit_due(self) -> int | None:
        """Position of the credit to grant to the server now, if any."""
        session = self._session
        if not self._selection.at_server or not session.may_grant_credit or self.conditions.background:
            return None
        reached = len(session.committed) + session.supplied
        return reached + _CREDIT if session.credit - reached <= _CREDIT - _RENEWED_AFTER else None

    @property
    def device_due(self) -> bool:
        """Whether the server's credit is to be revoked."""
        return self._session.credit_open and (self.conditions.background or not self._selection.at_server)

    def rows_due(self, now: float) -> bool:
        """Return whether the memory rows that the next draft needs are about to arrive."""
        needed = self._drafter is not None and self._drafter.needs_rows and (self.round_due or self.unsolicited_due)
        return needed and self._session.rows_coming > 0 and self._timeouts.rows_may_come(now)

    @property
    def unsolicited_due(self) -> bool:
        """Whether the device drafts while the server streams."""
        session, conditions = self._session, self.conditions
        idle = not (conditions.background or conditions.low_power or conditions.metered or self._alone)
        return idle and session.state is State.STREAMING and not session.tentative and self._selection.wants_draft

    def unsolicited_draft(self) -> Draft | None:
        """Return the draft to make while the server streams, if one is due.

        It follows the committed text, each length of it once. The user's own text is not drafted.
        """
        session, after = self._session, self._unsolicited.next
        if self._drafter is None or not self.unsolicited_due or not self._has_source:
            return None
        if len(session.committed) < max(after, session.answer_start):
            return None
        budget = self._unsolicited.budget(self.round_budget, self._selection.pace)
        return Draft(self._drafter, list(session.committed), budget, Origin.DRAFTED, self._sampling)

    def draft(self) -> Draft | None:
        """Return what to draft now, if anything."""
        session = self._session
        if not session.answering or session.tentative_finish is not None or self.conditions.background:
            return None
        by = self._active
        if by is None or by is self.exhausted or not self._has_source:
            return None
        budget = self._budget()
        if budget is None:
            return None
        if self._timeouts.outage and not self._follows_grammar:
            return None
        origin = Origin.OFFLINE if self._timeouts.outage else Origin.DRAFTED
        return Draft(by, session.tokens, budget, origin, self._sampling)

    def pause_reason(self) -> PauseReason | None:
        """Return why the device does not continue a running answer; None while it may."""
        session = self._session
        if self.conditions.background and (self._alone or not session.awaiting_verdict):
            return PauseReason.BACKGROUND
        if not self._alone:
            return None
        if self.offline == "off":
            return PauseReason.OFF
        if not self._follows_grammar:
            return None if self.compiling else PauseReason.GRAMMAR
        if not self._has_source:
            return None if self._writer_follows else PauseReason.UNPREPARED
        if self.conditions.low_power:
            return PauseReason.LOW_POWER
        finish = session.tentative_finish
        if finish is None and session.grammar is not None and self._active is self.exhausted:
            return PauseReason.GRAMMAR
        if finish is None and self._unsure:
            return None if self._writer_follows else PauseReason.UNSURE
        if finish is None:
            return PauseReason.LIMIT
        return PauseReason.END if finish is FinishReason.STOP else PauseReason.LENGTH

    # -- helpers -------------------------------------------------------------------------------

    @property
    def _follows_grammar(self) -> bool:
        """Whether the device can follow the answer's grammar, or there is none."""
        return self._session.sampling.grammar is None or self._session.grammar is not None

    @property
    def _sampling(self) -> Sampling:
        """The answer's sampling, with the state of its grammar if there is one here."""
        session = self._session
        if session.grammar is None:
            return session.sampling
        return AnswerSampling(**vars(session.sampling), answer_from=session.answer_start, state=session.grammar)

    @property
    def _has_source(self) -> bool:
        """Whether there is a text to continue; a drafter alone cannot answer a question before the target reads it."""
        if self._writer_active:
            return bool(self._session.tokens)
        if self._drafter is None or (self._alone and self._session.supplied):
            return False
        copies_only = self.conditions.metered and self.round_due
        rows_matter = self._drafter.needs_rows and not copies_only
        return bool(self._session.rows if rows_matter else self._session.committed)

    @property
    def _writer_active(self) -> bool:
        """Whether the offline writer proposes: only during an outage, because it has to read the whole conversation."""
        return self._writer is not None and self.offline == "writer" and self._timeouts.outage

    @property
    def _writer_follows(self) -> bool:
        """Whether the offline writer will continue the answer, as soon as the target's silence is an outage."""
        return self._writer is not None and self.offline == "writer" and not self._timeouts.outage

    @property
    def _active(self) -> Drafter | None:
        """The drafter or writer that proposes now; None if there is none."""
        return self._writer if self._writer_active else self._drafter

    @property
    def _unsure(self) -> bool:
        """Whether the stopping rule ends the text that the device writes alone."""
        if self._active is None or self._active.stopping_rule is None:
            return False
        session, tentative = self._session, len(self._session.tentative)
        return not self._active.stopping_rule.may_continue(
            session.tokens, tentative, self._tentative_logprob(tentative)
        )

    @property
    def _alone(self) -> bool:
        """Whether the device has to continue without the target."""
        return self._session.link is not LinkState.UP or self._timeouts.late

    @property
    def round_budget(self) -> Budget:
        """The budget of a whole round's draft."""
        return clip_budget(self._controller.budget(), self._session.limits, self._session.room, self.conditions)

    def _budget(self) -> Budget | None:
        """Return the budget of what may be drafted now; None if nothing may."""
        tentative = len(self._session.tentative)
        if self.round_due:
            return _remaining_budget(self.round_budget, tentative, self._tentative_logprob(tentative))
        if self.conditions.low_power or (self._alone and self.offline == "off"):
            return None
        one = replace(_ONE_TOKEN, tentative=tentative)
        if self._alone:
            return one if tentative < self._settings.offline_limit and not self._unsure else None
        if self._session.awaiting_prefill or self._session.server_may_push or self.conditions.metered:
            return None
        probability = math.exp(self._tentative_logprob(tentative))
        return one if self._controller.ahead(tentative - self._in_flight.sent_path, probability) else None

    def _tentative_logprob(self, tentative: int) -> float:
        """Return the log-probability of all tentative tokens, in nats."""
        end = self._session.length
        return sum(self._in_flight.logprobs(end - tentative, end))


def clip_budget(budget: Budget, limits: Limits, room: int | None, conditions: Conditions) -> Budget:
    """Reduce a controller's budget to what server, answer and host allow.

    Args:
        room: number of tokens that the answer may still have; None without a limit.
    """
    return replace(
        budget,
        nodes=min(budget.nodes, limits.max_draft_tokens),
        levels=0 if conditions.low_power or conditions.metered else budget.levels,
        branches=budget.branches and limits.trees,
        depth=budget.depth if room is None else min(budget.depth, room),
    )


def _remaining_budget(budget: Budget, tentative: int, logprob: float) -> Budget:
    """Return the rest of ``budget`` after ``tentative`` tokens, whose log-probability is ``logprob`` (nats)."""
    if not tentative:
        return budget
    pays = budget.continued([logprob])
    levels = max(0, budget.levels - tentative) if pays else 0
    return replace(budget, nodes=max(0, budget.nodes - tentative), levels=levels, tentative=tentative, logprob=logprob)
