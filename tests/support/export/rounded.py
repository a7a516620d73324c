"""A target in PyTorch with the weights of an offline writer."""

from __future__ import annotations

import copy
from typing import Any

import torch

from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.target import Target


def rounded_model(target: Target, weights: RoundedWeights) -> Any:
    """Return a copy of the target's model that multiplies by what the rounded matrices stand for."""
    model = copy.deepcopy(target.model)
    names = {"q": "self_attn.q", "k": "self_attn.k", "v": "self_attn.v", "out": "self_attn.o"}
    names |= {name: f"mlp.{name}" for name in ("gate", "up", "down")}
    rounded = {
        f"model.layers.{layer}.{place}_proj.weight": weights.matrix(layer, name).dense()  # type: ignore[arg-type]
        for layer in range(len(weights.spec.layers))
        for name, place in names.items()
    }
    rounded |= {"lm_head.weight": weights.head().dense(), "model.embed_tokens.weight": weights.embedding().dense()}
    model.load_state_dict({name: torch.from_numpy(array) for name, array in rounded.items()}, strict=False)
    return model
