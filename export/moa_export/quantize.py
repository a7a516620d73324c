"""Rounding matrices, and the token embedding, to few bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moa_export.recipe import Weights

# The smallest normal float16: Apple's Neural Engine takes smaller numbers for zero.
_LEAST_SCALE = 2.0**-14
# With few codes it pays to clip the largest of a group: its error against that of all others.
_CLIPPED_TO = (1.0, 0.975, 0.95, 0.925, 0.9, 0.875, 0.85, 0.825, 0.8, 0.775, 0.75)
_CLIPPED_BITS = 4
_ROWS_AT_ONCE = 8192
# Share of the mean second moment that is added to all, so that inputs that never moved do no harm.
_DAMPING = 0.01


def round_symmetric(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Round ``weight [rows, n]`` to integers that stand for ``code * scale``, with the least squared error.

    Args:
        bits: of a code; codes lie in ``-2**(bits-1) .. 2**(bits-1) - 1``.
        group_size: neighbours in a row that share a scale; 0 for the whole row.

    Returns:
        int8 codes ``[rows, n]`` and float16 scales ``[rows, n / group_size]``.
    """
    # Rows do not depend on each other, and a large vocabulary would need many times its table in memory.
    parts = [_round_rows(rows, bits, group_size) for rows in weight.split(_ROWS_AT_ONCE)]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])


def _round_rows(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    most = 2 ** (bits - 1) - 1
    groups = weight.detach().float().unflatten(1, (-1, group_size or weight.shape[1]))
    largest = groups.abs().amax(dim=2, keepdim=True)
    best_codes, best_scales = _round(groups, largest / most, most)
    if bits <= _CLIPPED_BITS:
        least = _error(groups, best_codes, best_scales)
        for share in _CLIPPED_TO[1:]:
            codes, scales = _round(groups, largest * share / most, most)
            error = _error(groups, codes, scales)
            better = error < least
            least = torch.where(better, error, least)
            best_codes, best_scales = torch.where(better, codes, best_codes), torch.where(better, scales, best_scales)
    return best_codes.flatten(1).to(torch.int8), best_scales[:, :, 0]


@torch.no_grad()
def round_calibrated(weight: Tensor, bits: int, group_size: int, second_moment: Tensor) -> Tensor:
    """Round ``weight [rows, n]`` so that its products with real inputs change least (GPTQ, arXiv 2210.17323).

    Input by input, what rounding takes away is made up for by the weights of the inputs that are still to come. The
    scales are those of :func:`round_symmetric`, which finds the same codes again in nearly every group.

    Args:
        second_moment: sum of ``x x^T`` over real inputs ``x``, float64 ``[n, n]``.

    Returns:
        ``code * scale``, float32 ``[rows, n]``.
    """
    damped = second_moment + _DAMPING * second_moment.diagonal().mean() * torch.eye(len(second_moment)).double()
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
    # As in round_symmetric, rows do not depend on each other.
    rounded = torch.empty(weight.shape)
    for place, rows in zip(rounded.split(_ROWS_AT_ONCE), weight.split(_ROWS_AT_ONCE), strict=True):
        place.copy_(_round_compensated(rows, bits, group_size, inverse))
    return rounded


def _round_compensated(weight: Tensor, bits: int, group_size: int, inverse: Tensor) -> Tensor:
    width = group_size or weight.shape[1]
    most = 2 ** (bits - 1) - 1
    scales = _round_rows(weight, bits, group_size)[1].float()
    left = weight.detach().float().clone()
    rounded = torch.empty_like(left)
    for start in range(0, left.shape[1], width):
        stop = start + width
        scale = scales[:, start // width]
        errors = torch.empty(len(left), width)
        for at in range(start, stop):
            rounded[:, at] = (left[:, at] / scale).round().clamp(-most - 1, most) * scale
            errors[:, at - start] = (left[:, at] - rounded[:, at]) / inverse[at, at]
            left[:, at:stop] -= errors[:, at - start, None] * inverse[at, at:stop]
        left[:, stop:] -= errors @ inverse[start:stop, stop:]
    return rounded


def _round(groups: Tensor, scales: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Codes in steps of the scale as it is stored, not of the exact one."""
    stored = scales.clamp(min=_LEAST_SCALE).half()
    return (groups / stored.float()).round().clamp(-most - 1, most), stored


def _error(groups: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return (codes * scales.float() - groups).square().sum(dim=2, keepdim=True)


class QuantisedEmbedding(nn.Module):
    """A token embedding in few bits with scales: gather and arithmetic that every runtime has, and only the
    rows that are looked up are widened.

    Args:
        table: ``[vocab_size, hidden]``, float.
        weights: 8 or 4 bits. A group shares a scale along ``hidden``, which it divides; groups of 0 are whole rows.
    """

    rows: Tensor
    scales: Tensor

    def __init__(self, table: Tensor, weights: Weights) -> None:
        super().__init__()
        self.bits, self.group = weights.bits, weights.group_size or table.shape[1]
        rows, scales = round_symmetric(table, weights.bits, weights.group_size)
        if weights.bits == 4:
            # The first half of a row in the low nibbles, the second in the high ones: unpacking is a concatenation.
            low, high = (rows + 8).to(torch.uint8).chunk(2, dim=1)
            rows = low | (high << 4)
        self.register_buffer("rows", rows)
        self.register_buffer("scales", scales)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[T]`` -> float32 ``[T, hidden]``."""
        rows = self.rows[tokens]
        if self.bits == 4:
            wide = rows.to(torch.int32)
            rows = torch.cat((wide & 15, wide >> 4), dim=1) - 8
        grouped = rows.float().unflatten(1, (-1, self.group))
        return (grouped * self.scales[tokens].float()[:, :, None]).flatten(1)
