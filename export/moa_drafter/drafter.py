"""Base classes of the drafters: a draft vocabulary and the target's frozen matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moa_drafter.config import Reads, TokenConfig
from moa_drafter.llama import DecoderLayer, RMSNorm, rotary_angles
from moa_drafter.target_features import TargetStates

if TYPE_CHECKING:
    from moa_drafter.config import DrafterConfig, RivalConfig
    from moa_drafter.target import TargetLogits
    from moa_drafter.training.batch import Batch


class Drafter(nn.Module):
    """A trainable drafter. Token embedding and draft head are the target's own, frozen and no part of the checkpoint:
    :meth:`bind_target` sets them. ``vocab_size`` and ``hidden_size`` are the target's.
    """

    config: DrafterConfig | RivalConfig
    draft_to_target: Tensor
    embedding: Tensor
    head: Tensor

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self._shape_of_head = (vocab_size, hidden_size)
        self.register_buffer("draft_to_target", torch.arange(draft_vocab_size), persistent=True)
        self.register_buffer("embedding", torch.empty(0), persistent=False)
        self.register_buffer("head", torch.empty(0), persistent=False)
        self._target_logits: TargetLogits | None = None

    @property
    def reads(self) -> Reads:
        """The states of the target that training reads."""
        raise NotImplementedError

    @property
    def row_reads(self) -> Reads:
        """The states that :meth:`rows` needs; an empty set if no rows are sent to the device."""
        return self.config.row_reads

    def bind_target(
        self, embedding: Tensor, head: Tensor, layers: Sequence[nn.Module] = (), logits: TargetLogits | None = None
    ) -> None:
        """Take the target's token embedding and the draft vocabulary's rows of its head; without a copy, unless rows
        are picked, converted or moved.

        Args:
            embedding: ``[vocab_size, hidden]``.
            head: the target's whole output matrix, ``[vocab_size, hidden]``.
            layers: the target's decoder layers, for architectures that contain some of them.
            logits: for :meth:`target_logits`, which training needs.
        """
        for name, tensor in (("embedding", embedding), ("head", head)):
            if tuple(tensor.shape) != self._shape_of_head:
                raise ValueError(
                    f"the target's {name} has shape {tuple(tensor.shape)}, "
                    f"this drafter was made for {self._shape_of_head}"
                )
        like = next(self.parameters())
        self.embedding = embedding.detach().to(like)
        rows = self.draft_to_target.to(head.device)
        # Picking rows copies them, which would be gigabytes for a large vocabulary.
        whole = torch.equal(rows, torch.arange(len(head), device=head.device))
        self.head = (head.detach() if whole else head.detach()[rows]).to(like)
        self._target_logits = logits

    def sharpen(self) -> None:
        """Multiply the draft logits by ``config.sharpness`` from now on, for drafting alone.

        The factor (see :func:`moa_drafter.training.evaluation.fitted_sharpness`) does not change the candidates' order.
        """
        if self.config.sharpness != 1:
            self.head = self.head * self.config.sharpness

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary angles of absolute ``positions [T]`` for layers over tokens."""
        return rotary_angles(positions, self.config.decoder.head_dim, self.config.rope_theta)

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up the embeddings ``[..., hidden]`` of token ids ``[...]``."""
        return nn.functional.embedding(tokens, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the draft logits ``[..., draft_vocab_size]`` of normed states ``[..., hidden]``."""
        return hidden @ self.head.T

    def target_logits(self, hidden: Tensor) -> Tensor:
        """Compute the target's logits ``[Q, draft_vocab_size]`` from its last hidden states; the drafter must be bound
        with ``logits`` and not sharpened."""
        assert self._target_logits is not None
        return self._target_logits.of_tokens(hidden, self.head, self.draft_to_target)

    def candidates(self, hidden: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Return the likeliest next tokens after ``hidden [Q, hidden]``, best first: ids in the target's vocabulary and
        log-probabilities over the draft vocabulary (nats), ``[Q, top_k]`` each."""
        logits = self.logits(hidden)
        top, index = logits.topk(top_k, dim=-1)
        return self.draft_to_target[index], top - logits.logsumexp(dim=-1, keepdim=True)

    def rows(self, states: TargetStates, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the server half: each token's row for the device, as two arrays ``[T, heads, size]``, from the states
        in :attr:`reads` and the absolute positions ``[T]``."""
        raise NotImplementedError

    def predict(self, batch: Batch) -> Tensor:
        """Compute the training forward: normed hidden states ``[Q, hidden]`` for ``batch.queries``."""
        raise NotImplementedError


class TokenDrafter(Drafter):
    """Base of the drafters without memory rows: a stack of decoder layers that reads tokens alone."""

    config: TokenConfig
    norm: RMSNorm

    def __init__(self, config: TokenConfig) -> None:
        super().__init__(config.vocab_size, config.draft_vocab_size, config.decoder.hidden_size)
        self.config = config

    @property
    def device_layers(self) -> Sequence[DecoderLayer]:
        """The decoder layers that a drafting step runs, in order."""
        raise NotImplementedError
