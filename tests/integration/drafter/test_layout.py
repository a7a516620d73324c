"""Matrices that lie input by input for products of few rows."""

from __future__ import annotations

import torch
from torch import nn

from moa_bench.harness import checkpoint_pair
from moa_drafter.target import load_target
from moa_server.engine.general_pass import GeneralPass


def linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def lies_input_by_input(matrix: torch.Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == len(matrix)


def test_the_general_pass_lays_its_target_out(tiny_target):
    target = load_target(str(tiny_target))  # one of its own: it is laid out in place
    layers = linear_layers(nn.ModuleList(target.layers))
    assert not any(lies_input_by_input(layer.weight) for layer in layers)
    tokens = torch.arange(9)[None]
    before = target.model(tokens).logits
    GeneralPass(target)
    assert all(lies_input_by_input(layer.weight) for layer in layers)
    assert not lies_input_by_input(target.head)
    torch.testing.assert_close(target.model(tokens).logits, before, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_that_drafts(tiny_target, tiny_drafter):
    target = load_target(str(tiny_target))
    _, engine = checkpoint_pair(tiny_drafter, target)
    drafter = engine.drafter
    assert drafter is not None
    assert all(lies_input_by_input(layer.weight) for layer in linear_layers(drafter))
    picked = target.head[drafter.draft_to_target.long()] * drafter.config.sharpness
    assert lies_input_by_input(drafter.head) and torch.equal(drafter.head, picked)
