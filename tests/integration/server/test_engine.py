"""The transformers engine on a tiny target: every way of verifying gives what plain decoding gives."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch

from moa_drafter.target_features import layer_keys_values, target_states
from moa_runtime.bundle import tokenizer_fingerprint
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import chain
from moa_server.engine import baseline
from moa_server.engine import engine as engine_module
from moa_server.engine.base import EngineError, StepRequest, new_sequence
from moa_server.engine.baseline import log_probabilities, next_logits
from moa_server.engine.torch_engine import load_torch_engine
from support.refusals import refused
from support.server.stepping import fresh_choices, plain, random_tree, step
from support.tiny import make_tiny_rival, make_tiny_target

PROMPT = tuple(random.Random(5).sample(range(3, 512), 21))
SAMPLINGS = [Sampling(), Sampling(1.0, 1.0, 1), Sampling(0.8, 0.9, 2), Sampling(2.0, 0.98, 3)]


def reference_rows(engine, tokens):
    with torch.no_grad():
        cache = engine.target.model.model(input_ids=torch.tensor([tokens]), use_cache=True).past_key_values
        kv = layer_keys_values(cache, engine.drafter.config.lsa_layers)
        return [part.numpy() for part in engine.drafter.memory_rows(kv, torch.arange(len(tokens)))]


def assert_rows(engine, rows, tokens, start) -> None:
    assert (rows.start, rows.stop) == (start, len(tokens))
    for own, reference in zip((rows.keys, rows.values), reference_rows(engine, tokens), strict=True):
        assert own.dtype == np.float32
        assert own.shape == (len(tokens) - start, *reference.shape[1:])
        np.testing.assert_allclose(own, reference[start:], atol=2e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_decoding_is_what_the_whole_model_would_choose(engine, sampling):
    from moa_server.engine.sampling import choose

    tokens = list(PROMPT)
    for token in plain(engine, PROMPT, sampling, 12):
        with torch.no_grad():
            logits = engine.target.model(torch.tensor([tokens])).logits[0, -1].numpy()
        assert token == choose(logits, sampling, len(tokens))
        tokens.append(token)


def test_a_step_leaves_the_event_loop_free(engine, monkeypatch):
    expected = plain(engine, PROMPT, Sampling(), 1)[0]

    async def both():
        loop, forward = asyncio.get_running_loop(), engine.target_pass.forward

        def waits_for_the_loop(pieces):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(30)
            return forward(pieces)

        monkeypatch.setattr(engine.target_pass, "forward", waits_for_the_loop)
        return (await engine.step([StepRequest(new_sequence(), PROMPT, sampling=Sampling())]))[0].token

    assert asyncio.run(both()) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_chain_is_verified_in_one_forward(engine, sampling):
    tokens = plain(engine, PROMPT, sampling, 24)
    draft = tokens[:-1]
    before = engine.forwards
    outcome = step(engine, StepRequest(new_sequence(), PROMPT, draft, (), sampling))  # without parents: a chain
    assert (outcome.path, outcome.token) == (tuple(range(len(draft))), tokens[-1])
    assert engine.forwards == before + 1


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("trees", [False, True])
def test_drafts_of_any_quality_change_nothing(engine, sampling, trees):
    """Losslessness: chains and trees with right and wrong tokens commit what plain decoding writes."""
    expected = [*PROMPT, *plain(engine, PROMPT, sampling, 40)]
    rng = random.Random(11)
    number, committed = new_sequence(), list(PROMPT)
    while len(committed) < len(expected):
        right = expected[len(committed) :]
        if trees:
            draft, parents = random_tree(rng, 8)
            spine = rng.sample(range(8), 4)
            node = 0
            for token, index in zip(right, sorted(spine), strict=False):  # some path is right
                draft[index], parents[index], node = token, node, index + 1
        else:
            draft = [token if rng.random() < 0.7 else rng.randrange(3, 512) for token in right[: rng.randint(0, 6)]]
            parents = chain(len(draft))
        outcome = step(engine, StepRequest(number, committed, draft, parents, sampling))
        committed += [draft[index] for index in outcome.path]
        assert engine.held(number, committed) == len(committed)
        committed.append(outcome.token)
    assert committed[: len(expected)] == expected


def right_tree(engine) -> tuple[list[int], list[int]]:
    """A tree whose path 1, 3, 4 is accepted after the prompt."""
    right = plain(engine, PROMPT, Sampling(), 3)
    return [3, right[0], 4, right[1], right[2]], [0, 0, 2, 2, 4]


def test_rows_after_a_tree_path_are_those_of_the_committed_tokens(engine):
    draft, parents = right_tree(engine)
    tokens = [*PROMPT, draft[1], draft[3], draft[4]]
    for start in (0, 18, 23):
        outcome = step(engine, StepRequest(new_sequence(), PROMPT, draft, parents, Sampling(), start))
        assert outcome.path == (1, 3, 4)
        assert_rows(engine, outcome.rows, tokens, start)


def test_a_tree_without_room_waits_for_the_next_forward(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "CHUNK", 6)
    draft, parents = right_tree(engine)
    number, before = new_sequence(), engine.forwards
    step(engine, StepRequest(number, PROMPT[:-2]))
    assert step(engine, StepRequest(number, PROMPT, draft, parents, Sampling())).path == (1, 3, 4)
    assert engine.forwards == before + 4 + 2


def test_rows_of_held_tokens_cost_no_forward_and_drop_nothing(engine):
    number = new_sequence()
    assert step(engine, StepRequest(number, PROMPT)).rows is None
    before = engine.forwards
    for length, start in ((len(PROMPT), 4), (9, 4), (len(PROMPT), len(PROMPT))):
        outcome = step(engine, StepRequest(number, PROMPT[:length], rows_from=start))
        assert (outcome.path, outcome.token) == ((), None)
        assert_rows(engine, outcome.rows, PROMPT[:length], start)
    assert engine.forwards == before and engine.held(number, PROMPT) == len(PROMPT)


def test_rows_of_several_sequences_are_made_together(engine, monkeypatch):
    monkeypatch.setattr("moa_server.engine.memory_rows.CHUNK", 8)  # chunks end within a sequence and at its end
    asked = {12: 0, 9: 9, 21: 2, 17: 16, 16: None}
    requests = [StepRequest(new_sequence(), PROMPT[:length], rows_from=start) for length, start in asked.items()]
    before = engine.forwards
    outcomes = engine.step_now(requests)
    assert engine.forwards == before + 1
    for request, outcome in zip(requests, outcomes, strict=True):
        if request.rows_from is None:
            assert outcome.rows is None
        else:
            assert_rows(engine, outcome.rows, request.prefix, request.rows_from)


def test_rows_of_features_follow_the_cache(tiny_target, tmp_path):
    engine = load_torch_engine(str(tiny_target), make_tiny_rival("eagle3", tiny_target, tmp_path))
    draft, parents = right_tree(engine)
    committed = [*PROMPT, draft[1], draft[3], draft[4]]
    found = [(step(engine, StepRequest(1, PROMPT, draft, parents, Sampling(), 0)).rows, committed)]
    for tokens in ([*PROMPT, 9, 8], [*PROMPT[:5], 7, 6], committed, committed):  # cut back, and grown again
        found.append((step(engine, StepRequest(1, tokens, rows_from=0)).rows, tokens))
        if tokens is committed:
            engine.release(1)
    for rows, tokens in found:
        assert rows.keys.dtype == np.float32 and rows.keys.shape == rows.values.shape == (len(tokens), 2, 16)
        both = np.concatenate([half.reshape(len(tokens), -1) for half in (rows.keys, rows.values)], axis=1)
        with torch.no_grad():
            expected = engine.drafter.features(target_states(engine.target, tokens, engine.drafter.row_reads).inner)
        np.testing.assert_allclose(both, expected, atol=2e-4)


def test_a_drafter_that_reads_nothing_has_no_rows(tiny_target, tmp_path):
    engine = load_torch_engine(str(tiny_target), make_tiny_rival("independent", tiny_target, tmp_path))
    assert step(engine, StepRequest(1, PROMPT, sampling=Sampling(), rows_from=0)).rows is None


def test_a_sequence_synchronises_itself(engine):
    rng = random.Random(3)
    number, sampling = new_sequence(), Sampling(1.0, 0.95, 4)
    tokens = list(PROMPT)
    for count in range(30):
        move = rng.choice(["grow", "cut", "change", "release", "same"])
        if move == "cut":
            tokens = tokens[: rng.randint(1, len(tokens))]
        elif move in ("grow", "change"):
            tokens = [*tokens[: len(tokens) if move == "grow" else rng.randrange(len(tokens))], rng.randrange(3, 512)]
        elif move == "release":
            engine.release(number)
            assert engine.held(number, tokens) == 0
        draft, parents = random_tree(rng, rng.randint(0, 5))
        if draft and rng.random() < 0.5:
            draft[0], parents[0] = plain(engine, tokens, sampling, 1)[0], 0
        choices = fresh_choices(engine, tokens, draft, parents, sampling)
        outcome = step(engine, StepRequest(number, tokens, draft, parents, sampling))
        assert outcome.token == choices[outcome.path[-1] + 1 if outcome.path else 0], count
        tokens += [draft[index] for index in outcome.path]
        assert engine.held(number, tokens) == len(tokens)


def test_a_failed_step_leaves_usable_sequences(engine, monkeypatch):
    first, second = new_sequence(), new_sequence()
    request = StepRequest(first, PROMPT, [40, 41], [0, 1], Sampling())
    other = StepRequest(second, PROMPT[::-1], sampling=Sampling())
    expected = asyncio.run(engine.step([request, other]))

    def break_off(pieces):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(engine.target_pass, "forward", break_off)
        with pytest.raises(RuntimeError):
            asyncio.run(engine.step([StepRequest(first, [*PROMPT, 9], sampling=Sampling()), other]))
    assert engine.held(first, PROMPT) == engine.held(second, PROMPT[::-1]) == 0
    assert asyncio.run(engine.step([request, other])) == expected


def test_a_long_prefix_is_prefilled_in_pieces(engine, monkeypatch):
    tokens = [*PROMPT, *PROMPT, *PROMPT]
    right = plain(engine, tokens, Sampling(), 3)
    monkeypatch.setattr(engine_module, "CHUNK", 16)
    before = engine.forwards
    outcome = step(engine, StepRequest(new_sequence(), tokens, right[:2], [0, 1], Sampling(), 0))
    assert (outcome.path, outcome.token) == ((0, 1), right[2])
    assert engine.forwards - before == 5
    assert_rows(engine, outcome.rows, [*tokens, *right[:2]], 0)


def test_caches_grow_and_are_reserved_at_once(engine, tiny_target):
    tokens = [random.Random(2).randrange(3, 512) for _ in range(400)]
    number = new_sequence()
    for end in (100, 130, 250, 258, 300, 400):
        token = step(engine, StepRequest(number, tokens[:end], sampling=Sampling())).token
        assert engine.held(number, [*tokens[: end - 30], 0]) == end - 30
    assert token == plain(engine, tokens, Sampling(), 1)[0]
    other = load_torch_engine(str(tiny_target), None)
    step(other, StepRequest(1, tokens[:4], expected=210))
    taken = other.cache_use
    assert taken[0] >= 210
    step(other, StepRequest(1, tokens[:210], sampling=Sampling()))
    assert other.cache_use == taken
    other.close()


@pytest.mark.parametrize(
    "request_", [StepRequest(1, ()), StepRequest(1, PROMPT, [5]), StepRequest(1, [5] * 40_000)], ids=lambda _: ""
)
def test_an_invalid_request_is_refused(engine, request_):
    with pytest.raises(ValueError):
        step(engine, request_)


def test_an_engine_has_facts_of_its_models(engine, tiny_target, tiny_drafter, tmp_path, caplog):
    assert engine.fingerprints.tokenizer == tokenizer_fingerprint(tiny_target / "tokenizer.json")
    assert engine.fingerprints.target and engine.fingerprints.drafter
    assert (engine.vocab_size, engine.max_context, engine.stop_tokens) == (512, 512, (2,))
    assert engine.capabilities.trees and not engine.capabilities.schedules_itself
    without = load_torch_engine(str(tiny_target), None, max_context=64)
    assert (without.fingerprints.drafter, without.max_context) == ("", 64)
    with pytest.raises(ValueError):
        step(without, StepRequest(1, PROMPT, rows_from=0))
    other = load_torch_engine(str(make_tiny_target(tmp_path, seed=9)), tiny_drafter)
    assert other.fingerprints.target in caplog.text  # the drafter was trained for another copy of the target


@pytest.mark.parametrize(
    ("settings", "code"), [({"max_context": 600}, "out_of_range"), ({"dtype": "int4"}, "unknown_type")]
)
def test_settings_that_do_not_fit_are_refused(tiny_target, settings, code):
    with refused(code, EngineError):
        load_torch_engine(str(tiny_target), None, **settings)


# -- log-probabilities -----------------------------------------------------------------------------

TEXT = random.Random(6).sample(range(3, 512), 60)


@pytest.mark.parametrize("chunk", [1, 7, 16, 128])
@pytest.mark.parametrize("length", [1, 16, 21, 59])
def test_chunks_of_any_size_equal_one_forward_of_the_model(engine, monkeypatch, chunk, length):
    monkeypatch.setattr(baseline, "SCORING_CHUNK", chunk)
    before = engine.forwards
    scores = log_probabilities(engine, TEXT[:length], TEXT[length:])
    assert scores.dtype == np.float32 and engine.forwards - before == -(-59 // chunk)
    with torch.no_grad():
        logits = engine.target.model(torch.tensor([TEXT])).logits[0]
    expected = torch.log_softmax(logits, -1)[torch.arange(len(TEXT) - 1), TEXT[1:]].numpy()
    np.testing.assert_allclose(scores, expected[length - 1 :], atol=1e-4)
    np.testing.assert_allclose(next_logits(engine, TEXT[:length]), logits[length - 1].numpy(), atol=1e-4)
    assert log_probabilities(engine, TEXT, []).shape == (0,)


@pytest.mark.parametrize(("prefix", "continuation"), [([], TEXT), (TEXT, [7] * 453)])
def test_a_text_that_cannot_be_scored_is_refused(engine, prefix, continuation):
    with pytest.raises(ValueError):
        log_probabilities(engine, prefix, continuation)


def test_an_answer_on_shared_blocks_is_the_same_and_another_owner_shares_none(engine):
    text = [3 + (7919 * index) % 500 for index in range(200)]

    def tokens(owner):
        number = new_sequence()
        engine.share(number, owner)
        found = [step(engine, StepRequest(number, text[:end], sampling=Sampling())).token for end in (150, 199, 200)]
        engine.release(number)
        return found

    before, first = engine.tokens_reused, tokens("ann")
    assert tokens("bob") == first and engine.tokens_reused == before
    assert tokens("ann") == first and engine.tokens_reused == before + 128 + (192 - 150)
