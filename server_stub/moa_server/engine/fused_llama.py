"""A forward pass of Llama-like targets with few large products, in which no row depends on the rows beside it.

One product makes queries, keys and values, one gate and up. Rows of all sequences share the products; attention is
computed sequence by sequence (:mod:`attention`). Products are computed in the pass's type; norms, rotary
positions, attention and the sums over layers in float32.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moa_drafter.config import longest_context, unknown_fields
from moa_drafter.target import Target
from moa_runtime.session.tree import depths
from moa_server.engine.attention import Heads, Tile, TileAttention, memory_needed, tiles
from moa_server.engine.kv_cache import KVCacheShape, fetched
from moa_server.engine.packed_linear import product_of
from moa_server.engine.target_pass import Fusion, LogitRows, Piece, keep_features, rounded_up

#: Rows of a pass are padded to a multiple of this. A product of a single row is computed in another way.
_ROWS = 4
#: Kinds of rotary positions whose angles depend on nothing but the position.
_ROPES = ("default", "linear", "llama3", "yarn")
#: Setting of Ministral 3's rotary positions: queries after the original context are multiplied by a factor that grows.
_SHARPER = "llama_4_scaling_beta"


def misfit(target: Target) -> str | None:
    """Return why this pass does not support the structure of a target; None if it does."""
    model, config = target.model.model, target.model.config
    try:
        layer, norm, angles = model.layers[0], model.norm, model.rotary_emb
        attention, mlp = layer.self_attn, layer.mlp
        matrices = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        matrices += [mlp.gate_proj, mlp.up_proj, mlp.down_proj, target.model.get_output_embeddings()]
        norms = [norm, layer.input_layernorm, layer.post_attention_layernorm]
        epsilons = [each.variance_epsilon for each in norms]
    except AttributeError as error:
        return f"its layers are built in another way ({error})"
    if any(type(matrix) is not torch.nn.Linear for matrix in matrices):
        return "not all its matrices are plain linear layers"
    if len(set(epsilons)) != 1:
        return "its norms differ"
    children = {name for name, _ in attention.named_children()} | {name for name, _ in layer.named_children()}
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if children - known:
        return f"its layers also have {', '.join(sorted(children - known))}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if getattr(angles, "rope_type", None) not in _ROPES:
        return f"its rotary positions are of the kind {getattr(angles, 'rope_type', 'unknown')}"
    if longest_context(config)[0] < longest_context(config, windows=True)[0]:
        return "its layers have a window"
    if unknown := unknown_fields(config, known_rope=(_SHARPER,)):
        return f"its configuration has {', '.join(unknown)}"
    return None


class _Layer:
    """One decoder layer's products and norms."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = product_of(dtype, attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = product_of(dtype, attention.o_proj)
        self.gate_up = product_of(dtype, mlp.gate_proj, mlp.up_proj)
        self.down = product_of(dtype, mlp.down_proj)
        self.before_attention = layer.input_layernorm.weight.detach().float()
        self.before_mlp = layer.post_attention_layernorm.weight.detach().float()


