"""One packed training step: conversations end to end, and which memory rows each position may see.

A drafted token sees only the rows of tokens that the target has processed. Training imitates that: an answer is cut
into segments of random *future length* F; every position of a segment sees the rows up to the token before the segment,
so the k-th position has depth k (arXiv 2410.03804, section 3.4). Some segments are long, and some conversations lose
their rows after a random token, because offline text has a large depth, or no rows at all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moa_drafter.target_features import TargetStates
from moa_drafter.training.data import Conversation
from moa_drafter.training.features import Features, packed_states


@dataclass(frozen=True)
class FutureLengths:
    """Distribution of future lengths: uniform on ``low..high``, or with probability ``long_share`` log-uniform on
    ``high..longest``. ``no_rows_share`` is the probability of :func:`drop_rows`."""

    low: int
    high: int
    long_share: float = 0.0
    longest: int = 128
    no_rows_share: float = 0.0

    def draw(self, rng: random.Random) -> int:
        if self.long_share and rng.random() < self.long_share:
            return round(self.high * (self.longest / self.high) ** rng.random())
        return rng.randint(self.low, self.high)


#: Every position sees its own row: the easiest task, which teaches the drafter to use the rows.
OWN_ROW = FutureLengths(0, 0)
# Shares are of segments: 4 % long ones with 124 tokens on average hold half of all tokens.
CURRICULUM = (
    (0.03, OWN_ROW),
    (0.4, FutureLengths(1, 4)),
    (1.0, FutureLengths(1, 9, long_share=0.04, longest=512, no_rows_share=0.03)),
)
#: For weights that were trained by the curriculum: longer futures, which offline text needs.
CONTINUED = FutureLengths(1, 9, long_share=0.1, longest=512, no_rows_share=0.05)


def future_lengths_at(progress: float, *, continued: bool = False) -> FutureLengths:
    """Return the curriculum's stage at ``progress`` in 0..1 of the run; :data:`CONTINUED` for continued training."""
    if continued:
        return CONTINUED
    return next(stage for until, stage in CURRICULUM if progress <= until)


def row_limits(prompt: int, total: int, lengths: FutureLengths, rng: random.Random) -> list[int]:
    """Draw the last visible row of every position of one conversation.

    Example: ``prompt=3, total=8`` and drawn lengths 2, 3 give ``[0, 1, 2, 2, 2, 4, 4, 4]``: answer positions 3 and 4
    see rows 0..2, positions 5 to 7 see rows 0..4.
    """
    limits = list(range(prompt))
    while len(limits) < total:
        length = lengths.draw(rng)
        start = len(limits)
        limits += [start] if length == 0 else [start - 1] * min(length, total - start)
    return limits


def drop_rows(limits: list[int], share: float, rng: random.Random) -> list[int]:
    """With probability ``share``, remove the rows after a random token, or in half of these cases all rows.

    All positions lose the same rows, because a drafter may read at one position what it computed for another (target
    layer inference). Dropped after token 1, ``[0, 1, 2, 2, 2, 4, 4]`` becomes ``[0, 1, 1, 1, 1, 1, 1]``.
    """
    if not share or rng.random() >= share:
        return limits
    last = -1 if rng.random() < 0.5 else rng.randrange(len(limits))
    return [min(limit, last) for limit in limits]


def packed_masks(totals: list[int], limits: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions ``[T]`` and boolean masks ``[T, T]`` (self, memory) of conversations packed end to end.

    Args:
        totals: tokens of each conversation.
        limits: :func:`row_limits` of all conversations, joined, each counted from its own start.
    """
    document = torch.repeat_interleave(torch.arange(len(totals)), torch.tensor(totals), output_size=sum(totals))
    positions = torch.cat([torch.arange(total) for total in totals])
    same = document[:, None] == document[None, :]
    self_mask = same & (positions[:, None] >= positions[None, :])
    memory_mask = same & (torch.tensor(limits)[:, None] >= positions[None, :])
    return positions, self_mask, memory_mask


@dataclass(frozen=True)
class Batch:
    """Conversations packed end to end, ``T`` tokens.

    Attributes:
        tokens, positions: integer ``[T]``; positions count from the start of each conversation.
        states: the target's states of every token.
        self_mask: boolean ``[T, T]``: earlier tokens of the same conversation, and the token itself.
        memory_mask: boolean ``[T, T]``: tokens whose states a position sees.
        queries: ``[Q]``, the positions whose next token is learnt.
        depths: ``[Q]``, distance of each query from the last token whose states it sees.
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
    """Pack conversations end to end and draw the rows that each position sees."""
    chosen = [conversations[i] for i in indices]
    limits: list[int] = []
    queries: list[int] = []
    for conversation in chosen:
        first, own = len(limits), []
        for start, stop in conversation.answers:
            # The server has processed the user's messages, so only answers wait for rows.
            own += range(len(own), start)
            own += row_limits(start, stop, lengths, rng)[start:]
            # The server itself gives the first answer token; the last token has no successor.
            queries += range(first + start, first + stop - 1)
        limits += drop_rows(own, lengths.no_rows_share, rng)
    with torch.device(device):  # large masks are made where they are used
        positions, self_mask, memory_mask = packed_masks([len(c) for c in chosen], limits)
        where = torch.tensor(queries)
        depths = positions[where] - torch.tensor(limits)[where]
        tokens = torch.tensor([token for conversation in chosen for token in conversation.tokens])
    states = packed_states(features, indices, device)
    return Batch(tokens, positions, states, self_mask, memory_mask, where, depths)
