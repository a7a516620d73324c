"""The attention mask of a tree of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moa_runtime.session.tree import chain


def tree_mask(cached: int, parents: Sequence[int]) -> Tensor:
    """Where the tokens of a tree behind ``cached`` tokens may look: all those, their ancestors, themselves.

    Returns:
        boolean ``[n, cached + n]``. ``tree_mask(1, [0, 1, 1])`` is ``[[1,1,0,0], [1,1,1,0], [1,1,0,1]]``.
    """
    count = len(parents)
    mask = torch.ones(count, cached + count, dtype=torch.bool)
    own = mask[:, cached:]
    if list(parents) == chain(count):
        own.copy_(own.tril())
        return mask
    own.copy_(torch.eye(count, dtype=torch.bool))
    for index, parent in enumerate(parents):
        if parent:
            own[index] |= own[parent - 1]
    return mask
