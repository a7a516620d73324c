"""What a drafter is given of the target: keys and values of some layers, and hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moa_drafter.target import Target


@dataclass(frozen=True)
class Reads:
    """Which of the target's states a drafter looks at.

    Attributes:
        kv_layers: layers, counted from 0, whose keys and values it reads.
        inner_layers: layers whose output it reads; the output of the last one, normed, is always there.
        last: whether its rows are made from the last hidden states, which a verifier then keeps.
    """

    kv_layers: tuple[int, ...] = ()
    inner_layers: tuple[int, ...] = ()
    last: bool = False

    def __bool__(self) -> bool:
        """Whether anything is read."""
        return bool(self.kv_layers or self.inner_layers or self.last)


@dataclass(frozen=True)
class TargetStates:
    """States of ``T`` tokens.

    Attributes:
        kv: keys (after RoPE) and values of :attr:`Reads.kv_layers`, ``[T, layers, 2 * kv_heads * head_dim]``.
        inner: outputs of :attr:`Reads.inner_layers`, ``[T, layers, hidden]``.
        last: the last hidden states behind the final norm, ``[T, hidden]``.
    """

    kv: Tensor
    inner: Tensor
    last: Tensor


def layer_keys_values(cache: Any, layers: Sequence[int]) -> Tensor:
    """Keys (after RoPE) and values of a transformers cache with one sequence.

    Returns:
        ``[T, len(layers), 2 * num_kv_heads * head_dim]``: all keys, then all values.
    """
    parts = []
    for index in layers:
        layer = cache.layers[index]
        both = torch.cat((layer.keys[0], layer.values[0]), dim=0)  # [2 * kv_heads, T, head_dim]
        parts.append(both.transpose(0, 1).flatten(1))
    return torch.stack(parts, dim=1)


@torch.no_grad()
def target_states(target: Target, tokens: Sequence[int], reads: Reads) -> TargetStates:
    """One forward of the target over one conversation."""
    ids = torch.tensor([tokens], device=target.device)
    out = target.model.model(input_ids=ids, use_cache=True, output_hidden_states=bool(reads.inner_layers))
    last = out.last_hidden_state[0]
    kv = layer_keys_values(out.past_key_values, reads.kv_layers) if reads.kv_layers else last.new_empty(len(last), 0, 0)
    # The first of transformers' hidden states is the embedding.
    inner = [out.hidden_states[1 + index][0] for index in reads.inner_layers]
    return TargetStates(kv, torch.stack(inner, dim=1) if inner else last.new_empty(len(last), 0, last.shape[1]), last)
