"""Base classes of the drafters: a draft vocabulary and the target's frozen matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moa_drafter.config import TokenConfig
from moa_drafter.llama import DecoderLayer, RMSNorm, rotary_angles
from moa_drafter.target_features import Reads, TargetStates

if TYPE_CHECKING:
    from moa_drafter.config import DrafterConfig, RivalConfig
    from moa_drafter.target import TargetLogits
    from moa_drafter.training.batch import Batch


class Drafter(nn.Module):
    """A trainable drafter.

    The token embedding and the draft head are the target's own, frozen, and are not part of the
    checkpoint: they are given by :meth:`bind_target`.

    Args:
        vocab_size: tokens of the target.
        draft_vocab_size: tokens that can be drafted.
        hidden_size: the target's.
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
        """What it reads of the target in training."""
        raise NotImplementedError

    @property
    def row_reads(self) -> Reads:
        """What :meth:`rows` needs of the target; nothing where no rows are sent to the device."""
        return self.reads

    @property
    def frozen_parameters(self) -> int:
        """Numbers of the target's layers that a drafting step runs; embedding and head are not counted."""
        return 0

    def bind_target(
        self,
        embedding: Tensor,
        head: Tensor,
        layers: Sequence[nn.Module] = (),
        logits: TargetLogits | None = None,
    ) -> None:
        """Take the target's token embedding and the draft vocabulary's rows of its head.

        Nothing is copied that has not to be picked, converted or moved: then the memory is the target's own.

        Args:
            embedding: ``[vocab_size, hidden]``.
            head: the target's whole output matrix, ``[vocab_size, hidden]``.
            layers: the target's decoder layers, for architectures that contain some of them.
            logits: for :meth:`target_logits`, which training needs.

        Raises:
            ValueError: shapes that are not this drafter's.
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
        # Picking rows copies them: gigabytes, where a large vocabulary can be drafted as a whole.
        whole = torch.equal(rows, torch.arange(len(head), device=head.device))
        self.head = (head.detach() if whole else head.detach()[rows]).to(like)
        self._target_logits = logits

    def sharpen(self) -> None:
        """Multiply the draft logits by ``config.sharpness`` from here on: for drafting; training has them as they are.

        The factor was fitted to what the target chose (:mod:`temperature_scaling`). It changes how likely
        candidates are, not their order.
        """
        if self.config.sharpness != 1:
            self.head = self.head * self.config.sharpness

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary angles of absolute ``positions [T]`` for layers over tokens."""
        return rotary_angles(positions, self.config.decoder.head_dim, self.config.rope_theta)

    def embed(self, tokens: Tensor) -> Tensor:
        """``[...]`` -> ``[..., hidden]``."""
        return nn.functional.embedding(tokens, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft-vocabulary logits ``[..., draft_vocab_size]``."""
        return hidden @ self.head.T

    def target_logits(self, hidden: Tensor) -> Tensor:
        """The target's own logits of the draft vocabulary, ``[Q, draft_vocab_size]``, from its last hidden states; the
        drafter is bound with them, and not sharpened."""
        assert self._target_logits is not None
        return self._target_logits.of_tokens(hidden, self.head, self.draft_to_target)

    def candidates(self, hidden: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """The likeliest next tokens behind ``hidden [Q, hidden]``.

        Returns:
            ids in the target's vocabulary and log-probabilities over the draft vocabulary (nats), ``[Q, top_k]`` each,
            best first.
        """
        logits = self.logits(hidden)
        top, index = logits.topk(top_k, dim=-1)
        return self.draft_to_target[index], top - logits.logsumexp(dim=-1, keepdim=True)

    def rows(self, states: TargetStates, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Server half: what is sent to the device for each token, as two arrays ``[T, heads, size]``.

        Args:
            states: of the tokens, as :attr:`reads` asks for.
            positions: their absolute positions ``[T]``.
        """
        raise NotImplementedError

    def predict(self, batch: Batch) -> Tensor:
        """Training forward: hidden states ``[Q, hidden]`` behind the final norm, for ``batch.queries``."""
        raise NotImplementedError


class TokenDrafter(Drafter):
    """Base of the drafters without memory rows: a stack of decoder layers that reads tokens alone."""

    config: TokenConfig
    norm: RMSNorm

    def __init__(self, config: TokenConfig) -> None:
        super().__init__(config.vocab_size, config.draft_vocab_size, config.decoder.hidden_size)
        self.config = config

    @property
    def row_reads(self) -> Reads:
        """Return an empty set: the server sends no rows."""
        return Reads()

    @property
    def device_layers(self) -> Sequence[DecoderLayer]:
        """The decoder layers that a drafting step runs, in order."""
        raise NotImplementedError
