"""The target's states that a drafter reads: keys and values of some layers, and hidden states."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from moa_drafter.config import FitError, Reads
from moa_drafter.target import Target


@dataclass(frozen=True)
class TargetStates:
    """States of ``T`` tokens.

    Attributes:
        kv: keys (after RoPE) and values of :attr:`Reads.kv_layers`, ``[T, layers, 2 * kv_heads * head_dim]``.
        inner: outputs of :attr:`Reads.inner_layers`, ``[T, layers, hidden]``.
        last: the normed last hidden states, ``[T, hidden]``.
    """

    kv: Tensor
    inner: Tensor
    last: Tensor

    def to(self, where: torch.device | torch.dtype) -> TargetStates:
        """Return the states on another device, or in another type."""
        return TargetStates(self.kv.to(where), self.inner.to(where), self.last.to(where))


def layer_keys_values(cache: Any, layers: Sequence[int]) -> Tensor:
    """Return keys (after RoPE), then values, of a transformers cache: ``[sequences * T, layers, key_value_size]``."""
    parts = []
    for index in layers:
        layer = cache.layers[index]
        both = torch.cat((layer.keys, layer.values), dim=1)  # [sequences, 2 * kv_heads, T, head_dim]
        parts.append(both.transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.stack(parts, dim=1)


def full_cache(config: Any) -> DynamicCache:
    """Make an empty cache of transformers in which layers with a window keep all tokens."""
    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if type(each) is DynamicSlidingWindowLayer else each for each in cache.layers]
    return cache


def cache_name(model: Any) -> str:
    """Return what ``model.forward`` calls its cache in this release of transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def target_states(target: Target, tokens: Sequence[int], reads: Reads) -> TargetStates:
    """Compute the states of one conversation, in the target's type and on its device."""
    return packed_target_states(target, [tokens], reads)


@torch.no_grad()
def packed_target_states(target: Target, texts: Sequence[Sequence[int]], reads: Reads) -> TargetStates:
    """Compute the states of several conversations in one forward: end to end, without padding. Raises FitError if the
    target has no such inner states."""
    longest = max(map(len, texts))
    # Padding comes after every text, where causal attention does not look.
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=target.device)
    # Made on the CPU, so that the number of real tokens is known without waiting for the device.
    real = (torch.arange(longest) < torch.tensor([len(text) for text in texts])[:, None]).flatten().nonzero()[:, 0]
    real = real.to(ids.device)
    layers, inner = reads.kv_layers, reads.inner_layers
    cache = full_cache(target.config) if layers else None
    held = {cache_name(target.model.model): cache}
    out = target.model.model(input_ids=ids, use_cache=bool(layers), output_hidden_states=bool(inner), **held)
    if inner and out.hidden_states[1].dim() != out.last_hidden_state.dim():  # Gemma 3n
        raise FitError(
            "between the layers of this target a token has several hidden states, which no drafter reads: train moa "
            "or independent",
            code="unsupported_target",
        )
    last = out.last_hidden_state.flatten(0, 1)[real]
    # The first of transformers' hidden states is the embedding.
    hidden = [out.hidden_states[1 + layer].flatten(0, 1)[real] for layer in inner]
    return TargetStates(
        layer_keys_values(cache, layers)[real] if layers else last.new_empty(len(last), 0, 0),
        torch.stack(hidden, dim=1) if inner else last.new_empty(len(last), 0, last.shape[1]),
        last,
    )
