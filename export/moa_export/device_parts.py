"""What a device half computes with, in float32: from a checkpoint and the target's weights, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moa_decoder.matrix import Float32
from moa_decoder.weights import DecoderWeights
from moa_drafter.config import DrafterConfig, Eagle3Config, TokenConfig
from moa_drafter.drafter_layers import PlacedLayer, TensorSource, device_layers, last_norm


@dataclass(frozen=True)
class DeviceParts:
    """The matrices of a device half.

    Attributes:
        layers: in order.
        embedding: ``[vocab_size, hidden]``.
        head: ``[draft_vocab_size, hidden]``, sharpened.
        norm: weight of the last norm; None for none.
        tokens: of the target's vocabulary by index in the draft vocabulary.
        drafter: all tensors of the checkpoint.
    """

    config: DrafterConfig | TokenConfig | Eagle3Config
    layers: Sequence[PlacedLayer]
    embedding: Float32
    head: Float32
    norm: Float32 | None
    tokens: NDArray[np.int64]
    drafter: TensorSource

    @classmethod
    def of(
        cls, config: DrafterConfig | TokenConfig | Eagle3Config, drafter: TensorSource, target: DecoderWeights
    ) -> DeviceParts:
        """Take the parts of a checkpoint, and the target's own.

        Raises:
            FitError: the target's layers compute something else than the drafter was trained with.
        """
        tokens, eagle = drafter.array("draft_to_target"), isinstance(config, Eagle3Config)
        head = drafter.array("lm_head.weight") if eagle else target.head().rows(tokens).dense()
        if config.sharpness != 1:
            head = head * np.float32(config.sharpness)
        own = isinstance(config, Eagle3Config) and config.own_embedding
        embedding = drafter.array("embed_tokens.weight") if own else target.embedding().dense()
        layers, norm = device_layers(config, drafter, target), last_norm(config, drafter)
        return cls(config, layers, embedding, head, norm, tokens, drafter)
