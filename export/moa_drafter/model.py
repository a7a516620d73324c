"""The Mixture of Attentions drafter (arXiv 2410.03804, section 3), cut in two.

The server half turns the target's keys and values into memory rows; the device half turns tokens and
memory rows into draft logits. The training forward is the two halves run over a whole sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moa_drafter.config import DrafterConfig
from moa_drafter.drafter import Drafter
from moa_drafter.llama import DecoderLayer, RMSNorm, rotary_angles
from moa_drafter.states import Reads, TargetStates

if TYPE_CHECKING:
    from moa_drafter.training.batch import Batch


class MoADrafter(Drafter):
    """Parameters of both halves, under the published checkpoint's names."""

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
        self.norm = RMSNorm(hidden, eps) if config.final_norm else nn.Identity()

    @property
    def reads(self) -> Reads:
        """The keys and values of the layers that the layer self-attention sees."""
        return Reads(kv_layers=self.config.lsa_layers)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary angles of absolute ``positions [T]`` for the self- and cross-attention layer."""
        return rotary_angles(positions, self.config.decoder.head_dim, self.config.rope_theta)

    # -- server half ---------------------------------------------------------------------------

    def memory_rows(self, target_kv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Server half: what the target computed for some tokens, as cross-attention keys and values.

        Args:
            target_kv: keys (after RoPE) and values of the ``lsa_layers``, concatenated:
                ``[T, len(lsa_layers), target_kv_size]``.
            positions: absolute positions of the tokens, ``[T]``.

        Returns:
            rotated keys and values, each ``[T, num_kv_heads, head_dim]``.
        """
        return self.cross_attention.keys_values(self.aggregate(target_kv), self.angles(positions))

    def rows(self, states: TargetStates, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Drafter.rows`: the memory rows."""
        return self.memory_rows(states.kv, positions)

    def aggregate(self, target_kv: Tensor) -> Tensor:
        """Layer self-attention over the layer axis, mean, ``Ekv2E``: ``[T, layers, kv] -> [T, hidden]``."""
        dims = self.config.layer_attention
        if self.config.layer_scale:
            target_kv = target_kv * self.layer_scale
        depth = torch.arange(target_kv.shape[-2], device=target_kv.device)
        angles = rotary_angles(depth, dims.head_dim, self.config.rope_theta)
        k, v = self.layer_self_attention.keys_values(target_kv, angles)
        mixed = self.layer_self_attention(target_kv, k, v, angles)
        return self.Ekv2E(mixed.mean(dim=-2))

    # -- device half ---------------------------------------------------------------------------

    def draft_hidden(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        self_kv: tuple[Tensor, Tensor],
        memory: tuple[Tensor, Tensor],
        self_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """Device half up to the head: embeddings ``x [T, hidden]`` -> normed hidden states ``[T, hidden]``.

        Args:
            self_kv: keys and values of the self-attention, cached tokens first, ``[S, kv_heads, head_dim]``.
            memory: memory rows, ``[M, kv_heads, head_dim]`` each.
            self_mask, memory_mask: boolean ``[T, S]`` and ``[T, M]``, true where a query may look.
        """
        hidden = self.self_attention(x, *self_kv, angles, self_mask)
        return self.norm(self.cross_attention(hidden, *memory, angles, memory_mask))

    # -- both ----------------------------------------------------------------------------------

    def predict(self, batch: Batch) -> Tensor:
        """See :meth:`Drafter.predict`."""
        return self(batch.tokens, batch.positions, batch.states.kv, batch.self_mask, batch.memory_mask, batch.queries)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        target_kv: Tensor,
        self_mask: Tensor,
        memory_mask: Tensor,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Training forward over packed conversations.

        Args:
            tokens, positions: ``[T]``, integer.
            target_kv: ``[T, layers, target_kv_size]``.
            self_mask, memory_mask: boolean ``[T, T]``; the latter says which rows each query may see.
            queries: indices ``[Q]`` of the positions whose prediction is wanted; all when omitted.

        Returns:
            normed hidden states ``[Q, hidden]``; :meth:`logits` makes them draft logits.
        """
        angles = self.angles(positions)
        x = self.embed(tokens)
        self_kv = self.self_attention.keys_values(x, angles)
        memory = self.memory_rows(target_kv, positions)
        if queries is not None:
            x, angles = x[queries], (angles[0][queries], angles[1][queries])
            self_mask, memory_mask = self_mask[queries], memory_mask[queries]
        return self.draft_hidden(x, angles, self_kv, memory, self_mask, memory_mask)
