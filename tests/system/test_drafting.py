"""What the driver tells its controller, and what it sends because of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from moa_bench.network.oracle import OracleDrafter
from moa_runtime.answer import AnswerFinished, AnswerUpdate, ChatEvent, Paused, PauseReason
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.control import Controller, RoundOutcome, Throughput
from moa_runtime.drafters.base import DraftToken
from moa_runtime.session.events import Sampling
from server.running import Verifier
from system.asking import QUICK, ask, committed, endpoint, own_decoding

COUNT = 24


class Prophet(OracleDrafter):
    """Knows the answer to one prompt, and says of each of its tokens that it is right with probability 0.8."""

    def __init__(self, prompt_length: int, answer: Sequence[int], known_besides: int) -> None:
        super().__init__(prompt_length, answer)
        self.known_besides = known_besides

    def draft(self, prefix, count) -> list[DraftToken]:
        return [DraftToken(known.token, math.log(0.8)) for known in super().draft(prefix, count)]

    def lengthen(self, prefix, logprob) -> list[DraftToken]:
        assert logprob == pytest.approx((len(prefix) - self.rows - 1) * math.log(0.8))  # of all behind the last verdict
        return super().draft(prefix, self.known_besides)


@dataclass
class ThreeTokens:
    """Stops when the draft is as unlikely as three tokens make it; remembers what it was told."""

    outcomes: list[RoundOutcome] = field(default_factory=list)

    def goes_on(self, drafted: int, logprob: float) -> bool:
        assert logprob == pytest.approx(drafted * math.log(0.8))
        return logprob > 2.5 * math.log(0.8)

    def ahead(self) -> int:
        return 0

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)


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


def test_a_draft_ends_where_its_probability_says_so(verifier: Verifier, bundle: Bundle) -> None:
    controller = ThreeTokens()
    answer, own = answered(verifier, bundle, controller, known_besides=0)
    assert [token.token for token in answer.tokens] == own and len(own) == COUNT
    assert [(o.drafted, o.accepted, o.steps) for o in controller.outcomes] == [(3, 3, 3)] * 6
    assert all(outcome.draft_s > 0 and outcome.round_trip_s > 0 for outcome in controller.outcomes)


def test_what_is_known_without_a_step_goes_with_the_draft(verifier: Verifier, bundle: Bundle) -> None:
    """Three drafted tokens and four more; the last draft is as long as the answer may still be."""
    controller = ThreeTokens()
    answer, own = answered(verifier, bundle, controller, known_besides=4)
    assert [token.token for token in answer.tokens] == own
    # One token comes with the prompt's verdict, eight with each of the first rounds.
    assert [(o.drafted, o.accepted, o.steps) for o in controller.outcomes] == [(7, 7, 3), (7, 7, 3), (7, 7, 3)]
    assert answer.statistics.drafted == 21


def test_as_long_as_pays(verifier: Verifier, bundle: Bundle) -> None:
    """The default: right drafts, which cost next to nothing here, become longer than the first."""

    outcomes: list[RoundOutcome] = []

    class Watched(Throughput):
        def observe(self, outcome: RoundOutcome) -> None:
            super().observe(outcome)
            outcomes.append(outcome)

    answer, own = answered(verifier, bundle, Watched(), known_besides=0)
    assert [token.token for token in answer.tokens] == own
    # 0.8 to the fifth, times the half that is right before anything is known, is above the price of a first draft.
    assert outcomes[0].drafted == 6
    # Every round but the last, which may end with the answer, brings a token of the target's own besides.
    assert sum(outcome.drafted for outcome in outcomes) - (COUNT - 1 - len(outcomes)) in (0, 1)


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
        controller = ThreeTokens()
        async with Chat(bundle, endpoint(verifier), drafter=drafter, controller=controller, settings=settings) as chat:
            await chat.open()
            outage: list[asyncio.Task[None]] = []

            async def begin() -> None:
                await chat.work_offline(True)
                drafter.known_besides = 4  # from here on nothing is drafted that a verdict could follow

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
