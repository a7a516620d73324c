"""Calibration of the tiny drafter on conversations of the tiny target."""

from __future__ import annotations

import copy

import pytest
import torch

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_export.gptq import calibrate, needs_calibration
from moa_export.quantize import round_symmetric
from moa_export.recipe import PRESETS, Recipe, Weights
from moa_export.recordings import Recording, record
from moa_export.validation import compare, rehearse


@pytest.fixture(scope="module")
def recordings(target: Target, drafter: MoADrafter) -> list[Recording]:
    return record(target, drafter, ["Name three colours.", "Why is the sky blue?", "Who are you?"])


def rounded(drafter: MoADrafter) -> MoADrafter:
    """Without looking at inputs."""
    plain = copy.deepcopy(drafter)
    for module in plain.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = _restored(module.weight)
    plain.head = _restored(plain.head)
    return plain


def _restored(weight: torch.Tensor) -> torch.Tensor:
    codes, scales = round_symmetric(weight, 4, 32)
    return codes.float() * scales.float().repeat_interleave(32, dim=1)


def test_calibrated_weights_are_nearer_to_the_drafter(drafter: MoADrafter, recordings: list[Recording]) -> None:
    recipe = PRESETS["phone"]
    expected = [rehearse(torch_backend_of(drafter, top_k=16), recording) for recording in recordings[:2]]
    errors = [
        compare(expected, torch_backend_of(module, top_k=16)).mean_logprob_error
        for module in (calibrate(copy.deepcopy(drafter), recordings, recipe), rounded(drafter))
    ]
    assert errors[0] < 0.9 * errors[1]


def test_only_parts_of_few_bits_change(drafter: MoADrafter, recordings: list[Recording]) -> None:
    head_only = calibrate(copy.deepcopy(drafter), recordings, Recipe(head=Weights(4)))
    assert not torch.equal(head_only.head, drafter.head)
    name = "self_attention.mlp.up_proj.weight"
    assert torch.equal(head_only.get_parameter(name), drafter.get_parameter(name))
    both = calibrate(copy.deepcopy(drafter), recordings, PRESETS["phone"])
    assert not torch.equal(both.get_parameter(name), drafter.get_parameter(name))
    server_half = "layer_self_attention.mlp.up_proj.weight"
    assert torch.equal(both.get_parameter(server_half), drafter.get_parameter(server_half))


def test_which_recipes_are_calibrated() -> None:
    assert needs_calibration(PRESETS["phone"]) and needs_calibration(Recipe(head=Weights(4)))
    assert not needs_calibration(PRESETS["laptop"]) and not needs_calibration(Recipe(embedding=Weights(4)))
