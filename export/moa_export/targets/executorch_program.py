"""The device half as an ExecuTorch program: two methods in operators that one delegate can take whole.

The network is the drafter's own, written so that nothing in it makes XNNPACK's partitioner cut the graph: its rules
are in ``executorch.backends.xnnpack.partition.config`` (1.5). Means over the last axis and slices of tensors whose
size varies are refused there, so both are written as products with constant matrices. What stays outside is what
comes before and after: the embedding, the log-softmax over the draft vocabulary and the choice of the best.

Two methods, because the self-attention is the first layer: what it keeps of a token depends on that token alone. So
``extend`` makes cache entries of any number of tokens at the price of two small products, and only the few tokens
whose successors are wanted go through ``draft``.

Sizes: ``T`` tokens, ``Q`` queries, ``S`` positions of the self-attention's cache, ``M`` memory rows, ``KV`` key-value
heads, ``G`` query heads a key-value head, ``D`` numbers a head, ``K`` candidates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moa_drafter.llama import Attention, DecoderLayer, RMSNorm, rotary_angles
from moa_drafter.model import MoADrafter


class Norm(nn.Module):
    """Root-mean-square norm over the last axis."""

    mean: Tensor

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        size = norm.weight.numel()
        self.weight, self.eps = norm.weight, norm.eps
        self.register_buffer("mean", torch.full((1, size), 1 / size))

    def forward(self, x: Tensor) -> Tensor:
        mean_square = nn.functional.linear(x * x, self.mean)
        return x * torch.rsqrt(mean_square + self.eps) * self.weight
