"""The transformers engine on a tiny target: every way of verifying gives what plain decoding gives."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch

from moa_drafter.target_features import layer_keys_values, target_states
from moa_runtime.bundle import tokenizer_fingerprint
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import chain
from moa_server.engine import transformers as transformers_engine
from moa_server.engine.base import StepRequest
from moa_server.engine.forward import tree_mask
from moa_server.engine.transformers import TransformersEngine
from support.server.stepping import Numbers, fresh_choices, plain, random_tree, step
from support.tiny import make_tiny_rival, make_tiny_target

PROMPT = tuple(random.Random(5).sample(range(3, 512), 21))
SAMPLINGS = [Sampling(), Sampling(1.0, 1.0, 1), Sampling(0.8, 0.9, 2), Sampling(2.0, 0.98, 3)]
NUMBERS = Numbers()


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
        return (await engine.step([StepRequest(NUMBERS.new(), PROMPT, sampling=Sampling())]))[0].token

    assert asyncio.run(both()) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_chain_is_verified_in_one_forward(engine, sampling):
    tokens = plain(engine, PROMPT, sampling, 24)
    draft = tokens[:-1]
    before = engine.forwards
    outcome = step(engine, StepRequest(NUMBERS.new(), PROMPT, draft, chain(len(draft)), sampling))
    assert (outcome.path, outcome.token) == (tuple(range(len(draft))), tokens[-1])
    assert engine.forwards == before + 1


def test_a_draft_without_parents_is_a_chain(engine):
    tokens = plain(engine, PROMPT, Sampling(), 5)
    outcome = step(engine, StepRequest(NUMBERS.new(), PROMPT, tokens[:4], (), Sampling()))
    assert (outcome.path, outcome.token) == ((0, 1, 2, 3), tokens[4])


@pytest.mark.parametrize("seed", range(4))
def test_every_node_of_a_tree_is_decided_as_its_path_alone(engine, seed):
    rng, sampling = random.Random(seed), SAMPLINGS[seed]
    draft, parents = random_tree(rng, 12)
    expected = fresh_choices(engine, PROMPT, draft, parents, sampling)
    for node in range(13):
        # A tree in which the choice along the path to this node is always right leads there.
        right, place = list(draft), node
        while place:
            right[place - 1] = draft[place - 1]
            place = parents[place - 1]
        outcome = step(engine, StepRequest(NUMBERS.new(), PROMPT, right, parents, sampling))
        assert outcome.token == expected[outcome.path[-1] + 1 if outcome.path else 0]


def test_tree_mask_shows_ancestors():
    assert tree_mask(1, [0, 1, 1]).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert tree_mask(2, [0, 1]).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("trees", [False, True])
def test_drafts_of_any_quality_change_nothing(engine, sampling, trees):
    """Losslessness: chains and trees with right and wrong tokens commit what plain decoding writes."""
    expected = [*PROMPT, *plain(engine, PROMPT, sampling, 40)]
    rng = random.Random(11)
    number, committed = NUMBERS.new(), list(PROMPT)
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
    """A tree whose path 1, 3, 4 is accepted behind the prompt."""
    right = plain(engine, PROMPT, Sampling(), 3)
    return [3, right[0], 4, right[1], right[2]], [0, 0, 2, 2, 4]


def test_rows_after_a_tree_path_are_those_of_the_committed_tokens(engine):
    draft, parents = right_tree(engine)
    tokens = [*PROMPT, draft[1], draft[3], draft[4]]
    for start in (0, 18, 23):
        outcome = step(engine, StepRequest(NUMBERS.new(), PROMPT, draft, parents, Sampling(), start))
        assert outcome.path == (1, 3, 4)
        assert_rows(engine, outcome.rows, tokens, start)


def test_rows_of_what_is_held_cost_no_forward(engine):
    number = NUMBERS.new()
    assert step(engine, StepRequest(number, PROMPT)).rows is None
    before = engine.forwards
    outcome = step(engine, StepRequest(number, PROMPT, rows_from=4))
    assert engine.forwards == before
    assert (outcome.path, outcome.token) == ((), None)
    assert_rows(engine, outcome.rows, PROMPT, 4)
    empty = step(engine, StepRequest(number, PROMPT, rows_from=len(PROMPT))).rows
    assert empty.keys.shape == (0, 2, 16)


def test_rows_of_several_sequences_are_made_together(engine, monkeypatch):
    monkeypatch.setattr(
        "moa_server.engine.memory_rows._CHUNK", 8
    )  # so that chunks end within a sequence and at its end
    asked = {12: 0, 9: 9, 21: 2, 17: 16, 16: None}
    requests = [StepRequest(NUMBERS.new(), PROMPT[:length], rows_from=start) for length, start in asked.items()]
    for request, outcome in zip(requests, engine.step_now(requests), strict=True):
        if request.rows_from is None:
            assert outcome.rows is None
        else:
            assert_rows(engine, outcome.rows, request.prefix, request.rows_from)


def test_rows_of_last_hidden_states_follow_the_cache(tiny_target, tmp_path):
    engine = TransformersEngine.load(str(tiny_target), make_tiny_rival("eagle", tiny_target, tmp_path))
    draft, parents = right_tree(engine)
    committed = [*PROMPT, draft[1], draft[3], draft[4]]
    outcome = step(engine, StepRequest(1, PROMPT, draft, parents, Sampling(), 0))
    assert outcome.path == (1, 3, 4)
    assert_last_states(engine, outcome.rows, committed)
    for tokens in ([*PROMPT, 9, 8], [*PROMPT[:5], 7, 6], committed):  # cut back, and grown again
        assert_last_states(engine, step(engine, StepRequest(1, tokens, rows_from=0)).rows, tokens)
    engine.release(1)
    assert_last_states(engine, step(engine, StepRequest(1, committed, rows_from=0)).rows, committed)


def assert_last_states(engine, rows, tokens) -> None:
    assert rows.keys.dtype == np.float32 and rows.keys.shape == rows.values.shape == (len(tokens), 2, 16)
    both = np.concatenate((rows.keys.reshape(len(tokens), -1), rows.values.reshape(len(tokens), -1)), axis=1)
    expected = target_states(engine.target, tokens, engine.row_reads).last
    np.testing.assert_allclose(both, expected.numpy(), atol=2e-4)


def test_a_drafter_that_reads_nothing_has_no_rows(tiny_target, tmp_path):
    engine = TransformersEngine.load(str(tiny_target), make_tiny_rival("independent", tiny_target, tmp_path))
    assert step(engine, StepRequest(1, PROMPT, sampling=Sampling(), rows_from=0)).rows is None


def test_a_sequence_synchronises_itself(engine):
    rng = random.Random(3)
    number, sampling = NUMBERS.new(), Sampling(1.0, 0.95, 4)
    tokens = list(PROMPT)
    for count in range(30):
        move = rng.choice(["grow", "cut", "change", "release", "same"])
        if move == "grow":
            tokens = [*tokens, rng.randrange(3, 512)]
        elif move == "cut":
            tokens = tokens[: rng.randint(1, len(tokens))]
        elif move == "change":
            tokens = [*tokens[: rng.randint(0, len(tokens) - 1)], rng.randrange(3, 512)]
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


def test_what_is_held_is_the_common_beginning(engine):
    number = NUMBERS.new()
    assert engine.held(number, PROMPT) == 0
    step(engine, StepRequest(number, PROMPT))
    assert engine.held(number, [*PROMPT, 5]) == len(PROMPT)
    assert engine.held(number, PROMPT[:7]) == 7
    assert engine.held(number, [*PROMPT[:7], 0, *PROMPT[8:]]) == 7


def test_a_failed_step_leaves_usable_sequences(engine, monkeypatch):
    first, second = NUMBERS.new(), NUMBERS.new()
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
    monkeypatch.setattr(transformers_engine, "CHUNK", 16)
    before = engine.forwards
    outcome = step(engine, StepRequest(NUMBERS.new(), tokens, right[:2], [0, 1], Sampling(), 0))
    assert (outcome.path, outcome.token) == ((0, 1), right[2])
    assert engine.forwards - before == 5
    assert_rows(engine, outcome.rows, [*tokens, *right[:2]], 0)


def test_several_sequences_share_forwards(engine):
    rng = random.Random(8)
    prefixes = [[rng.randrange(3, 512) for _ in range(rng.randint(1, 60))] for _ in range(7)]
    alone = [plain(engine, prefix, Sampling(), 1)[0] for prefix in prefixes]
    before = engine.forwards
    requests = [StepRequest(NUMBERS.new(), prefix, sampling=Sampling()) for prefix in prefixes]
    assert [outcome.token for outcome in asyncio.run(engine.step(requests))] == alone
    assert engine.forwards == before + 1


def test_rooms_grow(engine):
    tokens = [random.Random(2).randrange(3, 512) for _ in range(400)]
    number = NUMBERS.new()
    for end in (100, 130, 250, 258, 300, 400):
        token = step(engine, StepRequest(number, tokens[:end], sampling=Sampling())).token
    assert token == plain(engine, tokens, Sampling(), 1)[0]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (StepRequest(1, ()), "at least one token"),
        (StepRequest(1, PROMPT, [5]), "no sampling"),
        (StepRequest(1, [5] * 40_000), "do not fit"),
    ],
)
def test_requests_that_cannot_be_done(engine, request_, reason):
    with pytest.raises(ValueError, match=reason):
        step(engine, request_)


def test_what_the_engine_says_of_itself(engine, tiny_target):
    assert engine.fingerprints.tokenizer == tokenizer_fingerprint(tiny_target / "tokenizer.json")
    assert engine.fingerprints.target and engine.fingerprints.drafter
    assert (engine.vocab_size, engine.max_context, engine.stop_tokens) == (512, 512, (2,))
    assert engine.capabilities.trees and not engine.capabilities.schedules_itself


def test_without_a_drafter_there_are_no_rows(tiny_target):
    engine = TransformersEngine.load(str(tiny_target), None, max_context=64)
    assert engine.fingerprints.drafter == ""
    assert engine.max_context == 64
    with pytest.raises(ValueError, match="without a drafter"):
        step(engine, StepRequest(1, PROMPT, rows_from=0))


def test_a_drafter_trained_for_another_copy_of_the_target_is_noted(tiny_drafter, tmp_path, caplog):
    other = make_tiny_target(tmp_path, seed=9)
    engine = TransformersEngine.load(str(other), tiny_drafter)
    assert "trained for target" in caplog.text
    assert engine.fingerprints.target in caplog.text


def test_a_context_beyond_the_target_is_refused(tiny_target):
    with pytest.raises(MoaError, match="600 tokens"):
        TransformersEngine.load(str(tiny_target), None, max_context=600)


def test_an_unknown_type_is_refused(tiny_target):
    with pytest.raises(MoaError, match="int4 is not supported"):
        TransformersEngine.load(str(tiny_target), None, dtype="int4")


def test_rows_of_a_part_of_what_is_held_drop_nothing(engine):
    sequence = NUMBERS.new()
    step(engine, StepRequest(sequence, PROMPT, sampling=Sampling()))
    before = engine.forwards
    part = step(engine, StepRequest(sequence, PROMPT[:9], rows_from=4))
    assert (part.rows.start, part.rows.stop, part.token) == (4, 9, None)
    assert engine.forwards == before and engine.held(sequence, PROMPT) == len(PROMPT)


def test_a_prompt_that_comes_in_pieces_gets_its_room_at_once(tiny_target):
    engine = TransformersEngine.load(str(tiny_target), None)
    number, tokens = NUMBERS.new(), list(PROMPT) * 10
    step(engine, StepRequest(number, tokens[:4], expected=len(tokens)))
    taken = engine.cache_use
    assert taken[0] >= len(tokens)
    step(engine, StepRequest(number, tokens, sampling=Sampling()))
    assert engine.cache_use == taken
    engine.close()
