"""Each sequence's results are the same to the bit whatever else is in its steps, and in which pieces it comes."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from moa_drafter.target import load_target
from moa_drafter.target_source import DEFAULT_TARGET
from moa_runtime.session.events import Sampling
from moa_server.engine import attention, fused_llama, torch_engine
from moa_server.engine import engine as engine_module
from moa_server.engine.base import StepRequest, new_sequence
from moa_server.engine.fused_llama import FusedLlama, padded
from moa_server.engine.general_pass import GeneralPass
from moa_server.engine.invariance import is_invariant
from moa_server.engine.torch_engine import load_torch_engine
from support.server.stepping import plain, random_tree, step

SAMPLINGS = [Sampling(), Sampling(1.0, 0.95, 7)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def invariant(request, tiny_target, tiny_drafter):
    """An engine that promises equality to the bit."""
    torch.set_num_threads(1)
    engine = load_torch_engine(str(tiny_target), tiny_drafter, dtype=request.param)
    if not engine.target_pass.batch_invariant:
        if "AVX512" in torch.backends.cpu.get_cpu_capability():
            pytest.fail("equality to the bit was lost on an x86 processor with AVX-512")
        pytest.skip("this processor's products depend on the rows beside")
    return engine


def texts(count: int, *, longest: int = 150) -> list[list[int]]:
    rng = random.Random(17)
    return [[rng.randrange(3, 512) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def state_of(engine, number, tokens):
    """Keys and values of all tokens of a sequence that holds them."""
    assert engine.held(number, tokens) == len(tokens)
    cache = engine._sequences._states[number].cache
    return cache.read(range(cache.shape.layers), 0, len(tokens))


def alone(engine, tokens, sampling, count):
    """What is written behind ``tokens`` one by one, and the keys and values of all of it."""
    number, tokens = new_sequence(), list(tokens)
    for _ in range(count):
        tokens.append(step(engine, StepRequest(number, tokens, sampling=sampling)).token)
    step(engine, StepRequest(number, tokens))
    return tokens, state_of(engine, number, tokens)


@pytest.mark.parametrize("seed", range(3))
def test_any_neighbours_pieces_and_drafts_give_the_same_bits(invariant, seed, monkeypatch):
    rng, prompts = random.Random(seed), texts(5)
    samplings = [rng.choice(SAMPLINGS) for _ in prompts]
    assert_same_beside_others(invariant, rng, prompts, samplings, 30, monkeypatch)


def assert_same_beside_others(engine, rng, prompts, samplings, count, monkeypatch=None) -> None:
    """Write all texts at once with drafts of any quality, with ``monkeypatch`` in pieces of any size too."""
    expected = [alone(engine, text, sampling, count) for text, sampling in zip(prompts, samplings, strict=True)]
    numbers, written = [new_sequence() for _ in prompts], [list(text) for text in prompts]
    while chosen := [i for i, text in enumerate(written) if len(text) < len(expected[i][0])]:
        if monkeypatch is not None:
            monkeypatch.setattr(engine_module, "CHUNK", rng.choice([16, 50, 512]))
            chosen = rng.sample(chosen, rng.randint(1, len(chosen)))
        requests = []
        for i in chosen:
            held = engine.held(numbers[i], written[i])
            if monkeypatch is not None and rng.random() < 0.2:
                engine.release(numbers[i])
            if monkeypatch is not None and held < len(written[i]) - 1 and rng.random() < 0.5:  # a piece of prefill
                requests.append(StepRequest(numbers[i], written[i][: rng.randint(held + 1, len(written[i]))]))
                continue
            draft, parents = draft_around(rng, expected[i][0][len(written[i]) :])
            requests.append(StepRequest(numbers[i], written[i], draft, parents, samplings[i]))
        for i, request, outcome in zip(chosen, requests, asyncio.run(engine.step(requests)), strict=True):
            if outcome.token is not None:
                written[i] += [*(request.draft[index] for index in outcome.path), outcome.token]
    for number, text, (tokens, state) in zip(numbers, written, expected, strict=True):
        assert text[: len(tokens)] == tokens
        step(engine, StepRequest(number, tokens))
        assert torch.equal(state_of(engine, number, tokens), state)


def draft_around(rng: random.Random, right: list[int]) -> tuple[list[int], list[int]]:
    """A chain or a tree in which some path is right for a while."""
    size = rng.choice([0, 1, 3, 12, 40])
    if rng.random() < 0.4:
        draft = [token if rng.random() < 0.9 else 5 for token in right[:size]]
        return draft, list(range(len(draft)))
    draft, parents = random_tree(rng, size)
    node = 0
    for token, index in zip(right, sorted(rng.sample(range(size), size // 2)), strict=False):
        draft[index], parents[index], node = token, node, index + 1
    return draft, parents


def test_a_small_cache_evicts_the_least_recently_used_and_changes_no_text(tiny_target, tiny_drafter):
    small = load_torch_engine(str(tiny_target), tiny_drafter, max_context=128, cache_tokens=64)
    large = load_torch_engine(str(tiny_target), tiny_drafter)
    used, bound = small.cache_use
    assert (used, bound) == (0, 256)  # a whole context and a draft fit in any case
    for number, count in ((1, 40), (2, 40), (1, 41), (3, 40)):
        step(small, StepRequest(number, [5] * count))
    assert [small.held(number, [5] * 40) for number in (1, 2)] == [40, 0]
    for number in (1, 3):
        small.release(number)
    assert small.cache_use == (0, 256)
    prompts = texts(6, longest=70)
    expected = [plain(large, text, SAMPLINGS[1], 20) for text in prompts]
    numbers, written = range(6), [list(text) for text in prompts]
    evictions = 0
    for _ in range(20):
        requests = [StepRequest(n, text, sampling=SAMPLINGS[1]) for n, text in zip(numbers, written, strict=True)]
        for text, outcome in zip(written, asyncio.run(small.step(requests)), strict=True):
            text.append(outcome.token)
        assert small.cache_use[0] <= bound
        evictions += sum(small.held(number, text) == 0 for number, text in zip(numbers, written, strict=True))
    assert evictions
    assert [text[len(prompt) :] for text, prompt in zip(written, prompts, strict=True)] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_the_pass_has_twice_can_be_released(tiny_target, dtype):
    keeps, released = (
        load_torch_engine(str(tiny_target), None, dtype=dtype, release_weights=release) for release in (False, True)
    )
    assert all(parameter.numel() == 0 for parameter in released.target.layers[0].parameters())
    text = texts(1)[0]
    assert plain(released, text, SAMPLINGS[0], 8) == plain(keeps, text, SAMPLINGS[0], 8)


def test_the_general_pass_chooses_the_same_and_gives_the_same_rows(
    engine, tiny_target, tiny_drafter, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, logger="moa_server")
    monkeypatch.setattr(torch_engine, "misfit", lambda target: "a test wants it")
    general, rng = load_torch_engine(str(tiny_target), tiny_drafter), random.Random(2)
    assert "a test wants it" in caplog.text
    assert isinstance(general.target_pass, GeneralPass) and not general.target_pass.batch_invariant
    for text in texts(3):
        tokens = plain(engine, text, SAMPLINGS[0], 30)
        assert plain(general, text, SAMPLINGS[0], 30) == tokens
        number, written = new_sequence(), list(text)
        while len(written) < len(text) + 30:
            draft, parents = draft_around(rng, tokens[len(written) - len(text) :])
            outcome = step(general, StepRequest(number, written, draft, parents, SAMPLINGS[0]))
            written += [*(draft[index] for index in outcome.path), outcome.token]
        assert written[len(text) : len(text) + 30] == tokens
        rows, expected = (step(each, StepRequest(new_sequence(), text, rows_from=0)).rows for each in (general, engine))
        for half in ("keys", "values"):
            np.testing.assert_allclose(getattr(rows, half), getattr(expected, half), rtol=1e-3, atol=2e-4)


def test_a_pass_that_disagrees_with_transformers_is_not_used(tiny_target, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="moa_server")
    rotation = FusedLlama._rotation
    monkeypatch.setattr(FusedLlama, "_rotation", lambda self, positions: rotation(self, 2 * positions))
    engine = load_torch_engine(str(tiny_target), None)
    assert isinstance(engine.target_pass, GeneralPass) and caplog.text


def test_a_pass_whose_bits_depend_on_neighbours_is_found_out(tiny_target, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="moa_server")
    target = load_target(str(tiny_target))
    fused = FusedLlama(target, torch.float32)
    forward = FusedLlama.forward

    def shaken(self, pieces):
        hidden, count = forward(self, pieces)
        return hidden * (1 + 1e-6 * (len(hidden) > 64)), count

    monkeypatch.setattr(FusedLlama, "forward", shaken)
    assert not is_invariant(fused, 512, 512)
    engine = load_torch_engine(str(tiny_target), None)
    assert not engine.target_pass.batch_invariant and caplog.text


def test_keys_of_a_tree_are_added_by_position_not_by_slot(tiny_target, monkeypatch, invariant):
    """Otherwise the check finds a tree at the edge of a block."""
    fused = FusedLlama(load_target(str(tiny_target)), torch.float32)
    assert is_invariant(fused, 512, 512)
    monkeypatch.setattr(attention, "depths", lambda parents: [1] * len(parents))
    assert not is_invariant(fused, 512, 512)


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({"hidden_act": "gelu"}, False),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, False),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, True),
        ({"attention_bias": True, "mlp_bias": True}, True),
        ({"num_key_value_heads": 4}, True),
        ({"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}, True),
    ],
)
def test_kinds_of_llamas_are_computed_as_transformers_does_or_do_not_fit(change, fits, tmp_path):
    target = other_target(tmp_path, **change)
    assert (fused_llama.misfit(target) is None) == fits
    assert not fits or torch_engine.deviation(FusedLlama(target, torch.float32), target) < 1e-4


def other_target(folder: Path, **change):
    """A random Llama of another build; only its model is there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from moa_drafter.target import Target

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256}
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **change})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return Target(folder, model, None, "")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_target_at_a_context_of_five_hundred(dtype):
    engine = load_torch_engine(DEFAULT_TARGET, None, dtype=dtype)
    if not engine.target_pass.batch_invariant:
        pytest.skip("this processor's products depend on the rows beside")
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 40_000) for _ in range(size)] for size in (500, 380, 60)]
    assert_same_beside_others(engine, rng, prompts, [Sampling()] * 3, 14)


def test_products_are_computed_with_few_numbers_of_rows():
    sizes = {padded(rows) for rows in range(1, 513)}
    assert len(sizes) <= 40 and (padded(1), padded(70), padded(129)) == (4, 72, 160)
