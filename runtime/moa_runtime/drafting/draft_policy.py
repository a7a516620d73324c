"""What the device drafts next, or why nothing, by what is known at that moment."""

from __future__ import annotations

import math
from dataclasses import replace

from moa_runtime.drafters.base import Budget, Drafter
from moa_runtime.drafting.budgets import ONE, behind, within
from moa_runtime.drafting.draft_controllers import Controller
from moa_runtime.drafting.drafter_selection import Placement
from moa_runtime.drafting.events import Draft
from moa_runtime.drafting.in_flight import Rounds
from moa_runtime.drafting.offline import Offline
from moa_runtime.drafting.settings import Conditions, LoopSettings
from moa_runtime.drafting.timeouts import LinkWatch
from moa_runtime.events import FinishReason, PauseReason
from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.events import Origin

#: The server may go on by itself for so many tokens; after so many it hears that it may go on further, and its answer
#: says what the link takes by then.
_CREDIT, _RENEWED_AFTER = 256, 32


class Decisions:
    """The drafting loop's. They change nothing of what they look at.

    Attributes:
        conditions: what the host says.
        offline: what writes while there is no verifier.
        exhausted: who has nothing to propose, so that only the target can go on.
    """

    def __init__(
        self,
        session: ClientSession,
        drafter: Drafter | None,
        writer: Drafter | None,
        controller: Controller,
        settings: LoopSettings,
        watch: LinkWatch,
        rounds: Rounds,
        placement: Placement,
    ) -> None:
        self.conditions = Conditions()
        self.offline: Offline = settings.offline
        self.exhausted: Drafter | None = None
        self._session, self._controller = session, controller
        self._drafter, self._writer = drafter, writer
        self._settings, self._watch, self._rounds = settings, watch, rounds
        self._placement = placement

    @property
    def round_due(self) -> bool:
        """Whether the target waits for a draft."""
        return self._session.may_propose and not self.conditions.background

    @property
    def credit_due(self) -> int | None:
        """The position up to which the server is to go on by itself, where it is to be told one."""
        session = self._session
        if not self._placement.at_server or not session.may_grant_credit or self.conditions.background:
            return None
        reached = len(session.committed) + session.supplied
        return reached + _CREDIT if session.credit - reached <= _CREDIT - _RENEWED_AFTER else None

    @property
    def device_due(self) -> bool:
        """Whether the server is to stop doing so."""
        return self._session.credit_open and (self.conditions.background or not self._placement.at_server)

    def rows_due(self, now: float) -> bool:
        """Whether the memory rows that a draft would be made with are about to come."""
        needed = self._drafter is not None and self._drafter.needs_rows
        return needed and self.round_due and self._session.rows_coming > 0 and self._watch.rows_may_come(now)

    @property
    def trial_due(self) -> bool:
        """Whether the device may make a draft that is not sent, while the server goes on by itself."""
        session, conditions = self._session, self.conditions
        idle = not (conditions.background or conditions.low_power or conditions.metered or self._alone)
        return idle and session.server_may_push and not session.tentative and self._placement.wants_trial

    def trial(self, earliest: int) -> Draft | None:
        """What is to be drafted for that, if it may be: one token behind the newest memory row, as in a round. Rows
        come behind the text, and what a drafter expects without them says nothing of rounds; nor does the user's text.

        Args:
            earliest: tokens that it is to be behind at least.
        """
        session = self._session
        if self._drafter is None or not self.trial_due or not self._prepared:
            return None
        known = session.tokens[: session.rows + 1] if self._drafter.needs_rows else session.tokens
        if len(known) < max(earliest, session.answer_start):
            return None
        return Draft(self._drafter, known, self._affordable, Origin.DRAFTED, session.sampling)

    def draft(self) -> Draft | None:
        """What is to be drafted now, if anything is."""
        session = self._session
        if not session.answering or session.tentatively_finished or self.conditions.background:
            return None
        by = self._by
        if by is None or by is self.exhausted or not self._prepared:
            return None
        budget = self._budget()
        if budget is None:
            return None
        origin = Origin.OFFLINE if self._watch.outage else Origin.DRAFTED
        return Draft(by, session.tokens, budget, origin, session.sampling)

    def pause_reason(self) -> PauseReason | None:
        """Why the device does not go on with a running answer; None while it may."""
        session = self._session
        if self.conditions.background and (self._alone or not session.awaiting_verdict):
            return PauseReason.BACKGROUND
        if not self._alone:
            return None
        if self.offline == "off":
            return PauseReason.OFF
        if not self._prepared:
            return PauseReason.UNPREPARED
        if self.conditions.low_power:
            return PauseReason.LOW_POWER
        finish = session.tentative_finish
        if finish is None:
            return PauseReason.UNSURE if self._unsure else PauseReason.LIMIT
        return PauseReason.END if finish is FinishReason.STOP else PauseReason.LENGTH

    # -- helpers -------------------------------------------------------------------------------

    @property
    def _prepared(self) -> bool:
        """Whether there is anything to draft from. A drafter alone has nothing to say to a question that the target did
        not see."""
        if self._writes:
            return bool(self._session.tokens)
        if self._drafter is None or (self._alone and self._session.supplied):
            return False
        copies_only = self.conditions.metered and self.round_due
        rows_matter = self._drafter.needs_rows and not copies_only
        return bool(self._session.rows if rows_matter else self._session.committed)

    @property
    def _writes(self) -> bool:
        """Whether the writer is the one to go on: in an outage. A verdict that is only late is no reason to read the
        whole conversation."""
        return self._writer is not None and self.offline == "writer" and self._watch.outage

    @property
    def _by(self) -> Drafter | None:
        """Who drafts now, if anybody can."""
        return self._writer if self._writes else self._drafter

    @property
    def _unsure(self) -> bool:
        """Whether what it would write alone is worth no more."""
        if self._by is None or self._by.manners is None:
            return False
        session, tentative = self._session, len(self._session.tentative)
        return not self._by.manners.go_on(session.tokens, tentative, self._tentative_logprob(tentative))

    @property
    def _alone(self) -> bool:
        """Whether the device has to go on without the target."""
        return self._session.link is not LinkState.UP or self._watch.late

    @property
    def _affordable(self) -> Budget:
        """What a whole round's draft may be."""
        return within(self._controller.budget(), self._session.limits, self._session.room, self.conditions)

    def _budget(self) -> Budget | None:
        """What may be drafted now."""
        tentative = len(self._session.tentative)
        if self.round_due:
            return behind(self._affordable, tentative, self._tentative_logprob(tentative))
        if self.conditions.low_power or (self._alone and self.offline == "off"):
            return None
        one = replace(ONE, tentative=tentative)
        if self._alone:
            return one if tentative < self._settings.offline_limit and not self._unsure else None
        if self._session.awaiting_prefill or self._session.server_may_push or self.conditions.metered:
            return None
        probability = math.exp(self._tentative_logprob(tentative))
        return one if self._controller.ahead(tentative - self._rounds.sent_path, probability) else None

    def _tentative_logprob(self, tentative: int) -> float:
        """Of all tentative tokens (nats)."""
        end = self._session.length
        return sum(self._rounds.logprobs(end - tentative, end))
