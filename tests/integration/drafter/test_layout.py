"""Matrices that lie input by input for products of few rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from moa_bench.harness import checkpoint_pair
from moa_drafter.devices import input_major, lay_out_for_few_rows
from moa_drafter.target import load_target
from moa_server.engine.forward import GeneralPass


def linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def lies_input_by_input(matrix: torch.Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == len(matrix)


def test_a_module_computes_the_same() -> None:
    module = nn.Sequential(nn.Linear(7, 5, bias=False), nn.RMSNorm(5), nn.Linear(5, 6))
    x = torch.randn(4, 7)
    before = module(x)
    lay_out_for_few_rows(module)
    assert all(lies_input_by_input(layer.weight) for layer in linear_layers(module))
    torch.testing.assert_close(module(x), before)
    weight = module[0].weight
    assert input_major(weight).data_ptr() == weight.data_ptr()


def test_the_general_pass_lays_its_target_out(tiny_target: Path) -> None:
    target = load_target(str(tiny_target))  # one of its own: it is laid out in place
    layers = linear_layers(nn.ModuleList(target.layers))
    assert not any(lies_input_by_input(layer.weight) for layer in layers)
    tokens = torch.arange(9)[None]
    before = target.model(tokens).logits
    GeneralPass(target)
    assert all(lies_input_by_input(layer.weight) for layer in layers)
    assert not lies_input_by_input(target.head)
    torch.testing.assert_close(target.model(tokens).logits, before, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_that_drafts(tiny_target: Path, tiny_drafter: Path) -> None:
    target = load_target(str(tiny_target))
    _, engine = checkpoint_pair(tiny_drafter, target)
    drafter = engine.drafter
    assert drafter is not None
    assert all(lies_input_by_input(layer.weight) for layer in linear_layers(drafter))
    picked = target.head[drafter.draft_to_target.long()] * drafter.config.sharpness
    assert lies_input_by_input(drafter.head) and torch.equal(drafter.head, picked)
