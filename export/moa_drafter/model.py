"""The Mixture of Attentions drafter (arXiv 2410.03804, section 3), cut in two.

The server half turns the target's keys and values into memory rows; the device half turns tokens and memory rows into
draft logits. The training forward runs both over a whole sequence.

With target layer inference (section 3.3) the device half ends with the target's last layers. For tokens that the target
has processed, their keys and values are the target's, sent in the memory rows; the device computes those of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moa_drafter.config import DrafterConfig, FitError, Reads
from moa_drafter.drafter import Drafter
from moa_drafter.llama import DecoderLayer, KeysValues, RMSNorm, copy_exactly, frozen_layers, joined, rotary_angles
from moa_drafter.target_features import TargetStates

if TYPE_CHECKING:
    from moa_drafter.target import TargetLogits
    from moa_drafter.training.batch import Batch


class MoADrafter(Drafter):
    """Parameters of both halves, under the published checkpoint's names."""

    config: DrafterConfig

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config.vocab_size, config.draft_vocab_size, config.decoder.hidden_size)
        self.config = config
        eps, hidden = config.rms_norm_eps, config.decoder.hidden_size
        self.layer_self_attention = DecoderLayer(config.layer_attention, eps)
        if config.layer_scale:
            self.layer_scale = nn.Parameter(torch.ones(len(config.lsa_layers), config.target_kv_size))
        self.Ekv2E = nn.Linear(config.target_kv_size, hidden, bias=True)
        self.self_attention = DecoderLayer(config.decoder, eps)
        self.cross_attention = DecoderLayer(config.decoder, eps)
        # Frozen copies of the target's last layers come with bind_target.
        copies = config.target_layers if config.trained_target_layers else 0
        self.tail = nn.ModuleList(DecoderLayer(config.decoder, eps) for _ in range(copies))
        self.norm = RMSNorm(hidden, eps) if config.final_norm else nn.Identity()

    @property
    def reads(self) -> Reads:
        """The target's layers from which the memory rows are made."""
        return self.config.row_reads

    @property
    def device_layers(self) -> tuple[DecoderLayer, ...]:
        """The decoder layers of the device half, in order."""
        return (self.self_attention, self.cross_attention, *self.tail)

    @property
    def is_whole(self) -> bool:
        """Whether all layers of a step exist, frozen ones included."""
        return len(self.device_layers) == self.config.step_layers

    def bind_target(
        self, embedding: Tensor, head: Tensor, layers: Sequence[nn.Module] = (), logits: TargetLogits | None = None
    ) -> None:
        """See :meth:`Drafter.bind_target`; the last of ``layers`` are copied, unless the drafter has trained copies.
        Raises FitError if they are missing or differ in parts or sizes."""
        super().bind_target(embedding, head, layers, logits)
        config = self.config
        if config.trained_target_layers:
            return
        if len(layers) < config.target_layers:
            raise FitError(f"bind {config.target_layers} of the target's layers too", code="layers_missing")
        last = layers[len(layers) - config.target_layers :]
        self.tail = frozen_layers(last, config.decoder, config.rms_norm_eps).to(self.embedding)

    def start_copies(self, layers: Sequence[nn.Module]) -> None:
        """Let the trained copies begin as the target's ``layers``. Raises FitError if they differ in parts or sizes."""
        copy_exactly(list(self.tail), layers[len(layers) - len(self.tail) :])  # type: ignore[arg-type]

    # -- server half ---------------------------------------------------------------------------

    def memory_rows(self, target_kv: Tensor, positions: Tensor) -> KeysValues:
        """Compute the server half: the keys and values that the device half's layers attend to.

        Args:
            target_kv: keys (after RoPE) and values of the layers in :attr:`reads`, ``[T, layers, target_kv_size]``.
            positions: absolute positions of the tokens, ``[T]``.

        Returns:
            rotated keys and values, each ``[T, kv_heads, head_dim]``: the cross-attention's heads, then those of
            each layer of the tail, as the target computed them.
        """
        parts = self._row_parts(target_kv, self.angles(positions))
        return torch.cat([k for k, _ in parts], dim=1), torch.cat([v for _, v in parts], dim=1)

    def rows(self, states: TargetStates, positions: Tensor) -> KeysValues:
        """See :meth:`Drafter.rows`: the memory rows."""
        return self.memory_rows(states.kv, positions)

    def aggregate(self, target_kv: Tensor) -> Tensor:
        """Compute ``Ekv2E`` of the layer self-attention's mean: ``[T, lsa_layers, kv] -> [T, hidden]``."""
        dims = self.config.layer_attention
        if self.config.layer_scale:
            target_kv = target_kv * self.layer_scale
        depth = torch.arange(target_kv.shape[-2], device=target_kv.device)
        angles = rotary_angles(depth, dims.head_dim, self.config.rope_theta)
        k, v = self.layer_self_attention.keys_values(target_kv, angles)
        mixed = self.layer_self_attention(target_kv, k, v, angles)
        return self.Ekv2E(mixed.mean(dim=-2))

    def _row_parts(self, target_kv: Tensor, angles: tuple[Tensor, Tensor]) -> list[KeysValues]:
        """Compute memory rows layer by layer: the cross-attention's, then the tail's."""
        seen = len(self.config.lsa_layers)
        parts = [self.cross_attention.keys_values(self.aggregate(target_kv[:, :seen]), angles)]
        heads = (2, self.config.decoder.num_kv_heads, self.config.decoder.head_dim)
        for layer in target_kv[:, seen:].to(parts[0][0]).unbind(dim=1):
            k, v = layer.unflatten(-1, heads).unbind(dim=1)
            parts.append((k, v))
        return parts

    # -- device half ---------------------------------------------------------------------------

    def draft(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        queries: Tensor,
        self_mask: Tensor,
        memory: Sequence[KeysValues],
        memory_mask: Tensor | None,
        tail_mask: Tensor,
        cached: Sequence[KeysValues] = (),
        with_rows: Callable[[KeysValues, KeysValues], KeysValues] | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """Compute the device half from the self-attention up to the head.

        Args:
            x: embeddings of new tokens, ``[T, hidden]``, and the ``angles`` of their positions.
            queries: indices ``[Q]`` of the tokens to predict from.
            self_mask: boolean ``[T, S + T]``, true where a token may look, cached tokens first.
            memory: by layer, the cross-attention first, keys and values of memory rows ``[M, kv_heads, head_dim]``.
            memory_mask: boolean ``[T, M]``, rows that the cross-attention sees; all when omitted.
            tail_mask: boolean ``[T, K]``, where a token may look in the tail, if there is one.
            cached: by layer, the self-attention first, keys and values of earlier tokens ``[S, kv_heads, head_dim]``.
            with_rows: makes the keys and values ``[K, kv_heads, head_dim]`` of a layer of the tail from those of its
                memory rows and of its ``S + T`` tokens; concatenates them when omitted.

        Returns:
            normed hidden states ``[Q, hidden]``, and keys and values of the new tokens in the form of ``cached``.
        """

        def at_queries(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
            return tuple(None if tensor is None else tensor[queries] for tensor in tensors)

        new = [self.self_attention.keys_values(x, angles)]
        own = joined(*cached[:1], new[0])
        if not self.tail:  # the other tokens only had to leave their keys and values
            x, cos, sin, self_mask, memory_mask = at_queries(x, *angles, self_mask, memory_mask)
            angles = (cos, sin)
        x = self.cross_attention(self.self_attention(x, *own, angles, self_mask), *memory[0], angles, memory_mask)
        for n, layer in enumerate(self.tail, start=1):
            new.append(layer.keys_values(x, angles))
            if n == len(self.tail):
                x, cos, sin, tail_mask = at_queries(x, *angles, tail_mask)
                angles = (cos, sin)
            own = joined(*cached[n : n + 1], new[n])
            x = layer(x, *(with_rows or joined)(memory[n], own), angles, tail_mask)
        return self.norm(x), new

    # -- both ----------------------------------------------------------------------------------

    def predict(self, batch: Batch) -> Tensor:
        """See :meth:`Drafter.predict`."""
        states, masks = batch.states, (batch.self_mask, batch.memory_mask)
        return self(batch.tokens, batch.positions, states.kv, *masks, batch.queries)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        target_kv: Tensor,
        self_mask: Tensor,
        memory_mask: Tensor,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Compute normed hidden states ``[Q, hidden]`` over packed conversations.

        Args:
            tokens, positions: ``[T]``, integer.
            target_kv: ``[T, layers, target_kv_size]``, of the layers in :attr:`reads`.
            self_mask, memory_mask: boolean ``[T, T]``; the latter names the rows that each token sees. If a query
                attends to a token but not to its row, this token must see the rows that the query sees.
            queries: indices ``[Q]`` of the tokens to predict from; all when omitted.
        """
        angles = self.angles(positions)
        queries = torch.arange(len(tokens), device=tokens.device) if queries is None else queries
        x = self.embed(tokens)
        (keys, values), *tail_rows = self._row_parts(target_kv, angles)
        # As on the device, a token that sees no row sees one of zeros.
        zero = keys.new_zeros(1, *keys.shape[1:])
        memory = [(torch.cat((keys, zero)), torch.cat((values, zero))), *tail_rows]
        nothing = ~memory_mask.any(dim=1, keepdim=True)
        tail_mask = torch.cat((memory_mask, self_mask & ~memory_mask), dim=1)
        cross_mask = torch.cat((memory_mask, nothing), dim=1)
        return self.draft(x, angles, queries, self_mask, memory, cross_mask, tail_mask)[0]
