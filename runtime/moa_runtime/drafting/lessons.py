"""What verdicts teach: the controller about drafts, the placement about who should make them."""

from __future__ import annotations

from moa_runtime.drafting.draft_controllers import Controller
from moa_runtime.drafting.drafter_selection import Placement
from moa_runtime.drafting.events import Pushed, RoundEnded
from moa_runtime.drafting.in_flight import Rounds
from moa_runtime.drafting.shadow_draft import Trial
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Cause, Decided


class Lessons:
    """Of one conversation's verdicts, each told after the session took it."""

    def __init__(
        self, session: ClientSession, controller: Controller, rounds: Rounds, placement: Placement, trial: Trial
    ) -> None:
        self._session, self._controller, self._rounds = session, controller, rounds
        self._placement, self._trial = placement, trial

    def learn(self, verdict: Decided, waited_s: float) -> Pushed | RoundEnded | None:
        """The event that tells of it; None for a verdict that nobody drafted or waited for.

        Args:
            waited_s: seconds since what it answers was sent; of one that was pushed, since the verdict before.
        """
        self._placement.drafts_wanted = verdict.drafts_wanted
        if verdict.cause is Cause.PUSHED:
            return self._pushed(verdict, waited_s)
        outcome, rounds = self._rounds.ended(verdict, waited_s), self._rounds
        ours = verdict.cause is Cause.ASKED
        if ours and not (rounds.resumed and verdict.drafted):
            self._controller.observe(outcome)
            self._placement.round_ended(outcome, verdict.accepted + 1)
        rounds.resumed = rounds.resumed and bool(self._session.tentative)
        return outcome if ours else None

    def _pushed(self, verdict: Decided, waited_s: float) -> Pushed:
        controller, placement = self._controller, self._placement
        pushed = Pushed(verdict.drafted, verdict.accepted, waited_s, verdict.compute_s, verdict.sharing)
        controller.observe(pushed)
        spared_s = verdict.draft_s + controller.token_s * verdict.drafted
        placement.pushed(verdict.accepted + 1, waited_s, spared_s)
        tried = self._trial.compare(self._session.committed, placement.round_s, controller.token_s, verdict.sharing)
        if tried is not None:
            controller.observe(tried)
            placement.tried(tried)
        return pushed
