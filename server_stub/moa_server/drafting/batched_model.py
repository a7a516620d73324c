"""Batched drafter: steps of several conversations as one forward, with few large matrix products.

New tokens of all steps share the products with the matrices, which take nearly all of the time; each step attends to
its own caches, so nothing is padded. Weights are copied and packed (:mod:`moa_server.engine.packed_linear`). Products
are computed in a chosen type, for drafts do not decide the text; the rest is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moa_drafter.device_module import by_layer, in_place
from moa_drafter.llama import DecoderLayer, KeysValues, joined, rotary_angles, rotate
from moa_drafter.model import MoADrafter
from moa_drafter.target_features import TargetStates
from moa_runtime.backends.base import StepInputs, StepResult
from moa_server.drafting.batched_backend import BatchedBackend
from moa_server.engine.fused_llama import padded
from moa_server.engine.packed_linear import Product, product, product_of

#: Attention: maps rotated queries ``[n, heads, head_dim]`` to ``[n, heads * head_dim]``.
Attend = Callable[[Tensor], Tensor]


class PackedKeysValues:
    """Computes a decoder layer's keys and values, after its input norm."""

    def __init__(self, layer: DecoderLayer, dtype: torch.dtype) -> None:
        dims = layer.self_attn.dims
        self._shape, self._dtype, self._norm = (2, dims.num_kv_heads, dims.head_dim), dtype, layer.input_layernorm
        self._both = product_of(dtype, layer.self_attn.k_proj, layer.self_attn.v_proj)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> KeysValues:
        """``x [n, hidden]`` -> rotated keys and plain values, ``[n, kv_heads, head_dim]`` each."""
        keys, values = multiplied(self._both, self._norm(x), self._dtype).unflatten(-1, self._shape).unbind(1)
        return rotate(keys, *angles), values


class PackedLayer:
    """A decoder layer whose keys and values come from elsewhere."""

    def __init__(self, layer: DecoderLayer, dtype: torch.dtype) -> None:
        self._dims, self._dtype = layer.self_attn.dims, dtype
        self._queries = product_of(dtype, layer.self_attn.q_proj)
        self._out = product_of(dtype, layer.self_attn.o_proj)
        self._gate_up = product_of(dtype, layer.mlp.gate_proj, layer.mlp.up_proj)
        self._down = product_of(dtype, layer.mlp.down_proj)
        self._before_attention, self._before_mlp = layer.input_layernorm, layer.post_attention_layernorm

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """``x [n, hidden]`` -> ``[n, hidden]``; ``angles`` are the queries'."""
        q = multiplied(self._queries, self._before_attention(x), self._dtype)
        q = rotate(q.unflatten(-1, (self._dims.num_heads, self._dims.head_dim)), *angles)
        x = x + multiplied(self._out, attend(q), self._dtype)
        gate, up = multiplied(self._gate_up, self._before_mlp(x), self._dtype).chunk(2, -1)
        return x + multiplied(self._down, functional.silu(gate) * up, self._dtype)


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """``q [B, Q, heads, head_dim]`` attending to ``k, v [B, S, kv_heads, head_dim]`` -> ``[B, Q, heads * head_dim]``.

    Args:
        mask: boolean ``[Q, S]``, true where a query may attend; without it everywhere.
    """
    count, kv_heads = q.shape[1], k.shape[2]
    # Heads of one group become further queries, so keys and values are never repeated.
    grouped = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    wide = None if mask is None else mask.repeat(q.shape[2] // kv_heads, 1)
    mixed = functional.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=wide)
    return mixed.unflatten(2, (-1, count)).permute(0, 3, 1, 2, 4).flatten(2)


