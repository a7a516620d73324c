"""Training forward of drafters that feed estimates of features back: unrolled as they draft (arXiv 2503.01840, 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moa_drafter.llama import KeysValues

if TYPE_CHECKING:
    from moa_drafter.training.batch import Batch

Angles = tuple[Tensor, Tensor]
#: What a layer reads of each token: one or several arrays ``[n, ...]``.
LayerInputs = tuple[Tensor, ...]


def unroll(
    batch: Batch,
    features: Tensor,
    angles: Angles,
    *,
    inputs: Callable[[Tensor, Tensor], LayerInputs],
    keys_values: Callable[[LayerInputs, Angles], KeysValues],
    estimates: Callable[[LayerInputs, KeysValues, Angles, Tensor], Tensor],
    hide_first: bool = False,
) -> Tensor:
    """Compute the estimates ``[Q, hidden]`` of ``batch.queries``; one pass for each depth, so as many as the longest
    segment has tokens.

    A query at depth d attends to the entries of true features up to depth 1 of its segment, then to its segment's own.
    A segment sees all features before it, even if fewer should be visible, and at depth 0 no more than at 1.

    Args:
        features: of all tokens, ``[T, hidden]``.
        angles: of all tokens.
        inputs: of tokens ``[n]`` and the features or estimates before them ``[n, hidden]``, which are zero before the
            first token.
        keys_values: of inputs, with their angles.
        estimates: of inputs; keys and values; the inputs' angles; and a mask, true where a token may look.
        hide_first: whether only the first token of a conversation attends to itself.
    """
    positions = batch.positions
    earlier = features.roll(1, 0).masked_fill((positions == 0)[:, None], 0.0)
    x = inputs(batch.tokens, earlier)
    entries = [keys_values(x, angles)]
    depths, segments = _depths_in_segments(positions[batch.queries], batch.depths)
    order = depths.argsort(stable=True)
    passes = order.split(depths.bincount().tolist()[1:])
    predicted: list[Tensor] = []
    drafted = segments[:0]  # of each entry made from an estimate, the segment
    for depth, queries in enumerate(passes, 1):
        at = batch.queries[queries]
        if depth == 1:
            own = tuple(part[at] for part in x)
        else:
            # The previous query is one less deep in the same segment.
            before = predicted[-1][torch.searchsorted(passes[depth - 2], queries - 1)]
            own = inputs(batch.tokens[at], before)
        own_angles = (angles[0][at], angles[1][at])
        mask = batch.self_mask[at] & (positions <= (positions[at] - depth + 1)[:, None])
        if hide_first:
            mask &= (positions > 0) | (torch.arange(len(positions), device=at.device) == at[:, None])
        if depth > 1:
            entries.append(keys_values(own, own_angles))
            drafted = torch.cat((drafted, segments[queries]))
            mask = torch.cat((mask, segments[queries][:, None] == drafted), dim=1)
        keys, values = (torch.cat(parts) for parts in zip(*entries, strict=True))
        predicted.append(estimates(own, (keys, values), own_angles, mask))
    return torch.cat(predicted)[order.argsort()]


def _depths_in_segments(positions: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the depth in its segment, from 1, and the segment of each query ``[Q]``, in the order of the text.

    A segment is a run of queries that see the same rows: positions 5, 6, 7 and 8 at depths 1, 2, 1 and 0 give depths
    1, 2, 1, 1 and segments 1, 1, 2, 3.
    """
    at = torch.arange(len(positions), device=positions.device)
    limits = positions - depths
    begins = torch.ones_like(at, dtype=torch.bool)
    begins[1:] = (positions.diff() != 1) | (limits.diff() != 0)
    starts = torch.where(begins, at, 0).cummax(0).values
    return at - starts + 1, begins.cumsum(0)
