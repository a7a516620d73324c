"""The engine for other releases of vLLM chooses as the transformers engine does, greedily and sampled."""

from __future__ import annotations

import random

import pytest

from moa_runtime.session.sampling import Sampling
from moa_runtime.session.tree import chain
from moa_server.cli import main
from moa_server.engine import StepRequest, new_sequence
from server.stepping import plain, step
from vllm_engine.paged import CONTEXT


@pytest.fixture(scope="module")
def stateless(paged_target):
    from moa_server.vllm_engine.stateless import StatelessVllmEngine

    engine = StatelessVllmEngine.load(str(paged_target), max_context=CONTEXT, cache_tokens=1024)
    yield engine
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 0.95, 3)], ids=["greedy", "sampled"])
def test_drafts_of_any_quality_change_nothing(stateless, reference, sampling):
    prompt = [random.Random(2).randrange(3, 512) for _ in range(30)]
    expected = plain(reference, prompt, sampling, 50)
    rng, number, at = random.Random(3), new_sequence(), 0
    while at < len(expected):
        right = expected[at : at + rng.choice((0, 1, 4, 8))]
        draft = [token if rng.random() < 0.8 else 3 for token in right]
        text = [*prompt, *expected[:at]]
        for _ in range(2):  # the second time the draft itself is in vLLM's cache
            outcome = step(stateless, StepRequest(number, text, draft, chain(len(draft)), sampling))
            found = [*(draft[index] for index in outcome.path), outcome.token]
            assert found == expected[at : at + len(found)] or at + len(found) > len(expected)
            assert stateless.held(number, [*text, *found]) == len(text) + len(outcome.path)
        at += len(found)
    stateless.release(number)
    assert stateless.cache_use == (0, 1024)


def test_it_gives_no_memory_rows(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("moa_server.vllm_engine.environment.prepare", lambda *_, **__: None)
    assert main(["--engine", "vllm-stateless", "--drafter", str(tmp_path), "--port", "0"]) == 2
    assert "gives no memory rows: leave out --drafter" in capsys.readouterr().err
