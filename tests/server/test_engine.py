"""The transformers engine on a tiny target: every way of verifying gives what plain decoding gives."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from moa_drafter.states import layer_keys_values, target_states
from moa_runtime.bundle import tokenizer_fingerprint
from moa_runtime.errors import MoaError
from moa_runtime.session.server import Sampling
from moa_runtime.session.tree import accepted_path, chain
from moa_server import transformers_engine
from moa_server.plain import decode
from moa_server.transformers_engine import TransformersEngine
from moa_server.tree_mask import tree_mask
from tiny import make_tiny_rival, make_tiny_target

PROMPT = tuple(random.Random(5).sample(range(3, 512), 21))
SAMPLINGS = [Sampling(), Sampling(1.0, 1.0, 1), Sampling(0.8, 0.9, 2), Sampling(2.0, 0.98, 3)]


def plain(engine, prefix, sampling=SAMPLINGS[0], count=24) -> list[int]:
    return [step.token for step in decode(engine, prefix, sampling, count)]


def fresh_choices(engine, prefix, draft, parents, sampling) -> list[int]:
    """The choice after every node, each by a sequence of its own that sees only the node's path."""
    paths = [tuple(prefix)]
    for token, parent in zip(draft, parents, strict=True):
        paths.append((*paths[parent], token))
    return [engine.open().verify(path, (), (), sampling)[0] for path in paths]


