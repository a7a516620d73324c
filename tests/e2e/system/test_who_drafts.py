"""Whoever drafts, the device or the server, with a drafter or without: the text is the target's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.events import Origin
from moa_runtime.options import DRAFTINGS, Drafting, LoopSettings
from moa_runtime.session.events import Sampling, Welcomed
from moa_runtime.transport import Endpoint, Timing
from moa_server.drafting.server_drafting import ServerDrafting
from moa_server.engine.load import drafting_backend
from moa_server.scheduling.draft_choice import DraftGain
from moa_server.settings import Settings
from support.chat.programs import TOKEN
from support.chat.programs import verifier as moa_serve
from support.server.running import Verifier, serving
from support.system.asking import ask, chatting, endpoint, ids, own_decoding

COUNT = 48
SETTINGS = Settings(token="secret")
TREES = Budget(16, 4, branches=True)
# Of a target and a drafter that are both random, the luck is what they have in common.
SAMPLINGS = [Sampling(), Sampling(2.0, 0.98, 5)]


@pytest.fixture(scope="module", params=[True, False], ids=["with drafts", "--no-drafts"])
def drafts(request: pytest.FixtureRequest) -> bool:
    """Whether the server drafts too."""
    return bool(request.param)


@pytest.fixture(scope="module")
def verifier(engine, drafts: bool) -> Iterator[Verifier]:
    limits = SETTINGS.limits(engine.max_context, engine.capabilities)
    made = ServerDrafting(drafting_backend(engine), limits, engine.stop_tokens) if drafts else None
    with serving(engine, SETTINGS, drafts=made) as running, pytest.MonkeyPatch.context() as patch:
        # Drafts cost nothing beside steps, whatever this machine takes, and are verified however little they bring.
        patch.setattr(running.parts.worker.cost, "curve", lambda tokens, *_: np.ones(np.shape(tokens)))
        patch.setattr(DraftGain, "least", lambda *_, **__: 0.0)
        yield running


def options(drafting: Drafting) -> dict[str, Any]:
    settings = LoopSettings(offline_limit=40, outage_after_s=0.0, drafting=drafting)
    # A busy machine may be late with a pong, and that is no outage here.
    return {"settings": settings, "controller": FixedShape(TREES), "timing": Timing(first_backoff=0.05)}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafting", DRAFTINGS)
async def test_the_text_is_the_target_s_whoever_drafts(verifier, bundle, drafts, drafting, sampling):
    async with chatting(bundle, endpoint(verifier), **options(drafting)) as chat:
        for number in range(2):
            answer = await ask(chat, count=COUNT, sampling=sampling)
            assert ids(answer) == own_decoding(verifier, chat, answer, COUNT, sampling)
            figures = answer.statistics
            assert figures.fetched == figures.reconnects == 0
            assert figures.server_accepted <= figures.server_drafted
            if drafting == "device":
                assert figures.drafted and not figures.pushed and not figures.server_drafted
                assert not figures.streamed
            elif drafting == "server" or number == 0:  # auto begins there, and may find the device faster
                assert figures.pushed > 0 and bool(figures.server_drafted) == drafts
            if drafting == "server":
                # The prompt's verdict is asked for, and brings one token; all others are pushed.
                assert figures.pushed == figures.tokens - 1 and not figures.drafted
                assert figures.server_accepted == figures.tokens - figures.rounds
                assert figures.streamed and len(figures.round_trips) == figures.rounds
                origins = {token.origin for token in answer.tokens}
                assert origins == {Origin.CORRECTED}


async def test_a_memory_row_is_made_once_for_the_device_and_the_verifier(verifier, bundle, memory_rows, monkeypatch):
    made: list[int] = []
    step = verifier.parts.engine.step

    async def noting(requests: Any) -> Any:
        outcomes = await step(requests)
        made.extend(at for each in outcomes if each.rows is not None for at in range(each.rows.start, each.rows.stop))
        return outcomes

    monkeypatch.setattr(verifier.parts.engine, "step", noting)
    async with chatting(bundle, endpoint(verifier), **options("server")) as chat:
        await ask(chat, count=COUNT)
    assert len(made) == len(set(made)) >= COUNT


@pytest.mark.parametrize("option", [(), ("--no-drafts",)], ids=["drafts", "--no-drafts"])
async def test_a_verifier_says_whether_it_drafts(bundle, tiny_target, tiny_drafter, option):
    welcomes: list[Welcomed] = []
    with moa_serve(tiny_target, tiny_drafter, options=option) as process:
        where = Endpoint(f"ws://127.0.0.1:{process.port}", TOKEN)
        async with chatting(bundle, where, **options("server"), wait=False) as chat:
            chat._loop.listen(lambda event: welcomes.append(event) if isinstance(event, Welcomed) else None)
            figures = (await ask(chat, count=COUNT)).statistics
    assert [welcome.drafts for welcome in welcomes] == [not option]
    assert not (figures.server_drafted and option) and figures.pushed == figures.tokens - 1
