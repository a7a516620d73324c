"""The forward pass of any target through transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from moa_drafter.devices import lay_out_for_few_rows
from moa_drafter.target import Target
from moa_runtime.session.tree import chain, depths
from moa_server.engine.attention import tree_mask
from moa_server.engine.kv_cache import KVCache, KVCacheShape, fetched, keep_last
from moa_server.engine.target_pass import LogitRows, Piece


class GeneralPass:
    """A :class:`moa_server.engine.target_pass.TargetPass`: one forward for each piece, in the target's own type.

    On a CPU the target's layers are laid out for few rows (:mod:`moa_drafter.devices`).

    Args:
        keep_last: whether caches keep the last hidden states.

    Raises:
        ValueError: the layers' keys and values differ in shape.
    """

    has_own_weights = False
    batch_invariant = windows = False
    row_multiple = 1

    def __init__(self, target: Target, *, keep_last: bool = False) -> None:
        self._target = target
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
        last = config.hidden_size if keep_last else 0
        self.cache_shape = KVCacheShape(
            config.num_hidden_layers, shape[1], shape[3], dtype, target.device, blocks=False, last_size=last
        )

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> tuple[Tensor, int]:
        """See :meth:`moa_server.engine.target_pass.TargetPass.forward`; as many forwards as pieces."""
        hidden = torch.cat([self._forward(piece) for piece in pieces])
        keep_last(pieces, hidden)
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
        # A mask of our own makes transformers build none. A single token needs none at all.
        mask = None if len(piece) == 1 else self._mask(piece.cached, parents)
        layers = range(self.cache_shape.layers)
        out = self._target.model.model(
            input_ids=torch.tensor([[*piece.chain, *piece.tree]], device=device),
            position_ids=positions[None],
            attention_mask=mask,
            past_key_values=Cache(layers=[_CacheLayer(piece.cache, index, piece.cached) for index in layers]),
            use_cache=True,
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _mask(self, cached: int, parents: Sequence[int]) -> Tensor:
        """See :func:`tree_mask`: ``[1, 1, n, cached + n]``, as the target's attention wants it."""
        model = self._target.model
        seen = tree_mask(cached, parents)[None, None].to(model.device)
        if model.config._attn_implementation == "sdpa":
            return seen
        hidden = torch.zeros(seen.shape, dtype=model.dtype, device=model.device)
        return hidden.masked_fill_(~seen, torch.finfo(model.dtype).min)  # added to the scores


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
