"""One packed training step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moa_drafter.target_features import TargetStates
from moa_drafter.training.data import Conversation
from moa_drafter.training.features import Features, packed_states
from moa_drafter.training.masks import FutureLengths, drop_rows, packed_masks, row_limits


@dataclass(frozen=True)
class Batch:
    """Conversations packed end to end, ``T`` tokens.

    Attributes:
        tokens, positions: integer ``[T]``; positions count from the start of each conversation.
        states: the target's, of every token.
        self_mask: boolean ``[T, T]``: the same conversation, not later.
        memory_mask: boolean ``[T, T]``: tokens whose states a position may see.
        queries: ``[Q]``, the positions whose next token is learnt.
        depths: ``[Q]``, how far each query lies behind the last token whose states it may see.
    """

    tokens: Tensor
    positions: Tensor
    states: TargetStates
    self_mask: Tensor
    memory_mask: Tensor
    queries: Tensor
    depths: Tensor


def make_batch(
    conversations: Sequence[Conversation],
    features: Features,
    indices: Sequence[int],
    lengths: FutureLengths,
    rng: random.Random,
    device: torch.device,
) -> Batch:
    """Pack conversations end to end and draw what each position may see."""
    chosen = [conversations[i] for i in indices]
    limits: list[int] = []
    queries: list[int] = []
    for conversation in chosen:
        first, own = len(limits), []
        for start, stop in conversation.answers:
            # The server has processed whatever the user wrote, so only answers have rows to wait for.
            own += range(len(own), start)
            own += row_limits(start, stop, lengths, rng)[start:]
            # The server itself gives the first answer token; the last token has no successor.
            queries += range(first + start, first + stop - 1)
        limits += drop_rows(own, lengths.no_rows_share, rng)
    with torch.device(device):  # masks of thousands of tokens squared are made where they are used
        positions, self_mask, memory_mask = packed_masks([len(c) for c in chosen], limits)
        where = torch.tensor(queries)
        depths = positions[where] - torch.tensor(limits)[where]
        tokens = torch.tensor([token for conversation in chosen for token in conversation.tokens])
    states = packed_states(features, indices, device)
    return Batch(tokens, positions, states, self_mask, memory_mask, where, depths)