class FusedLlama:
    """A :class:`moa_server.engine.target_pass.TargetPass`, see the module.

    Args:
        target: one without a :func:`misfit`; its layers are not needed afterwards.
        dtype: of the products.
        fusion: makes the features that caches keep.

    Attributes:
        batch_invariant: false until a check has shown it, see :func:`is_invariant`.
    """

    name = "fused"
    has_own_weights = trees = True
    batch_invariant = windows = False

    def __init__(self, target: Target, dtype: torch.dtype, *, fusion: Fusion | None = None) -> None:
        model, config = target.model.model, target.model.config
        attention = model.layers[0].self_attn
        size, of_keys, of_queries = attention.head_dim, len(attention.k_proj.weight), len(attention.q_proj.weight)
        self._heads = Heads(of_keys // size, of_queries // of_keys, size, attention.scaling)
        self.dtype, self.device = str(dtype).removeprefix("torch."), target.device.type
        self._dtype, self._epsilon, self._angles = dtype, model.norm.variance_epsilon, model.rotary_emb
        rope = config.rope_parameters
        self._sharper = rope.get(_SHARPER) or 0.0, rope.get("original_max_position_embeddings", 1)
        self._embedding = target.embedding.detach()
        self._layers = [_Layer(layer, dtype) for layer in model.layers]
        self._norm = model.norm.weight.detach().float()
        self._head = product_of(dtype, target.model.get_output_embeddings())
        self._fusion, kept, count = fusion, 0 if fusion is None else fusion.size, len(self._layers)
        self.cache_shape = KVCacheShape(count, self._heads.kv, size, torch.float32, target.device, feature_size=kept)

    def first_layers(self, count: int) -> FusedLlama:
        """The same with some layers only, for checks that need not run all of them; nothing is copied."""
        shorter = copy.copy(self)
        shorter._layers, shorter._fusion = self._layers[:count], None
        shorter.cache_shape = dataclasses.replace(self.cache_shape, layers=len(shorter._layers), feature_size=0)
        return shorter

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> tuple[Tensor, int]:
        """See :meth:`moa_server.engine.target_pass.TargetPass.forward`; always one forward."""
        tokens: list[int] = []
        positions: list[int] = []
        planned: list[Tile] = []
        for piece in pieces:
            planned += tiles(piece, len(tokens))
            first = piece.cached + piece.shift
            behind = first + len(piece.chain)
            positions += range(first, behind)
            positions += [behind - 1 + depth for depth in depths(piece.parents)]
            tokens += [*piece.chain, *piece.tree]
        padding = [0] * (padded(len(tokens)) - len(tokens))
        rows = len(tokens) + len(padding)
        heads, device = self._heads, self._embedding.device
        x = functional.embedding(torch.tensor(tokens + padding, device=device), self._embedding).float()
        angles = self._rotation(torch.tensor(positions + padding, device=device))
        states = _LayerStates(heads, rows, self._dtype, device)
        memory = torch.empty(memory_needed(heads, planned), device=device)
        attentions = [TileAttention(heads, tile, states.queries, states.mixed, memory) for tile in planned]
        writes = list(_writes(pieces, states.new))
        wanted, inner = () if self._fusion is None else self._fusion.inner_layers, dict[int, Tensor]()
        for index, layer in enumerate(self._layers):
            product = layer.qkv(self._normed(x, layer.before_attention).to(self._dtype)).float()
            states.fill(product, *angles)
            for places, new in writes:
                places[index].copy_(new)
            for attention in attentions:
                attention.attend(index)
            x += layer.out(states.mixed_rows)
            gate, up = layer.gate_up(self._normed(x, layer.before_mlp).to(self._dtype)).chunk(2, -1)
            x += layer.down(functional.silu(gate).mul_(up))
            if index in wanted:
                inner[index] = x[: len(tokens)].clone()
        hidden = self._normed(x, self._norm)[: len(tokens)]
        if self._fusion is not None:
            keep_features(pieces, self._fusion([inner[layer] for layer in wanted]))
        return hidden, 1

    @torch.inference_mode()
    def logits(self, parts: Sequence[Tensor]) -> LogitRows:
        """See :meth:`moa_server.engine.target_pass.TargetPass.logits`."""
        hidden = torch.cat(list(parts))
        padding = padded(len(hidden)) - len(hidden)
        rows = functional.pad(hidden, (0, 0, 0, padding)).to(self._dtype)
        return fetched(self._head(rows)[: len(hidden)].float())

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm; the same as transformers', in fewer operations."""
        size = x.shape[-1]
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        return (x * squares.div_(size).add_(self._epsilon).rsqrt_()).mul_(weight)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Factors for :meth:`_LayerStates.fill`, ``[rows, query and key heads, head_dim]`` each."""
        heads = self._heads
        cosines, sines = (part[0] for part in self._angles(self._norm[None], positions[None]))
        half = sines.shape[-1] // 2
        signed = torch.cat((-sines[:, :half], sines[:, half:]), -1)
        scale = torch.ones(len(positions), heads.kv * (heads.per_kv + 1), 1, device=positions.device)
        beta, original = self._sharper
        sharper = 1 + beta * torch.log1p(positions // original)
        scale[:, : heads.kv * heads.per_kv] = heads.query_factor * sharper[:, None, None]
        return cosines[:, None] * scale, signed[:, None] * scale


class _LayerStates:
    """Memory of what one layer after the other computes for attention, so that views of it are made once a pass.

    Attributes:
        queries: rotated and scaled, ``[rows, kv_heads, heads per kv_head, head_dim]``.
        new: rotated keys, and values, ``[rows, 2, kv_heads, head_dim]``.
        mixed: what attention gives, of the shape of the queries; ``mixed_rows [rows, query_heads * head_dim]``.
    """

    def __init__(self, heads: Heads, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        count = heads.kv * heads.per_kv
        self._all = torch.empty(rows, count + 2 * heads.kv, heads.size, device=device)
        self._rotated, self._values = self._all[:, : count + heads.kv], self._all[:, count + heads.kv :]
        self.queries = self._all[:, :count].unflatten(1, (heads.kv, heads.per_kv))
        self.new = self._all[:, count:].unflatten(1, (2, heads.kv))
        self.mixed = torch.zeros(self.queries.shape, dtype=dtype, device=device)
        self.mixed_rows = self.mixed.flatten(1)

    def fill(self, product: Tensor, cosines: Tensor, signed_sines: Tensor) -> None:
        """Take ``product [rows, (query_heads + 2 * kv_heads) * head_dim]``; queries and keys are rotated."""
        product = product.view(self._all.shape)
        rotating = product[:, : self._rotated.shape[1]]
        torch.mul(rotating, cosines, out=self._rotated)
        self._rotated.addcmul_(rotating.roll(rotating.shape[-1] // 2, -1), signed_sines)
        self._values.copy_(product[:, self._rotated.shape[1] :])


def _writes(pieces: Sequence[Piece], new: Tensor) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
    """Yield the destinations of each piece's keys and values, layer by layer, and their sources."""
    first = 0
    for piece in pieces:
        own = new[first : first + len(piece)].permute(1, 2, 0, 3)
        first += len(piece)
        for block, place, part in piece.cache.segments(piece.cached, len(piece)):
            for half, tokens in zip((piece.cache.keys, piece.cache.values), own, strict=True):
                places = half[:, block, :, place : place + part.stop - part.start]
                yield places.unbind(0), tokens[:, part]


def padded(rows: int) -> int:
    """Return the padded number of rows of a product: a multiple of 4, of 8 above 64, of 32 above 128.

    oneDNN generates code for each number of rows that it meets, and keeps it: few numbers are quick and take little
    memory. ``padded(70)`` is 72.
    """
    return rounded_up(rows, _ROWS if rows <= 64 else 8 if rows <= 128 else 32)
