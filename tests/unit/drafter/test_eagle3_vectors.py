"""Logits of EAGLE-3 heads against the code of their authors, recorded by ``tools/compare_eagle3.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.target_features import TargetStates
from moa_runtime.backends.base import StepInputs
from support.drafter.eagle3_heads import OPTIONS, write_head
from support.tiny import VOCAB_SIZE

VECTORS = np.load(Path(__file__).parents[2] / "vectors/data/eagle3.npz")


@pytest.mark.parametrize("name", [*OPTIONS, "authors"])
def test_logits_are_those_of_the_authors(name, tmp_path):
    """The pass number d of speculators' forward predicts after d estimates in place of features."""
    tokens, states = VECTORS["tokens"], torch.from_numpy(VECTORS["states"])
    of = "authors" if name == "authors" else "speculators"
    head = load_checkpoint(write_head(tmp_path, OPTIONS.get(name), of=of))
    embedding = torch.zeros(VOCAB_SIZE, states.shape[-1])
    embedding[tokens] = torch.from_numpy(VECTORS["embedded"])
    head.bind_target(embedding, embedding, [None] * 4)
    with torch.no_grad():
        given = TargetStates(states[:, :0], states, states[:, 0])
        rows = [half.numpy() for half in head.rows(given, torch.arange(len(tokens)))]
    backend = torch_backend_of(head, top_k=VOCAB_SIZE)
    expected = VECTORS[name].reshape(-1, len(tokens) - 1, VECTORS[name].shape[-1])
    empty = (np.zeros((0, *backend.kv_shape), np.float32),) * 2
    for depth, of_pass in enumerate(expected):
        for pair in range(len(of_pass) - depth):
            known = tuple(half[: pair + 1] for half in rows)
            result = backend.step(StepInputs.chain(tokens[: pair + depth + 2], empty, known))
            found = dict(zip(result.top_tokens[0].tolist(), result.top_logprobs[0].tolist(), strict=True))
            ours = [found[token] for token in head.draft_to_target.tolist()[::6]]
            np.testing.assert_allclose(ours, of_pass[pair], atol=1e-4)
