"""What the driver tells its controller, and what it sends because of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moa_bench.serving import OracleDrafter
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.drafters.base import GREEDY, Budget
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.draft_controllers import Controller, FixedShape
from moa_runtime.drafting.events import Pushed, RoundEnded
from moa_runtime.events import AnswerFinished, AnswerUpdate, ChatEvent, Paused, PauseReason
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree
from support.server.running import Verifier
from support.system.asking import QUICK, ask, committed, endpoint, own_decoding

COUNT = 24


class Prophet(OracleDrafter):
    """Knows the answer to one prompt, says of each of its tokens that it is right with probability 0.8, and knows some
    tokens besides those it is asked for."""

    def __init__(self, prompt_length: int, answer: Sequence[int], known_besides: int) -> None:
        super().__init__(prompt_length, answer)
        self.known_besides = known_besides
        self.budgets: list[Budget] = []

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        self.budgets.append(budget)
        longer = replace(budget, levels=budget.levels + self.known_besides)
        right = super().propose(prefix, longer).tokens
        steps = [1] * min(len(right), budget.levels)
        return DraftTree.chain(right, [math.log(0.8)] * len(right), steps)


@dataclass
class Watched:
    """Remembers what another controller was told."""

    controller: Controller
    outcomes: list[RoundEnded] = field(default_factory=list)

    def budget(self) -> Budget:
        return self.controller.budget()

    def ahead(self, drafted: int, probability: float) -> bool:
        return self.controller.ahead(drafted, probability)

    @property
    def token_s(self) -> float:
        return self.controller.token_s

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        self.controller.observe(outcome)
        if isinstance(outcome, RoundEnded) and not outcome.supplied:
            self.outcomes.append(outcome)


class Steady(Watched):
    """Tells times that are the same on every machine: steps that take next to nothing beside a pass."""

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        assert isinstance(outcome, RoundEnded)  # the server does not go on by itself here
        super().observe(replace(outcome, draft_s=1e-4 * len(outcome.steps), waited_s=0.025, compute_s=0.02))


def answered(
    verifier: Verifier, bundle: Bundle, controller: Controller, known_besides: int
) -> tuple[AnswerFinished, list[int]]:
    """An answer that was drafted by a :class:`Prophet`, and the target's own."""

    async def run() -> tuple[AnswerFinished, list[int]]:
        async with Chat(bundle, endpoint(verifier), drafter=None, settings=QUICK) as chat:
            await chat.open()
            alone = await ask(chat, count=COUNT)
            prompt_length = len(chat.tokens) - len(alone.tokens)
        own = own_decoding(verifier, chat, alone, COUNT, Sampling())
        drafter = Prophet(prompt_length, own, known_besides)
        async with Chat(bundle, endpoint(verifier), drafter=drafter, controller=controller, settings=QUICK) as chat:
            await chat.open()
            return await ask(chat, count=COUNT), own

    return asyncio.run(run())


def test_the_controller_hears_of_each_round(verifier: Verifier, bundle: Bundle) -> None:
    controller = Watched(FixedShape(Budget.chain(3)))
    answer, own = answered(verifier, bundle, controller, known_besides=0)
    assert [token.token for token in answer.tokens] == own and len(own) == COUNT
    # One token comes with the prompt's verdict, four with each round, and the last round has only three to bring.
    found = [(o.drafted, o.depth, o.accepted, o.steps) for o in controller.outcomes]
    assert found == [(3, 3, 3, (1, 1, 1))] * 5 + [(3, 3, 3, (1, 1, 1))]
    assert all(outcome.draft_s > 0 and outcome.waited_s >= outcome.compute_s > 0 for outcome in controller.outcomes)


def test_what_is_known_without_a_step_goes_with_the_draft(verifier: Verifier, bundle: Bundle) -> None:
    """Three drafted tokens and four more; the last draft is as long as the answer may still be."""
    controller = Watched(FixedShape(Budget.chain(3)))
    answer, own = answered(verifier, bundle, controller, known_besides=4)
    assert [token.token for token in answer.tokens] == own
    # One token comes with the prompt's verdict, eight with each of the first rounds.
    found = [(o.drafted, o.accepted, o.steps) for o in controller.outcomes]
    assert found == [(7, 7, (1, 1, 1)), (7, 7, (1, 1, 1)), (7, 7, (1, 1, 1))]
    assert answer.statistics.drafted == 21


def test_as_large_as_pays(verifier: Verifier, bundle: Bundle) -> None:
    """The default: right drafts, which cost next to nothing, become longer than the first."""
    controller = Steady(CostModel())
    answer, own = answered(verifier, bundle, controller, known_besides=0)
    assert [token.token for token in answer.tokens] == own
    # Every round but the last, which may end with the answer, brings a token of the target's own besides.
    drafted = sum(outcome.accepted for outcome in controller.outcomes)
    assert drafted + len(controller.outcomes) - (COUNT - 1) in (0, 1)
    assert max(outcome.drafted for outcome in controller.outcomes) > 6


def test_what_is_written_alone_is_not_lengthened(verifier: Verifier, bundle: Bundle) -> None:
    """It stops at its limit, although the drafter knows more."""
    limit = 3
    tentative: list[int] = []

    async def run() -> None:
        async with Chat(bundle, endpoint(verifier), drafter=None, settings=QUICK) as chat:
            await chat.open()
            alone = await ask(chat, count=COUNT)
        own = own_decoding(verifier, chat, alone, COUNT, Sampling())
        drafter = Prophet(len(chat.tokens) - len(alone.tokens), own, known_besides=0)
        settings = replace(QUICK, offline_limit=limit)
        controller = FixedShape(Budget.chain(3))
        async with Chat(bundle, endpoint(verifier), drafter=drafter, controller=controller, settings=settings) as chat:
            await chat.open()
            outage: list[asyncio.Task[None]] = []

            async def begin() -> None:
                leaving = asyncio.create_task(chat.work_offline(True))
                await asyncio.sleep(0)
                drafter.known_besides = 4  # from here on nothing is drafted that a verdict could follow
                await leaving

            async def end() -> None:
                drafter.known_besides = 0
                await chat.work_offline(False)

            def watch(event: ChatEvent) -> None:
                if isinstance(event, AnswerUpdate):
                    tentative.append(len(event.tokens) - committed(event))
                    if committed(event) and not outage:
                        outage.append(asyncio.create_task(begin()))
                elif isinstance(event, Paused):
                    assert event.reason is PauseReason.LIMIT
                    outage.append(asyncio.create_task(end()))

            answer = await ask(chat, count=COUNT, watch=watch)
            assert [token.token for token in answer.tokens] == own
            assert len(outage) == 2

    asyncio.run(run())
    assert max(tentative) == limit
