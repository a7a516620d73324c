"""Turning the residual stream, so that it rounds well.

A few coordinates of the residual stream are many times larger than the rest. If a whole row shares one scale, as
XNNPACK's activations and 8-bit weights do, the others are left with a handful of steps. A rotation spreads what is
large over all coordinates, and costs nothing when drafting: norms without weights commute with it, and the matrices
that read from the stream or write to it take it up (QuaRot, arXiv 2404.00456, section 4, without its online part).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moa_drafter.architectures.eagle3 import Eagle3Drafter
from moa_drafter.drafter import Drafter
from moa_drafter.llama import RMSNorm


@torch.no_grad()
def rotate_residual_stream(drafter: Drafter) -> Drafter:
    """Change a drafter: its device half computes the same from a rotated embedding, and its norms have no weights.

    An EAGLE-3 head stays as it is: the verifier, which makes its features, does not turn them.

    Cached keys and values and memory rows are what they were. The server half is of no use afterwards.

    Returns:
        the drafter given: with a large vocabulary a second one would not fit in memory.
    """
    if isinstance(drafter, Eagle3Drafter):
        return drafter
    rotation = random_rotation(drafter.config.decoder.hidden_size).to(drafter.embedding)
    # Replaced, not overwritten: the embedding may be the target's own.
    drafter.embedding = drafter.embedding @ rotation
    for layer in drafter.device_layers:
        attention, mlp = layer.self_attn, layer.mlp
        readers = {
            layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
            layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
        }
        for norm, linears in readers.items():
            for linear in linears:
                linear.weight.copy_(linear.weight * norm.weight @ rotation)
            norm.weight.fill_(1)
        for writer in (attention.o_proj, mlp.down_proj):
            writer.weight.copy_(rotation.T @ writer.weight)
    if isinstance(drafter.norm, RMSNorm):
        drafter.head = drafter.head * drafter.norm.weight
        drafter.norm.weight.fill_(1)
    drafter.head = drafter.head @ rotation
    return drafter


def random_rotation(size: int) -> Tensor:
    """A random orthogonal matrix ``[size, size]``, float64, always the same."""
    random = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(random).Q
