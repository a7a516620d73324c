"""Rounding to integers with scales, against rounding by hand."""

from __future__ import annotations

import pytest
import torch

from moa_export import quantize as rounding
from moa_export.quantize import round_calibrated, round_symmetric

WEIGHT = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 1, 40)[:, None]


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


def inputs() -> torch.Tensor:
    """Correlated, as activations are."""
    random = torch.Generator().manual_seed(2)
    return torch.randn(500, 64, generator=random) @ torch.randn(64, 64, generator=random)


def test_what_is_rounded_on_real_inputs_changes_their_products_less() -> None:
    x = inputs()
    calibrated = round_calibrated(WEIGHT, 4, 32, x.double().T @ x.double())
    ours, theirs = ((x @ (one - WEIGHT).T).square().sum() for one in (calibrated, restored(4, 32)))
    assert ours < 0.85 * theirs


def test_what_was_rounded_on_real_inputs_is_stored_as_it_is() -> None:
    x = inputs()
    calibrated = round_calibrated(WEIGHT, 4, 32, x.double().T @ x.double())
    kept = torch.isclose(restored(4, 32, calibrated), calibrated, rtol=1e-3, atol=1e-6)
    assert kept.float().mean() > 0.97


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_rounded_in_parts_as_they_are_at_once(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    x = inputs()
    moment = x.double().T @ x.double()
    whole = restored(bits, 32), round_calibrated(WEIGHT, bits, 32, moment)
    monkeypatch.setattr(rounding, "_ROWS_AT_ONCE", 12)
    parts = restored(bits, 32), round_calibrated(WEIGHT, bits, 32, moment)
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_inputs_that_never_moved_do_no_harm() -> None:
    assert torch.equal(round_calibrated(WEIGHT, 4, 32, torch.eye(64).double()), restored(4, 32))


def test_zeros_stay_zeros() -> None:
    assert (restored(4, 32, torch.zeros(3, 32)) == 0).all()
