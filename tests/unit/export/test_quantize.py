"""Rounding to integers with scales, and calibration on conversations of the tiny target."""

from __future__ import annotations

import copy

import pytest
import torch

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_export import quantize
from moa_export.gptq import calibrate, needs_calibration
from moa_export.quantize import QuantisedEmbedding, round_calibrated, round_symmetric
from moa_export.quarot import random_rotation
from moa_export.recipe import PRESETS, Recipe, Weights
from moa_export.recordings import Recording, record
from moa_export.validation import compare, rehearse

WEIGHT = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 1, 40)[:, None]
#: Correlated, as activations are.
INPUTS = torch.randn(500, 64, generator=torch.Generator().manual_seed(2)) @ torch.randn(
    64, 64, generator=torch.Generator().manual_seed(3)
)
MOMENT = INPUTS.double().T @ INPUTS.double()


def restored(bits: int, group_size: int, weight: torch.Tensor = WEIGHT) -> torch.Tensor:
    codes, scales = round_symmetric(weight, bits, group_size)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float16
    assert codes.min() >= -(2 ** (bits - 1)) and codes.max() <= 2 ** (bits - 1) - 1
    width = group_size or weight.shape[1]
    assert scales.shape == (len(weight), weight.shape[1] // width)
    return codes.float() * scales.float().repeat_interleave(width, dim=1)


@pytest.mark.parametrize("group_size", [0, 16, 32])
def test_8_bits_are_off_by_half_a_step(group_size: int) -> None:
    largest = WEIGHT.abs().unflatten(1, (-1, group_size or 64)).amax(dim=2).repeat_interleave(group_size or 64, dim=1)
    assert ((restored(8, group_size) - WEIGHT).abs() <= 0.51 * largest / 127).all()


def test_4_bits_are_nearer_than_with_a_scale_that_fits_the_largest() -> None:
    scale = WEIGHT.abs().unflatten(1, (-1, 32)).amax(dim=2).repeat_interleave(32, dim=1) / 7
    plain = (WEIGHT / scale).round() * scale
    ours, theirs = ((one - WEIGHT).square().sum() for one in (restored(4, 32), plain))
    assert ours < 0.85 * theirs
    assert (restored(4, 32, torch.zeros(3, 32)) == 0).all()


def test_calibrated_rounding_changes_products_less_and_is_stored_as_it_is() -> None:
    calibrated = round_calibrated(WEIGHT, 4, 32, MOMENT)
    ours, theirs = ((INPUTS @ (one - WEIGHT).T).square().sum() for one in (calibrated, restored(4, 32)))
    assert ours < 0.85 * theirs
    kept = torch.isclose(restored(4, 32, calibrated), calibrated, rtol=1e-3, atol=1e-6)
    assert kept.float().mean() > 0.97
    # Inputs that never moved do no harm.
    assert torch.equal(round_calibrated(WEIGHT, 4, 32, torch.eye(64).double()), restored(4, 32))


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_rounded_in_parts_as_they_are_at_once(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    whole = restored(bits, 32), round_calibrated(WEIGHT, bits, 32, MOMENT)
    monkeypatch.setattr(quantize, "_ROWS_AT_ONCE", 12)
    for ours, theirs in zip((restored(bits, 32), round_calibrated(WEIGHT, bits, 32, MOMENT)), whole, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_quantised_embedding_is_within_half_a_step_of_the_table() -> None:
    table = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    table[7] = 0  # an unused token must not divide by zero
    embedding = QuantisedEmbedding(table, Weights(8, 0))
    step = table.abs().amax(1, keepdim=True) / 127
    assert embedding.rows.dtype == torch.int8
    assert ((embedding(torch.arange(50)) - table).abs() <= step / 2 + 1e-7).all()


def test_a_rotation_is_orthogonal() -> None:
    rotation = random_rotation(48)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(48, dtype=torch.float64))


@pytest.fixture(scope="module")
def recordings(target: Target, drafter: MoADrafter) -> list[Recording]:
    return record(target, drafter, ["Name three colours.", "Why is the sky blue?", "Who are you?"])


def test_a_calibrated_drafter_is_nearer_to_the_drafter(drafter: MoADrafter, recordings: list[Recording]) -> None:
    plain = copy.deepcopy(drafter)
    for module in plain.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = restored(4, 32, module.weight)
    plain.head = restored(4, 32, plain.head)
    calibrated = calibrate(copy.deepcopy(drafter), recordings, PRESETS["phone"])
    expected = [rehearse(torch_backend_of(drafter, top_k=16), recording) for recording in recordings[:2]]
    ours, theirs = (compare(expected, torch_backend_of(one, top_k=16)) for one in (calibrated, plain))
    assert ours.mean_logprob_error < 0.9 * theirs.mean_logprob_error


def test_only_parts_of_few_bits_are_calibrated(drafter: MoADrafter, recordings: list[Recording]) -> None:
    assert needs_calibration(PRESETS["phone"]) and needs_calibration(Recipe(head=Weights(4)))
    assert not needs_calibration(PRESETS["laptop"]) and not needs_calibration(Recipe(embedding=Weights(4)))
    head_only = calibrate(copy.deepcopy(drafter), recordings, Recipe(head=Weights(4)))
    assert not torch.equal(head_only.head, drafter.head)
    name = "self_attention.mlp.up_proj.weight"
    assert torch.equal(head_only.get_parameter(name), drafter.get_parameter(name))
    both = calibrate(copy.deepcopy(drafter), recordings, PRESETS["phone"])
    assert not torch.equal(both.get_parameter(name), drafter.get_parameter(name))
    server_half = "layer_self_attention.mlp.up_proj.weight"
    assert torch.equal(both.get_parameter(server_half), drafter.get_parameter(server_half))
