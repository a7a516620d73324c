"""What a verdict says of the target reaches the controller, whoever drafted."""

from __future__ import annotations

import pytest

from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.drafter_selection import Placement
from moa_runtime.drafting.events import Pushed, RoundEnded
from moa_runtime.drafting.in_flight import Rounds
from moa_runtime.drafting.lessons import Lessons
from moa_runtime.drafting.shadow_draft import Trial
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Cause, Decided
from moa_runtime.session.tree import DraftTree
from toy_engine import PRINTS


class Hearing:
    """Keeps what it is told. Implements :class:`moa_runtime.drafting.draft_controllers.Controller`."""

    token_s = 0.0

    def __init__(self) -> None:
        self.heard: list[RoundEnded | Pushed] = []

    def budget(self) -> Budget:
        return Budget.chain(6)

    def ahead(self, drafted: int, probability: float) -> bool:
        return False

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        self.heard.append(outcome)


@pytest.mark.parametrize("cause", [Cause.ASKED, Cause.PUSHED])
def test_how_many_share_the_target_is_a_part_of_each_outcome_and_of_trials(cause: Cause) -> None:
    controller, trial = Hearing(), Trial()
    session = ClientSession(PRINTS, stop_tokens=())
    session.committed = [9]
    trial.begin(0, DraftTree((5,), (0,), (-0.1,), (1,)), 0.1)
    lessons = Lessons(session, controller, Rounds(0), Placement("auto", able=True), trial)
    told = lessons.learn(Decided(cause, 0, 2, 1, 0.01, sharing=8), 0.1)
    assert controller.heard[0] is told
    assert [outcome.sharing for outcome in controller.heard] == [8] * (2 if cause is Cause.PUSHED else 1)
