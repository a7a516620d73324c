"""Whoever drafts, the text is the same; and the statistics say who it was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from moa_runtime.answer import AnswerFinished
from moa_runtime.bundle import Bundle
from moa_runtime.drafting import DRAFTINGS, Drafting
from moa_runtime.errors import MoaError
from moa_runtime.loop_events import Pushed
from moa_runtime.loop_settings import LoopSettings
from moa_runtime.session.events import Sampling
from moa_server.server_drafts import ServerDrafts
from moa_server.settings import Settings
from moa_server.torch_backend import backend_of
from server.running import Verifier, serving
from system.asking import QUICK, ask, chatting, endpoint, own_decoding

SAMPLED = Sampling(2.0, 0.98, seed=7)  # hot: the target and the drafter are random, the luck is what they share
COUNT = 60


@pytest.fixture(scope="module", params=[True, False], ids=["server drafts", "server decodes"])
def either(request: pytest.FixtureRequest, engine) -> Iterator[Verifier]:
    from moa_runtime.session.handshake import Limits

    drafts = None
    if request.param:
        limits = Limits(max_context=engine.max_context)
        drafts = ServerDrafts(backend_of(engine), limits, engine.stop_tokens)
    with serving(engine, Settings(token="secret"), drafts=drafts) as running:
        yield running
    if drafts is not None:
        drafts.close()


def by(drafting: Drafting) -> LoopSettings:
    return replace(QUICK, drafting=drafting, late_after_s=20.0)


def ids(answer: AnswerFinished) -> list[int]:
    return [token.token for token in answer.tokens]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_same_whoever_drafts(either: Verifier, bundle: Bundle, sampling: Sampling) -> None:
    async def answered(drafting: Drafting) -> AnswerFinished:
        async with chatting(bundle, endpoint(either), settings=by(drafting)) as chat:
            answer = await ask(chat, count=COUNT, sampling=sampling)
            assert ids(answer) == own_decoding(either, chat, answer, COUNT, sampling)
            return answer

    answers = {drafting: asyncio.run(answered(drafting)) for drafting in DRAFTINGS}
    assert len({tuple(ids(answer)) for answer in answers.values()}) == 1
    device, server, auto = (answers[who].statistics for who in ("device", "server", "auto"))
    assert device.drafted > 0 == device.pushed == device.server_drafted
    assert server.drafted == 0 and server.pushed == server.tokens - 1  # the first is the prompt's
    assert auto.pushed > 0
    # A random drafter of a random target may not pay: then the server asks it no more.
    assert 0 <= server.server_accepted <= server.server_drafted
    assert server.rounds == server.tokens - server.server_accepted


def test_a_hand_over_in_the_middle_of_an_answer_loses_nothing(either: Verifier, bundle: Bundle) -> None:
    """The device takes over after a few tokens, and gives back after a few more, again and again."""

    async def run() -> None:
        async with chatting(bundle, endpoint(either), settings=by("auto")) as chat:
            placement, heard = chat._loop._placement, [0, 0]

            def swap(event: object) -> None:
                heard[isinstance(event, Pushed)] += 1
                placement._server = sum(heard) // 8 % 2 == 0

            chat._loop.listen(swap)
            for sampling in (Sampling(), SAMPLED):
                answer = await ask(chat, count=COUNT, sampling=sampling)
                assert ids(answer) == own_decoding(either, chat, answer, COUNT, sampling)
                assert 0 < answer.statistics.pushed < answer.statistics.tokens - 1

    asyncio.run(run())


def test_another_word_for_who_drafts_is_refused() -> None:
    with pytest.raises(MoaError, match="drafting must be one of auto, device, server, not 'phone'"):
        LoopSettings(drafting="phone")  # type: ignore[arg-type]
