"""Log-probabilities of a text under the target, against the whole model's own forward."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from moa_runtime.session.events import Sampling
from moa_server.engine import baseline
from moa_server.engine.baseline import decode, log_probabilities, next_logits

TOKENS = random.Random(6).sample(range(3, 512), 60)


def reference(engine, tokens) -> np.ndarray:
    """Of every token but the first, by one forward of transformers without any cache."""
    with torch.no_grad():
        logits = engine.target.model(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), tokens[1:]].numpy()


@pytest.mark.parametrize("chunk", [1, 7, 16, 128])
@pytest.mark.parametrize("length", [1, 16, 21, 59])
def test_chunks_of_any_size_equal_one_forward_of_the_model(engine, monkeypatch, chunk, length):
    monkeypatch.setattr(baseline, "SCORING_CHUNK", chunk)
    before = engine.forwards
    scores = log_probabilities(engine, TOKENS[:length], TOKENS[length:])
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, reference(engine, TOKENS)[length - 1 :], atol=1e-4)
    assert engine.forwards - before == -(-59 // chunk)


@pytest.mark.parametrize("length", [1, 16, 40])
def test_logits_behind_a_text_are_those_of_the_model(engine, monkeypatch, length):
    monkeypatch.setattr(baseline, "SCORING_CHUNK", 16)
    with torch.no_grad():
        whole = engine.target.model(torch.tensor([TOKENS[:length]])).logits[0, -1].numpy()
    np.testing.assert_allclose(next_logits(engine, TOKENS[:length]), whole, atol=1e-4)


def test_no_single_token_is_likelier_than_the_targets_choice(engine):
    (chosen,) = (step.token for step in decode(engine, TOKENS[:20], Sampling(), 1))
    best = log_probabilities(engine, TOKENS[:20], [chosen])[0]
    assert all(best >= log_probabilities(engine, TOKENS[:20], [token])[0] for token in TOKENS)


def test_an_empty_text_has_no_probabilities_and_costs_nothing(engine):
    before = engine.forwards
    assert log_probabilities(engine, TOKENS, []).shape == (0,)
    assert engine.forwards == before


@pytest.mark.parametrize(("prefix", "continuation"), [([], TOKENS), (TOKENS, [7] * 453)])
def test_what_cannot_be_scored_is_refused(engine, prefix, continuation):
    with pytest.raises(ValueError, match="cannot be scored"):
        log_probabilities(engine, prefix, continuation)
