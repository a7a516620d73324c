"""The forward pass of any target through transformers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionAndFullAttentionLayer

from moa_drafter.devices import lay_out_for_few_rows
from moa_drafter.target import Target
from moa_drafter.target_features import cache_name, full_cache
from moa_runtime.session.tree import chain, depths
from moa_server.engine.attention import tree_mask
from moa_server.engine.kv_cache import fetched
from moa_server.engine.layer_cache import LayerCache, LayerCacheShape, RecurrentState
from moa_server.engine.target_pass import BLOCK, Fusion, LogitRows, Piece, keep_features


class GeneralPass:
    """A :class:`moa_server.engine.target_pass.TargetPass`: one forward for each piece, in the target's own type.

    On a CPU the target's layers are laid out for few rows (:mod:`moa_drafter.devices`).

    Recurrent layers (Mamba, gated delta rule, short convolutions) have a state after a token and no way back. Prompts
    are computed in chunks that end at multiples of 64 tokens. States are kept every 256 tokens, at the end of a piece,
    and after each token of a draft until the verdict. Drafted tokens are computed one by one; if all recurrent layers
    are convolutions, in one forward, whose inputs are the states.

    Args:
        fusion: makes the features that caches keep.

    Attributes:
        windows: see :class:`moa_server.engine.target_pass.TargetPass`; false until a trial has shown it.

    Raises:
        ValueError: a layer's cache is of another kind than keys and values, or recurrent states.
    """

    name = "general"
    has_own_weights = batch_invariant = windows = False

    def __init__(self, target: Target, *, fusion: Fusion | None = None) -> None:
        self._target, self._fusion = target, fusion
        if target.device.type == "cpu":
            for layer in target.layers:  # the head stays as it is: where it is the embedding too, rows are picked of it
                lay_out_for_few_rows(layer)
        config, dtype = target.model.config, target.model.dtype
        ids, cache = torch.zeros(1, 1, dtype=torch.int64, device=target.device), full_cache(config)
        self._cache_name = cache_name(target.model.model)
        with torch.inference_mode():
            target.model.model(input_ids=ids, use_cache=True, **{self._cache_name: cache})
        shapes = [_shape(layer) for layer in cache.layers]
        self._recurrent = {index: layer for index, layer in enumerate(cache.layers) if _is_recurrent(layer)}
        states = [_state(layer) for layer in self._recurrent.values()]
        self._convolutions = all(kind == _CONVOLUTION for state in states for kind, _ in state)
        self.trees = not self._recurrent
        self.dtype, self.device = str(dtype).removeprefix("torch."), target.device.type
        self.cache_shape = LayerCacheShape(
            tuple(shapes),
            dtype,
            target.device,
            0 if fusion is None else fusion.size,
            sum(tensor.nbytes for state in states for tensor in state.values()),
        )

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> tuple[Tensor, int]:
        """See :meth:`moa_server.engine.target_pass.TargetPass.forward`; as many forwards as pieces, more for recurrent
        layers."""
        parts = [part for piece in pieces for part in (self._parts(piece) if self._recurrent else [piece])]
        return torch.cat([self._forward(part) for part in parts]), len(parts)

    def _parts(self, piece: Piece) -> Iterator[Piece]:
        """Cut a piece for recurrent layers."""
        start, end = 0, len(piece.chain) - piece.drafted
        piece.cache.drop_states(piece.cached)
        while start < len(piece.chain):
            if start < end:
                stop = min(end, start + BLOCK - (piece.cached + start) % BLOCK)
            else:
                stop = len(piece.chain) if self._convolutions else start + 1
            drafted = stop - start if start >= end else 0
            own = piece.chain[start:stop]
            yield dataclasses.replace(piece, cached=piece.cached + start, chain=own, drafted=drafted)
            start = stop

    @torch.inference_mode()
    def logits(self, parts: Sequence[Tensor]) -> LogitRows:
        """See :meth:`moa_server.engine.target_pass.TargetPass.logits`."""
        return fetched(self._target.logits(torch.cat(list(parts))).float())

    def _forward(self, piece: Piece) -> Tensor:
        device = self._target.device
        root = len(piece.chain)
        parents = chain(root) + [root + parent for parent in piece.parents]
        positions = torch.tensor(depths(parents), device=device) + (piece.cached - 1 + piece.shift)
        # Masks of our own make transformers build none. It builds the right ones for chains.
        mask = self._masks(piece.cached, parents) if self.trees and len(piece) > 1 else None
        wanted = () if self._fusion is None else self._fusion.inner_layers
        cache = self._cache(piece)
        out = self._target.model.model(
            input_ids=torch.tensor([[*piece.chain, *piece.tree]], device=device),
            position_ids=positions[None],
            attention_mask=mask,
            use_cache=True,
            output_hidden_states=bool(wanted),
            **{self._cache_name: cache},
        )
        if self._recurrent:
            self._keep_states(piece, cache)
        hidden: Tensor = out.last_hidden_state[0]
        if self._fusion is not None:  # the first of transformers' hidden states is the embedding
            keep_features([piece], self._fusion([out.hidden_states[1 + layer][0] for layer in wanted]))
        return hidden

    def _cache(self, piece: Piece) -> Cache:
        """Return transformers' view of a piece's cache."""
        own: LayerCache = piece.cache
        held = own.states[piece.cached] if self._recurrent and piece.cached else None
        cache = Cache(layers=[_CacheLayer(own, index, piece.cached) for index in range(len(own.layers))])
        for number, (index, layer) in enumerate(self._recurrent.items()):
            resumed = _resumed(layer, held[number] if held else {})
            if own.layers[index]:
                _use_keys(resumed, cache.layers[index])
            cache.layers[index] = resumed
            resumed.record_past = self._convolutions and piece.drafted > 0
        return cache

    def _keep_states(self, piece: Piece, cache: Cache) -> None:
        """Keep the states of recurrent layers after a part of a piece, after each of its tokens if they are drafted."""
        count, states = len(piece), [_state(cache.layers[index]) for index in self._recurrent]
        if not (self._convolutions and piece.drafted):
            piece.cache.states[piece.cached + count] = states
            return
        for done in range(1, count + 1):  # the inputs of a convolution so far: those before the piece, and its own
            piece.cache.states[piece.cached + done] = [
                {name: tensor[..., done : tensor.shape[-1] - count + done].clone() for name, tensor in state.items()}
                for state in states
            ]

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


_CONVOLUTION = "conv_states"
_RECURRENT = (_CONVOLUTION, "recurrent_states")


def _is_recurrent(layer: Any) -> bool:
    return hasattr(layer, _RECURRENT[1])


def _shape(layer: Any) -> tuple[int, int, int] | None:
    """Return the heads of a layer's keys and values in transformers' cache, and the sizes of a key and a value."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return None
    if type(layer) is not (LinearAttentionAndFullAttentionLayer if _is_recurrent(layer) else DynamicLayer):
        raise ValueError(f"its layers keep a {type(layer).__name__}, which is not supported")
    return keys.shape[1], keys.shape[3], values.shape[3]


