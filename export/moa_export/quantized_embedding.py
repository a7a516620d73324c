"""A token embedding in few bits; only the rows that are asked for are widened."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moa_export.errors import ExportError
from moa_export.quantize import round_symmetric
from moa_export.recipe import Weights


class QuantisedEmbedding(nn.Module):
    """A symmetric integer table with scales, in plain gather and arithmetic that every runtime knows.

    Args:
        table: ``[vocab_size, hidden]``, float.
        weights: 8 or 4 bits. A group shares a scale along ``hidden``; groups of 0 are whole rows.

    Raises:
        ExportError: the group size does not divide ``hidden``.
    """

    rows: Tensor
    scales: Tensor

    def __init__(self, table: Tensor, weights: Weights) -> None:
        super().__init__()
        hidden = table.shape[1]
        self.bits, self.group = weights.bits, weights.group_size or hidden
        if hidden % self.group:
            raise ExportError(f"a group size of {self.group} does not divide the embedding's width of {hidden}")
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