def random_tree(rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    return [rng.randrange(3, 512) for _ in range(size)], [rng.randint(0, index) for index in range(size)]


def reference_rows(engine, tokens):
    with torch.no_grad():
        cache = engine.target.model.model(input_ids=torch.tensor([tokens]), use_cache=True).past_key_values
        kv = layer_keys_values(cache, engine.drafter.config.lsa_layers)
        return [part.numpy() for part in engine.drafter.memory_rows(kv, torch.arange(len(tokens)))]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_decoding_is_what_the_whole_model_would_choose(engine, sampling):
    from moa_server.sampling import choose

    tokens = list(PROMPT)
    for token in plain(engine, PROMPT, sampling, 12):
        with torch.no_grad():
            logits = engine.target.model(torch.tensor([tokens])).logits[0, -1].numpy()
        assert token == choose(logits, sampling, len(tokens))
        tokens.append(token)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_chain_is_verified_in_one_forward(engine, sampling):
    tokens = plain(engine, PROMPT, sampling)
    draft = tokens[:-1]
    before = engine.forwards
    assert engine.open().verify(PROMPT, draft, chain(len(draft)), sampling) == tokens
    assert engine.forwards == before + 1


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_is_verified_as_each_of_its_paths(engine, seed):
    draft, parents = random_tree(random.Random(seed), 12)
    sampling = SAMPLINGS[seed]
    sequence = engine.open()
    sequence.verify(PROMPT[:10], (), (), sampling)
    assert sequence.verify(PROMPT, draft, parents, sampling) == fresh_choices(engine, PROMPT, draft, parents, sampling)


def test_tree_mask_shows_ancestors():
    assert tree_mask(1, [0, 1, 1]).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert tree_mask(2, [0, 1]).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("trees", [False, True])
def test_drafts_of_any_quality_change_nothing(engine, sampling, trees):
    """Losslessness: chains and trees with right and wrong tokens commit what plain decoding writes."""
    expected = [*PROMPT, *plain(engine, PROMPT, sampling, 40)]
    rng = random.Random(11)
    sequence, committed = engine.open(), list(PROMPT)
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
        choices = sequence.verify(committed, draft, parents, sampling)
        path = accepted_path(draft, parents, choices)
        sequence.keep(path)
        committed += [draft[index] for index in path]
        committed.append(choices[path[-1] + 1] if path else choices[0])
    assert committed[: len(expected)] == expected


def test_rows_after_a_tree_path_are_those_of_the_committed_tokens(engine):
    sequence = engine.open()
    draft, parents = [40, 41, 42, 43, 44], [0, 0, 2, 2, 4]
    sequence.verify(PROMPT, draft, parents, Sampling())
    sequence.keep([1, 3, 4])
    tokens = [*PROMPT, 41, 43, 44]
    for positions in (range(len(tokens)), range(18, 24), range(5, 6), range(7, 7)):
        for rows, reference in zip(sequence.rows(positions), reference_rows(engine, tokens), strict=True):
            assert rows.dtype == np.float32
            assert rows.shape == (len(positions), *reference.shape[1:])
            np.testing.assert_allclose(rows, reference[positions.start : positions.stop], atol=2e-4)
    # The cache goes on from the gathered path.
    sampling = Sampling(1.0, 1.0, 9)
    assert sequence.verify([*tokens, 9], (), (), sampling) == fresh_choices(engine, [*tokens, 9], (), (), sampling)


def test_rows_of_last_hidden_states_follow_the_cache(tiny_target, tmp_path):
    engine = TransformersEngine.load(str(tiny_target), make_tiny_rival("eagle", tiny_target, tmp_path))
    sequence = engine.open()
    sequence.verify(PROMPT, [40, 41, 42, 43, 44], [0, 0, 2, 2, 4], Sampling())
    sequence.keep([1, 3, 4])
    committed = [*PROMPT, 41, 43, 44]
    assert_last_states(engine, sequence, committed)
    for tokens in ([*PROMPT, 9, 8], [*PROMPT[:5], 7, 6], committed):  # cut back, and grown again
        sequence.verify(tokens, [50], [0], Sampling())
        sequence.keep([])
        assert_last_states(engine, sequence, tokens)
    sequence.close()
    sequence.verify(committed, [], [], Sampling())
    assert_last_states(engine, sequence, committed)


def assert_last_states(engine, sequence, tokens) -> None:
    first, second = sequence.rows(range(len(tokens)))
    assert first.dtype == np.float32 and first.shape == second.shape == (len(tokens), 2, 16)
    both = np.concatenate((first.reshape(len(tokens), -1), second.reshape(len(tokens), -1)), axis=1)
    expected = target_states(engine.target, tokens, engine.row_reads).last
    np.testing.assert_allclose(both, expected.numpy(), atol=2e-4)


def test_a_drafter_that_reads_nothing_has_no_rows(tiny_target, tmp_path):
    engine = TransformersEngine.load(str(tiny_target), make_tiny_rival("independent", tiny_target, tmp_path))
    sequence = engine.open()
    sequence.verify(PROMPT, (), (), Sampling())
    assert sequence.rows(range(0, 3)) is None


def test_rows_that_were_not_processed_are_refused(engine):
    sequence = engine.open()
    sequence.verify(PROMPT, [40], [0], Sampling())
    with pytest.raises(ValueError, match="21 tokens are processed"):
        sequence.rows(range(0, 22))


def test_a_sequence_synchronises_itself(engine):
    rng = random.Random(3)
    sequence, sampling = engine.open(), Sampling(1.0, 0.95, 4)
    tokens = list(PROMPT)
    for step in range(30):
        move = rng.choice(["grow", "cut", "change", "keep", "close", "same"])
        if move == "grow":
            tokens = [*tokens, rng.randrange(3, 512)]
        elif move == "cut":
            tokens = tokens[: rng.randint(1, len(tokens))]
        elif move == "change":
            tokens = [*tokens[: rng.randint(0, len(tokens) - 1)], rng.randrange(3, 512)]
        elif move == "close":
            sequence.close()
        draft, parents = random_tree(rng, rng.randint(0, 5))
        choices = sequence.verify(tokens, draft, parents, sampling)
        assert choices == fresh_choices(engine, tokens, draft, parents, sampling), step
        if move == "keep" and draft:
            sequence.keep([0])
            tokens = [*tokens, draft[0]]
        elif move != "same":
            sequence.keep(())


def test_a_failed_forward_leaves_a_usable_sequence(engine, monkeypatch):
    sequence = engine.open()
    expected = sequence.verify(PROMPT, [40, 41], [0, 1], Sampling())

    def break_off(self, *args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(transformers_engine.KeyValueCache, "update", break_off)
        with pytest.raises(RuntimeError):
            sequence.verify([*PROMPT, 9], (), (), Sampling())
    assert sequence.verify(PROMPT, [40, 41], [0, 1], Sampling()) == expected


def test_a_long_prefix_is_prefilled_in_chunks(engine, monkeypatch):
    tokens = [*PROMPT, *PROMPT, *PROMPT]
    whole = engine.open().verify(tokens, [7, 8], [0, 1], Sampling())
    monkeypatch.setattr(transformers_engine, "CHUNK", 16)
    sequence = engine.open()
    before = engine.forwards
    assert sequence.verify(tokens, [7, 8], [0, 1], Sampling()) == whole
    assert engine.forwards - before == 5
    sequence.keep([0, 1])
    for rows, reference in zip(sequence.rows(range(0, 65)), reference_rows(engine, [*tokens, 7, 8]), strict=True):
        np.testing.assert_allclose(rows, reference, atol=2e-4)


def test_buffers_grow_beyond_their_first_size(engine):
    tokens = [random.Random(2).randrange(3, 512) for _ in range(400)]
    sequence = engine.open()
    for end in (250, 258, 300, 400):
        choices = sequence.verify(tokens[:end], (), (), Sampling())
        sequence.keep(())
    assert choices == engine.open().verify(tokens, (), (), Sampling())


def test_what_the_engine_says_of_itself(engine, tiny_target):
    assert engine.fingerprints.tokenizer == tokenizer_fingerprint(tiny_target / "tokenizer.json")
    assert engine.fingerprints.target and engine.fingerprints.drafter
    assert (engine.vocab_size, engine.max_context, engine.stop_tokens) == (512, 512, (2,))


def test_without_a_drafter_there_are_no_rows(tiny_target):
    engine = TransformersEngine.load(str(tiny_target), None, max_context=64)
    assert engine.fingerprints.drafter == ""
    assert engine.max_context == 64
    sequence = engine.open()
    sequence.verify(PROMPT, (), (), Sampling())
    with pytest.raises(ValueError, match="without a drafter"):
        sequence.rows(range(0, 1))


def test_a_drafter_trained_for_another_copy_of_the_target_is_noted(tiny_drafter, tmp_path, caplog):
    other = make_tiny_target(tmp_path, seed=9)
    engine = TransformersEngine.load(str(other), tiny_drafter)
    assert "trained for target" in caplog.text
    assert engine.fingerprints.target in caplog.text


def test_a_context_beyond_the_target_is_refused(tiny_target):
    with pytest.raises(MoaError, match="600 tokens"):
        TransformersEngine.load(str(tiny_target), None, max_context=600)
