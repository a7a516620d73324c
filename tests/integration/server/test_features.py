"""Features: what a pass keeps of each token for a drafter's rows, made of states inside the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from moa_drafter.config import Reads
from moa_drafter.target import load_target
from moa_drafter.target_features import target_states
from moa_drafter.target_folder import weights_of
from moa_server.engine.fused_llama import FusedLlama
from moa_server.engine.general_pass import GeneralPass
from moa_server.engine.onnx_pass import OnnxPass
from moa_server.engine.target_pass import Piece

_TEXT = [(7919 * index) % 509 for index in range(90)]


@dataclass
class Beside:
    """A fusion that puts states side by side."""

    inner_layers: Sequence[int] = (2, 0, 2)
    size: int = 3 * 64

    def __call__(self, states: Sequence[Any]) -> Any:
        return np.concatenate(states, 1) if isinstance(states[0], np.ndarray) else torch.cat(list(states), 1)


@pytest.mark.parametrize("kind", ["onnx", "fused", "general"])
def test_features_follow_pieces_trees_and_blocks(kind, tiny_target):
    target = load_target(str(tiny_target))
    if kind == "onnx":
        own = OnnxPass(weights_of(tiny_target), threads=1, fusion=Beside())
    elif kind == "fused":
        own = FusedLlama(target, torch.float32, fusion=Beside())
    else:
        own = GeneralPass(target, fusion=Beside())
    cache, right = own.cache_shape.new_cache(100), _TEXT[70:73]
    own.forward([Piece(cache, 0, _TEXT[:64]), Piece(own.cache_shape.new_cache(5), 0, _TEXT[:5])])
    own.forward([Piece(cache, 64, _TEXT[64:70], [1, right[0], 2, right[1], right[2]], [0, 0, 1, 2, 4])])
    cache.keep(70, [1, 3, 4])
    cache = cache.resized(200, 73)
    own.forward([Piece(cache, 73, _TEXT[73:])])
    other = own.cache_shape.new_cache(100)
    other.set_block_states(0, cache.block_states(0))
    states = target_states(target, _TEXT, Reads(inner_layers=(2, 0, 2))).inner.flatten(1).numpy()
    assert own.cache_shape.token_bytes == (2 * 4 * 2 * 16 + 3 * 64) * 4
    for found, expected in ((cache.features[:90], states), (other.features[:64], states[:64])):
        np.testing.assert_allclose(np.asarray(found), expected, atol=2e-4)