def multiplied(matrix: Product, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in ``dtype``, return float32; rows are padded, see :func:`moa_server.engine.fused_llama.padded`."""
    padding = padded(len(rows)) - len(rows)
    return matrix(functional.pad(rows, (0, 0, 0, padding)).to(dtype))[: len(rows)].float()


class Batch:
    """The inputs of several steps on the target's device, and the new keys and values of their layers.

    Attributes:
        tokens: of all steps, concatenated, ``[T]``.
        count, asked: number of tokens and of queries of each step.
        angles: of the attending tokens: of all, and after :meth:`only_queries` of the queries.
        rows: of each step, memory rows by layer, the cross-attention's first.
        new: by layer, in order, keys and values of the tokens, ``[T, kv_heads, head_dim]`` each.
    """

    def __init__(
        self,
        inputs: Sequence[StepInputs],
        angles_of: Callable[[Tensor], tuple[Tensor, Tensor]],
        heads: int,
        device: torch.device,
    ) -> None:
        def moved(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        self.tokens = moved(np.concatenate([each.tokens for each in inputs]))
        self.count = [len(each.tokens) for each in inputs]
        self.asked = [len(each.queries) for each in inputs]
        firsts = np.cumsum([0, *self.count[:-1]])
        queries = np.concatenate([first + each.queries for first, each in zip(firsts, inputs, strict=True)])
        self._queries, self._own_queries = moved(queries), [moved(each.queries) for each in inputs]
        self.angles = angles_of(moved(np.concatenate([each.positions for each in inputs])))
        self._attending, self._masks = self.count, [moved(each.self_mask) for each in inputs]
        self._cached = [by_layer(moved(each.self_keys), moved(each.self_values), heads) for each in inputs]
        self.rows = [by_layer(moved(each.memory_keys), moved(each.memory_values), heads) for each in inputs]
        self.new: list[KeysValues] = []

    def only_queries(self, x: Tensor) -> Tensor:
        """Return the rows of ``x [T, hidden]`` that are queries; they alone attend from now on."""
        cos, sin = self.angles
        self.angles, self._attending = (cos[self._queries], sin[self._queries]), self.asked
        self._masks = [mask[queries] for mask, queries in zip(self._masks, self._own_queries, strict=True)]
        return x[self._queries]

    def attend(self, seen: Sequence[KeysValues], q: Tensor, *, everywhere: bool = False) -> Tensor:
        """Let each step's tokens, ``q [n, heads, head_dim]``, attend to keys and values of its own -> ``[n, heads *
        head_dim]``; ``everywhere`` without a mask."""
        masks = [None] * len(seen) if everywhere else self._masks
        steps = zip(q.split(self._attending), seen, masks, strict=True)
        return torch.cat(
            [attended(own[None], keys[None], values[None], mask)[0] for own, (keys, values), mask in steps]
        )

    def seen(self, keys_values: PackedKeysValues, x: Tensor, rows: int) -> list[KeysValues]:
        """Return the keys and values of each step in the current layer: its cache, then its tokens, kept in ``new``.
        Not after :meth:`only_queries`.

        Args:
            x: ``[T, hidden]``.
            rows: which of the memory rows' layers stand in place of the first tokens; 0 for none.
        """
        own, at = keys_values(x, self.angles), len(self.new)
        self.new.append(own)
        steps = zip(self._cached, *(half.split(self.count) for half in own), strict=True)
        whole = [joined(cached[at], (keys, values)) for cached, keys, values in steps]
        return [_with_rows(rows, *each) for each in zip(self.rows, whole, strict=True)] if rows else whole


def _with_rows(at: int, rows: Sequence[KeysValues], own: KeysValues) -> KeysValues:
    """Return the keys and values of a step in layer ``at`` of the memory rows, which replace the first tokens."""
    given = rows[0][0][0].ne(0).any()  # without any row there is one of zeros, as in the reference
    keys, values = (in_place(*halves, given) for halves in zip(rows[at], own, strict=True))
    return keys, values


class OwnLayer:
    """A decoder layer that attends to its own keys and values of earlier and new tokens."""

    def __init__(self, layer: DecoderLayer, dtype: torch.dtype) -> None:
        self._layer, self._keys_values = PackedLayer(layer, dtype), PackedKeysValues(layer, dtype)

    def __call__(self, x: Tensor, batch: Batch, *, rows: int = 0, last: bool = False) -> Tensor:
        """``x [T, hidden]`` -> ``[T, hidden]``, or of the queries alone, ``[Q, hidden]``, if no later layer needs the
        other tokens (``last``); for ``rows`` see :meth:`Batch.seen`."""
        seen = batch.seen(self._keys_values, x, rows)
        if last:
            x = batch.only_queries(x)
        return self._layer(x, batch.angles, lambda q: batch.attend(seen, q))


class PackedRows:
    """Computes :meth:`moa_drafter.model.MoADrafter.rows`, but for rounding, with products of copied weights."""

    def __init__(self, drafter: MoADrafter, dtype: torch.dtype) -> None:
        config, dims = drafter.config, drafter.config.layer_attention
        lsa, self._dtype = drafter.layer_self_attention, dtype
        self._scale = drafter.layer_scale.detach() if config.layer_scale else None
        self._lsa, self._lsa_keys_values = PackedLayer(lsa, dtype), PackedKeysValues(lsa, dtype)
        self._to_hidden = product_of(dtype, drafter.Ekv2E)
        self._keys_values = PackedKeysValues(drafter.cross_attention, dtype)
        self._tail_shape = (len(config.tail_layers), 2, config.decoder.num_kv_heads, config.decoder.head_dim)
        self._angles, self._layers = drafter.angles, len(config.lsa_layers)
        layers = torch.arange(self._layers, device=drafter.Ekv2E.weight.device)
        self._layer_angles = rotary_angles(layers, dims.head_dim, config.rope_theta)

    @torch.inference_mode()
    def __call__(self, states: TargetStates, positions: Tensor) -> KeysValues:
        """See :meth:`moa_drafter.drafter.Drafter.rows`."""
        seen, tail = states.kv[:, : self._layers], states.kv[:, self._layers :]
        cut = (len(seen), self._layers)
        x = (seen if self._scale is None else seen * self._scale).flatten(0, 1)
        cos, sin = (part.repeat(len(seen), 1, 1) for part in self._layer_angles)
        keys, values = (part.unflatten(0, cut) for part in self._lsa_keys_values(x, (cos, sin)))
        x = self._lsa(x, (cos, sin), lambda q: attended(q.unflatten(0, cut), keys, values).flatten(0, 1))
        hidden = multiplied(self._to_hidden, x.unflatten(0, cut).mean(1), self._dtype)
        keys, values = self._keys_values(hidden, self._angles(positions))
        if not self._tail_shape[0]:
            return keys, values
        tail_keys, tail_values = (part.flatten(1, 2) for part in tail.view(-1, *self._tail_shape).float().unbind(2))
        return torch.cat((keys, tail_keys), dim=1), torch.cat((values, tail_values), dim=1)


#: Candidates for each node of a tree, as bundles have them.
TOP_K = 16


class SharedTargetWeights(Protocol):
    """Weights that a drafter shares with its target: ``embedding`` and ``head``, ``[vocab_size, hidden]`` each."""

    @property
    def device(self) -> torch.device: ...

    @property
    def embedding(self) -> Tensor: ...

    @property
    def head(self) -> Tensor: ...


class PackedDeviceModule(BatchedBackend):
    """Computes what :class:`moa_drafter.device_module.DeviceModule` computes, for several steps at once.

    Matrices are copied; the token embedding is the target's own memory.

    Args:
        drafter: whole, see :attr:`moa_drafter.model.MoADrafter.is_whole`; need not be bound otherwise.
        target: provides embedding, head and device.
        dtype: of the products.
        top_k: candidates per query, at most the draft vocabulary.
    """

    def __init__(self, drafter: MoADrafter, target: SharedTargetWeights, dtype: torch.dtype, *, top_k: int) -> None:
        config = drafter.config
        self.top_k = min(top_k, config.draft_vocab_size)
        self.kv_shape = (config.kv_heads, config.decoder.head_dim)
        self._dtype, self._device, self._layer_heads = dtype, target.device, config.decoder.num_kv_heads
        self._embedding, self._angles, self._norm = target.embedding.detach(), drafter.angles, drafter.norm
        self._self, *self._tail = (OwnLayer(layer, dtype) for layer in (drafter.self_attention, *drafter.tail))
        self._cross = PackedLayer(drafter.cross_attention, dtype)
        self._tokens = drafter.draft_to_target.to(target.device)
        self._head = product(target.head.detach()[self._tokens].to(dtype))
        self._sharpness = config.sharpness

    @torch.inference_mode()
    def steps(self, inputs: Sequence[StepInputs]) -> list[StepResult]:
        """See :meth:`BatchedBackend.steps`."""
        batch = Batch(inputs, self._angles, self._layer_heads, self._device)
        x = functional.embedding(batch.tokens, self._embedding).float()
        x = self._self(x, batch, last=not self._tail)  # the other tokens only had to leave their keys and values
        rows = [each[0] for each in batch.rows]
        x = self._cross(x, batch.angles, lambda q: batch.attend(rows, q, everywhere=True))
        for at, layer in enumerate(self._tail, start=1):
            x = layer(x, batch, rows=at, last=at == len(self._tail))
        parts = (*self._candidates(self._norm(x)), *(torch.cat(half, dim=1) for half in zip(*batch.new, strict=True)))
        counts = (batch.asked, batch.asked, batch.count, batch.count)
        split = (part.split(count) for part, count in zip(parts, counts, strict=True))
        return [StepResult(*(part.cpu().numpy() for part in result)) for result in zip(*split, strict=True)]

    def _candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = multiplied(self._head, hidden, self._dtype) * self._sharpness
        top, index = logits.topk(self.top_k, dim=-1)
        return self._tokens[index], top - logits.logsumexp(dim=-1, keepdim=True)
