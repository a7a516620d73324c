"""The forward pass of any target through transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from moa_drafter.devices import lay_out_for_few_rows
from moa_drafter.target import Target
from moa_runtime.session.tree import chain, depths
from moa_server.engine.attention import tree_mask
from moa_server.engine.kv_cache import KVCache, KVCacheShape, fetched, keep_features
from moa_server.engine.target_pass import Fusion, LogitRows, Piece


class GeneralPass:
    """A :class:`moa_server.engine.target_pass.TargetPass`: one forward for each piece, in the target's own type.

    On a CPU the target's layers are laid out for few rows (:mod:`moa_drafter.devices`).

    Args:
        keep_last: whether caches keep the last hidden states, as features.
        fusion: makes the features that they keep instead.

    Attributes:
        windows: see :class:`moa_server.engine.target_pass.TargetPass`; false until a trial has shown it.

    Raises:
        ValueError: the layers' keys and values differ in shape.
    """

    has_own_weights = batch_invariant = windows = False
    row_multiple = 1

    def __init__(self, target: Target, *, keep_last: bool = False, fusion: Fusion | None = None) -> None:
        self._target, self._fusion = target, fusion
        if target.device.type == "cpu":
            for layer in target.layers:  # the head stays as it is: where it is the embedding too, rows are picked of it
                lay_out_for_few_rows(layer)
        ids, cache = torch.zeros(1, 1, dtype=torch.int64, device=target.device), DynamicCache()
        with torch.inference_mode():
            cache = target.model.model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
        shapes = {tuple(part.shape) for layer in cache.layers for part in (layer.keys, layer.values)}
        if len(shapes) != 1:
            raise ValueError("keys and values of different shapes in one target are not supported")
        (shape,) = shapes
        config, dtype = target.model.config, target.model.dtype
        self.dtype, self.device = str(dtype).removeprefix("torch."), target.device.type
        size = config.hidden_size if keep_last else 0
        size = size if fusion is None else fusion.size
        self.cache_shape = KVCacheShape(
            config.num_hidden_layers, shape[1], shape[3], dtype, target.device, blocks=False, feature_size=size
        )

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> tuple[Tensor, int]:
        """See :meth:`moa_server.engine.target_pass.TargetPass.forward`; as many forwards as pieces."""
        hidden = torch.cat([self._forward(piece) for piece in pieces])
        return hidden, len(pieces)

    @torch.inference_mode()
    def logits(self, parts: Sequence[Tensor]) -> LogitRows:
        """See :meth:`moa_server.engine.target_pass.TargetPass.logits`."""
        return fetched(self._target.logits(torch.cat(list(parts))).float())

    def _forward(self, piece: Piece) -> Tensor:
        device = self._target.device
        root = len(piece.chain)
        parents = chain(root) + [root + parent for parent in piece.parents]
        positions = torch.tensor(depths(parents), device=device) + (piece.cached - 1 + piece.shift)
        # Masks of our own make transformers build none. It builds the right one for a single token.
        mask = None if len(piece) == 1 else self._masks(piece.cached, parents)
        layers, wanted = range(self.cache_shape.layers), () if self._fusion is None else self._fusion.inner_layers
        out = self._target.model.model(
            input_ids=torch.tensor([[*piece.chain, *piece.tree]], device=device),
            position_ids=positions[None],
            attention_mask=mask,
            past_key_values=Cache(layers=[_CacheLayer(piece.cache, index, piece.cached) for index in layers]),
            use_cache=True,
            output_hidden_states=bool(wanted),
        )
        hidden: Tensor = out.last_hidden_state[0]
        if self._fusion is not None:  # the first of transformers' hidden states is the embedding
            keep_features([piece], self._fusion([out.hidden_states[1 + layer][0] for layer in wanted]))
        elif self.cache_shape.feature_size:
            keep_features([piece], hidden)
        return hidden

    def _masks(self, cached: int, parents: Sequence[int]) -> Tensor | dict[str, Tensor]:
        """Return the mask ``[1, 1, n, cached + n]`` of each kind of layer, or of the only one."""
        config = self._target.model.config
        seen = tree_mask(cached, parents)
        queries = cached - 1 + torch.tensor(depths(parents))
        distances = queries[:, None] - torch.cat((torch.arange(cached), queries))
        masks = {kind: self._mask(seen & _near(kind, config, queries, distances)) for kind in _kinds(config)}
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _mask(self, seen: Tensor) -> Tensor:
        """Return a boolean mask ``[n, cached + n]`` as the target's attention takes it."""
        model = self._target.model
        seen = seen[None, None].to(model.device)
        if model.config._attn_implementation == "sdpa":
            return seen
        hidden = torch.zeros(seen.shape, dtype=model.dtype, device=model.device)
        return hidden.masked_fill_(~seen, torch.finfo(model.dtype).min)  # added to the scores


#: Kinds of layers that see less than all tokens before a token, and the field that says how many.
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def _kinds(config: Any) -> set[str]:
    """Return the kinds of a target's layers; without a list of them all have the window that is given."""
    listed = getattr(config, "layer_types", None) or ()
    return set(listed) or {next((kind for kind, name in _WINDOWS.items() if getattr(config, name, None)), "")}


def _near(kind: str, config: Any, queries: Tensor, distances: Tensor) -> Tensor:
    """Return which keys lie in the window, or in the chunk, of queries at positions ``[n]`` in layers of a kind:
    boolean, of the shape ``[n, keys]`` of their distances."""
    size = getattr(config, _WINDOWS[kind], None) if kind in _WINDOWS else None
    if not size:
        return torch.ones_like(distances, dtype=torch.bool)
    if kind == "chunked_attention":
        return distances <= queries[:, None] % size
    return distances < size


@contextlib.contextmanager
def narrow_windows(config: Any, size: int) -> Iterator[bool]:
    """Make all windows and chunks of a target ``size`` tokens for a while, so that short texts cross them. Yield
    whether it has any."""
    own = {name: getattr(config, name) for name in _WINDOWS.values() if getattr(config, name, None)}
    try:
        for name in own:
            setattr(config, name, size)
        yield bool(own)
    finally:
        for name, was in own.items():
            setattr(config, name, was)


class _CacheLayer(DynamicLayer):
    """One layer of a cache for transformers: ``keys`` and ``values`` are ``[1, kv_heads, length, head_dim]``."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: KVCache, index: int, cached: int) -> None:
        super().__init__()
        self._halves = cache.keys[index], cache.values[index]  # [1, kv_heads, capacity, head_dim]
        self.dtype, self.device, self.is_initialized = cache.shape.dtype, cache.shape.device, True
        self._end_at(cached)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append ``[1, kv_heads, n, head_dim]`` and return all keys and values."""
        start = self.keys.shape[-2]
        self._end_at(start + key_states.shape[-2])
        self.keys[:, :, start:], self.values[:, :, start:] = key_states, value_states
        return self.keys, self.values

    def _end_at(self, length: int) -> None:
        self.keys, self.values = (half[:, :, :length] for half in self._halves)
