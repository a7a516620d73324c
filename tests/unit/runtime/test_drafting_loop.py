"""Outcomes that the drafting loop gives its controller; all else: tests/vectors (``loop/walks``)."""

from __future__ import annotations

import pytest

from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.events import Pushed, RoundEnded, Wait
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Cause, Decided
from moa_runtime.session.tree import DraftTree
from support.toy_engine import PRINTS


class Recorder:
    """Keeps its outcomes. Implements :class:`moa_runtime.drafting.draft_controllers.Controller`."""

    token_s = 0.0

    def __init__(self) -> None:
        self.outcomes: list[RoundEnded | Pushed] = []

    def budget(self) -> Budget:
        return Budget.chain(6)

    def ahead(self, drafted: int, probability: float) -> bool:
        return False

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        self.outcomes.append(outcome)


@pytest.mark.parametrize("cause", [Cause.ASKED, Cause.PUSHED])
def test_each_outcome_has_the_number_of_sessions_that_share_the_target(cause: Cause) -> None:
    controller = Recorder()
    session = ClientSession(PRINTS, stop_tokens=())
    session.committed = [9]
    loop = DraftingLoop(session, None, controller)
    loop._shadow.begin(0, DraftTree((5,), (0,), (-0.1,), (1,)), 0.1)
    told = loop._record_outcome(Decided(cause, 0, 2, 1, 0.01, sharing=8), 0.1)
    assert controller.outcomes[0] is told
    assert [outcome.sharing for outcome in controller.outcomes] == [8] * (2 if cause is Cause.PUSHED else 1)
    assert isinstance(loop.next(0.0), Wait)
