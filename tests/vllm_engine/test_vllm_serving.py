"""A verifier with vLLM behind it, and the runtime's client: whoever drafts, the text is the target's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from moa_chat.local import local_verifier
from moa_runtime.bundle import Bundle
from moa_runtime.control import FixedShape
from moa_runtime.drafters.base import Budget
from moa_runtime.loop_settings import LoopSettings
from moa_runtime.session.events import Sampling
from moa_runtime.transport import Timing
from moa_server.plain import decode
from server.running import Verifier, serving
from system.asking import ask, chatting, endpoint, ids, own_decoding
from tiny import make_tiny_bundle

pytestmark = pytest.mark.slow

COUNT = 24
SAMPLINGS = (Sampling(), Sampling(1.2, 0.98, 5))
OPTIONS = {"timing": Timing(first_backoff=0.05)}


@pytest.fixture(scope="module")
def bundle(paged_target: Path, paged_drafter: Path) -> Bundle:
    return Bundle.open(make_tiny_bundle(paged_target, paged_drafter, "none"))


@pytest.fixture(scope="module")
def verifier(vllm) -> Iterator[Verifier]:
    from moa_server.server_drafts import ServerDrafts
    from moa_server.settings import Settings
    from moa_server.torch_backend import backend_of

    settings = Settings(token="secret")
    backend = backend_of(vllm)
    assert backend is not None, "the verifier has a drafter, and the target's ends for it"
    drafts = ServerDrafts(backend, settings.limits(vllm.max_context, vllm.capabilities), vllm.stop_tokens)
    with serving(vllm, settings, drafts=drafts, warm=True) as running:
        yield running


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafting", ["device", "server", "auto"])
def test_the_text_is_the_target_s_whoever_drafts(verifier, bundle, reference, drafting, sampling):
    async def run() -> None:
        # Trees are asked for, and chains are sent: this verifier takes nothing else.
        shape = FixedShape(Budget(8, 4, branches=True))
        settings = LoopSettings(late_after_s=60.0, prefill_late_after_s=60.0, drafting=drafting)
        async with chatting(bundle, endpoint(verifier), settings=settings, controller=shape, **OPTIONS) as chat:
            for _ in range(2):
                answer = await ask(chat, count=COUNT, sampling=sampling)
                written = ids(answer)
                prompt = chat.tokens[: len(chat.tokens) - len(written)]
                expected = [token.token for token in decode(reference, prompt, sampling, COUNT)]
                assert written == expected == own_decoding(verifier, chat, answer, COUNT, sampling)
            assert drafting != "device" or answer.statistics.rounds > 0

    asyncio.run(run())


def test_a_verifier_says_what_it_can(verifier):
    can = verifier.http("GET", "/v1/status").json()["capabilities"]
    assert (can["trees"], can["max_draft_tokens"], can["row_states"]) == (False, 128, ["keys_values"])


def test_many_at_once_and_their_caches_do_not_fit(verifier, bundle, reference):
    """Eight conversations of up to three blocks each in eight blocks: they give way in turns."""

    async def one(number: int) -> None:
        settings = LoopSettings(late_after_s=60.0, prefill_late_after_s=60.0, drafting="server")
        async with chatting(bundle, endpoint(verifier), settings=settings, **OPTIONS) as chat:
            answer = await ask(chat, f"What is {number}?", count=40, sampling=Sampling(0.9, 0.95, number))
            written = ids(answer)
            prompt = chat.tokens[: len(chat.tokens) - len(written)]
            sampling = Sampling(0.9, 0.95, number)
            assert written == [token.token for token in decode(reference, prompt, sampling, 40)]

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(8)))

    asyncio.run(all_of_them())


def test_the_program_serves(paged_target, paged_drafter, bundle, reference):
    options = ["--engine", "vllm", "--model", str(paged_target), "--drafter", str(paged_drafter), "--threads", "1"]

    async def run(where) -> None:
        settings = LoopSettings(late_after_s=60.0, prefill_late_after_s=60.0)
        async with chatting(bundle, where, settings=settings) as chat:
            answer = await ask(chat, count=COUNT)
            written = ids(answer)
            prompt = chat.tokens[: len(chat.tokens) - len(written)]
            assert written == [token.token for token in decode(reference, prompt, Sampling(), COUNT)]

    with local_verifier([*options, "--cache-tokens", "1024"]) as running:
        asyncio.run(run(running.endpoint))
