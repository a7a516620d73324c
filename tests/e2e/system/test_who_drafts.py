"""Whoever drafts, the device or the server, with a drafter or without: the text is the target's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.system.test_chat_processes import ServeProcess
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.events import ChatEvent, Origin
from moa_runtime.options import DRAFTINGS, Drafting, LoopSettings
from moa_runtime.session.events import Policy, Sampling, Welcomed
from moa_runtime.transport import Endpoint, Timing
from moa_server.drafting.batched_model import backend_of
from moa_server.drafting.server_drafting import ServerDrafting
from moa_server.settings import Settings
from support.server.running import Verifier, serving
from support.system.asking import ask, chatting, committed, endpoint, ids, own_decoding, written_offline

COUNT = 80
SETTINGS = Settings(token="secret")
TREES = Budget(16, 4, branches=True)
# Of a target and a drafter that are both random, the luck is what they have in common.
SAMPLINGS = [Sampling(), Sampling(2.0, 0.98, 5)]


class Always(FixedShape):
    """Drafts whatever that costs on this machine."""

    def sibling(self) -> Always:
        return self


@pytest.fixture(scope="module", params=[True, False], ids=["with drafts", "--no-drafts"])
def drafts(request: pytest.FixtureRequest) -> bool:
    """Whether the server drafts too."""
    return bool(request.param)


@pytest.fixture(scope="module")
def verifier(engine, drafts: bool) -> Iterator[Verifier]:
    limits = SETTINGS.limits(engine.max_context, engine.capabilities)
    made = ServerDrafting(backend_of(engine), limits, engine.stop_tokens) if drafts else None
    if made is not None:
        made._known = Always(TREES)  # type: ignore[assignment]
    with serving(engine, SETTINGS, drafts=made) as running:
        yield running


def options(drafting: Drafting) -> dict[str, Any]:
    settings = LoopSettings(offline_limit=40, outage_after_s=0.0, drafting=drafting)
    # A busy machine may be late with a pong, and that is no outage here.
    return {"settings": settings, "controller": Always(TREES), "timing": Timing(first_backoff=0.05)}


class Turns:
    """Changes who drafts each time so many tokens more are confirmed."""

    def __init__(self, chat: Chat, every: int) -> None:
        self._chat, self._every, self.done = chat, every, 0

    def __call__(self, event: ChatEvent) -> None:
        if committed(event) >= (self.done + 1) * self._every:
            self.done += 1
            self._chat._driver.post(self._turn)

    def _turn(self) -> None:
        placement = self._chat._loop._selection
        placement._server = not placement._server


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_the_text_is_the_target_s_whoever_drafts(
    verifier: Verifier, bundle: Bundle, drafts: bool, drafting: Drafting, sampling: Sampling
) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier), **options(drafting)) as chat:
            for number in range(2):
                answer = await ask(chat, count=COUNT, sampling=sampling)
                assert ids(answer) == own_decoding(verifier, chat, answer, COUNT, sampling)
                figures = answer.statistics
                assert figures.fetched == figures.reconnects == 0
                assert figures.server_accepted <= figures.server_drafted
                if drafting == "device":
                    assert figures.drafted and not figures.pushed and not figures.server_drafted
                    assert not figures.server_drafts
                elif drafting == "server" or number == 0:  # auto begins there, and may find the device faster
                    assert figures.pushed > 0 and bool(figures.server_drafted) == drafts
                if drafting == "server":
                    # The prompt's verdict is asked for, and brings one token; all others are pushed.
                    assert figures.pushed == figures.tokens - 1 and not figures.drafted
                    assert figures.server_accepted == figures.tokens - figures.rounds
                    assert figures.server_drafts and len(figures.round_trips) == figures.rounds
                    origins = {token.origin for token in answer.tokens}
                    assert origins == {Origin.CORRECTED}

    asyncio.run(run())


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("first", ["device", "server"])
def test_taken_over_and_lent_again_in_the_middle_of_an_answer(
    verifier: Verifier, bundle: Bundle, drafts: bool, first: Drafting, sampling: Sampling
) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier), **options(first)) as chat:
            turns = Turns(chat, 12)
            answer = await ask(chat, count=COUNT, sampling=sampling, watch=turns)
            assert ids(answer) == own_decoding(verifier, chat, answer, COUNT, sampling)
            figures = answer.statistics
            if figures.tokens > 40:
                assert turns.done >= 3 and figures.drafted > 0 and 0 < figures.pushed < figures.tokens
            assert bool(figures.server_drafted) == drafts and figures.fetched == 0
            # The next answer too, with the rows that came on the way.
            again = await ask(chat, "And why?", count=COUNT, sampling=sampling)
            assert ids(again) == own_decoding(verifier, chat, again, COUNT, sampling)

    asyncio.run(run())


@pytest.mark.parametrize("drafting", ["auto", "server"])
def test_a_device_that_goes_offline_while_the_server_streams_writes_on(
    verifier: Verifier, bundle: Bundle, drafting: Drafting
) -> None:
    """It has the memory rows by then, although it drafted nothing."""

    async def run() -> None:
        async with chatting(bundle, endpoint(verifier), **options(drafting), policy=Policy.ROLLBACK) as chat:
            doing: list[asyncio.Task[None]] = []
            most = 0

            def watch(event: ChatEvent) -> None:
                nonlocal most
                most = max(most, written_offline(event))
                if not doing and committed(event) >= 30:
                    doing.append(asyncio.create_task(chat.work_offline(True)))
                if len(doing) == 1 and most >= 8:
                    doing.append(asyncio.create_task(chat.work_offline(False)))

            answer = await ask(chat, count=200, watch=watch)
            assert ids(answer) == own_decoding(verifier, chat, answer, 200, Sampling())
            assert len(doing) == 2 and most >= 8 and answer.statistics.pushed > 0
            # What the verifier wrote on meanwhile was fetched, or the link was back before.
            assert answer.statistics.pushed + answer.statistics.fetched <= answer.statistics.tokens

    asyncio.run(run())


@pytest.mark.parametrize("option", ["", "--no-drafts"])
def test_a_verifier_says_whether_it_drafts(bundle: Bundle, tiny_target: Path, option: str) -> None:
    process = ServeProcess(tiny_target.parent, 0, *filter(None, [option]))

    async def run() -> None:
        where = Endpoint(f"ws://127.0.0.1:{process.port}")
        async with chatting(bundle, where, **options("server"), wait=False) as chat:
            welcomes: list[Welcomed] = []
            chat._loop.listen(lambda event: welcomes.append(event) if isinstance(event, Welcomed) else None)
            figures = (await ask(chat, count=COUNT)).statistics
            assert [welcome.drafts for welcome in welcomes] == [not option]
            assert not (figures.server_drafted and option) and figures.pushed == figures.tokens - 1

    try:
        asyncio.run(run())
    finally:
        process.kill()
