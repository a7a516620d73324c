"""A verifier with vLLM behind it, and the runtime's client: whoever drafts, the text is the target's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from moa_chat.local_verifier import local_verifier
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.events import AnswerFinished
from moa_runtime.options import DRAFTINGS, Drafting, LoopSettings
from moa_runtime.session.events import Sampling
from moa_runtime.transport import Endpoint, Timing
from moa_server.engine.baseline import decode
from support.server.running import Verifier, serving
from support.system.asking import ask, chatting, endpoint, ids, own_decoding

pytestmark = pytest.mark.slow

COUNT = 24
SAMPLINGS = (Sampling(), Sampling(1.2, 0.98, 5))
OPTIONS = {"timing": Timing(first_backoff=0.05)}


@pytest.fixture(scope="module")
def bundle(paged_bundle: Path) -> Bundle:
    return Bundle.open(paged_bundle)


@pytest.fixture(scope="module")
def verifier(vllm) -> Iterator[Verifier]:
    from moa_server.drafting.server_drafting import ServerDrafting
    from moa_server.engine.load import drafting_backend
    from moa_server.settings import Settings

    served = Settings(token="secret")
    backend = drafting_backend(vllm)
    assert backend is not None, "the verifier has a drafter, and the target's ends for it"
    drafts = ServerDrafting(backend, served.limits(vllm.max_context, vllm.capabilities), vllm.stop_tokens)
    with serving(vllm, served, drafts=drafts, warm=True) as running:
        yield running


class Asked:
    """Conversations, and then what the transformers engine writes after their prompts."""

    def __init__(self) -> None:
        self.answers: list[tuple[list[int], list[int], Sampling, int]] = []

    def took(self, chat: Chat, answer: AnswerFinished, sampling: Sampling, count: int) -> None:
        self.answers.append((chat.tokens[: -len(answer.tokens)], ids(answer), sampling, count))

    def assert_written_by(self, reference) -> None:
        assert self.answers
        for prompt, written, sampling, count in self.answers:
            assert written == [token.token for token in decode(reference, prompt, sampling, count)]


def settings(drafting: Drafting) -> LoopSettings:
    """A busy machine is no outage."""
    return LoopSettings(late_after_s=60.0, prefill_late_after_s=60.0, drafting=drafting)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_the_text_is_the_target_s_whoever_drafts(verifier, bundle, reference, drafting, sampling):
    asked = Asked()

    async def run() -> None:
        # Trees are asked for, and chains are sent: this verifier takes nothing else.
        shape = FixedShape(Budget(8, 4, branches=True))
        options = {"settings": settings(drafting), "controller": shape, **OPTIONS}
        async with chatting(bundle, endpoint(verifier), **options) as chat:
            for _ in range(2):
                answer = await ask(chat, count=COUNT, sampling=sampling)
                asked.took(chat, answer, sampling, COUNT)
                assert ids(answer) == own_decoding(verifier, chat, answer, COUNT, sampling)
            assert drafting != "device" or answer.statistics.rounds > 0

    asyncio.run(run())
    asked.assert_written_by(reference)
    can = verifier.http("GET", "/v1/status").json()["capabilities"]
    assert (can["trees"], can["max_draft_tokens"], can["row_states"]) == (False, 128, ["keys_values", "inner_hidden"])


def test_many_at_once_whose_caches_do_not_fit(verifier, bundle, reference):
    """Eight conversations of up to three blocks each in eight blocks: they give way in turns."""
    asked = Asked()

    async def one(number: int) -> None:
        sampling = Sampling(0.9, 0.95, number)
        async with chatting(bundle, endpoint(verifier), settings=settings("server"), **OPTIONS) as chat:
            asked.took(chat, await ask(chat, f"What is {number}?", count=40, sampling=sampling), sampling, 40)

    async def every() -> None:
        await asyncio.gather(*map(one, range(8)))

    asyncio.run(every())
    asked.assert_written_by(reference)


def test_the_program_serves(paged_target, paged_drafter, bundle, reference):
    options = ["--engine", "vllm", "--model", str(paged_target), "--drafter", str(paged_drafter), "--threads", "1"]
    asked = Asked()

    async def run(where: Endpoint) -> None:
        async with chatting(bundle, where, settings=settings("auto"), **OPTIONS) as chat:
            asked.took(chat, await ask(chat, count=COUNT), Sampling(), COUNT)

    with local_verifier([*options, "--cache-tokens", "1024"]) as running:
        asyncio.run(run(running.endpoint))
    asked.assert_written_by(reference)