def _state(layer: Any) -> RecurrentState:
    """Return copies of the tensors of a recurrent layer of transformers' cache."""
    held = {(kind, index): tensor for kind in _RECURRENT for index, tensor in getattr(layer, kind).items()}
    return {name: tensor.clone() for name, tensor in held.items() if tensor is not None}


def _resumed(like: Any, state: RecurrentState) -> Any:
    """Return another recurrent layer of transformers' cache, with a state, or empty."""
    layer = copy.copy(like)
    for kind in _RECURRENT:
        setattr(layer, kind, {index: None for index in getattr(like, kind)})
        setattr(layer, f"is_{kind}_initialized", {index: False for index in getattr(like, kind)})
    layer.has_previous_state = {index: False for index in like.has_previous_state}
    for (kind, index), tensor in state.items():
        getattr(layer, kind)[index] = tensor.clone()  # updated in place
        getattr(layer, f"is_{kind}_initialized")[index] = layer.has_previous_state[index] = True
    return layer


def _use_keys(layer: Any, held: Any) -> None:
    """Have a recurrent layer that has keys and values, too (Falcon H1), use those of ``held``."""

    def update(key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        layer.keys, layer.values = held.update(key_states, value_states)
        return layer.keys, layer.values

    layer.keys, layer.values, layer.is_initialized, layer.update = held.keys, held.values, True, update


class _CacheLayer(DynamicLayer):
    """One layer of a cache for transformers: ``keys`` and ``values`` are ``[1, kv_heads, length, head_dim]``."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: LayerCache, index: int, cached: int) -> None:
        super().__init__()
        self._halves = cache.layers[index]
        if not self._halves:  # the layer reads those of another one
            return
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
