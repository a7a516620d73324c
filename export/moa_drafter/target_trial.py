"""A few tokens through a target's own forward, which whatever computes it in another way is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moa_drafter.target import Target
from moa_drafter.target_config import longest_context, original_contexts

#: Normed last hidden states ``[T, hidden]`` and logits ``[T, vocab_size]`` of ``T`` tokens, the first of which has
#: the position that is given too.
Compute = Callable[[Sequence[int], int], tuple[Tensor, Tensor]]


@torch.no_grad()
def deviation(target: Target, count: int, compute: Compute) -> float:
    """The largest root mean square error of hidden states and logits, relative to transformers' own: at the beginning
    of a context, at its end, and across the end of an original context that was extended.

    Args:
        count: tokens of each comparison.
    """
    longest, _ = longest_context(target.config)
    ends = {end + count // 2 for end in original_contexts(target.config)} | {longest}
    starts = [0, *sorted(end - count for end in ends if count < end <= longest)]
    text = [(7919 * index + 13) % target.config.vocab_size for index in range(count)]
    pairs = [zip(compute(text, start), _own(target, text, start), strict=True) for start in starts]
    return max(_error(*pair) for start in pairs for pair in start)


def _own(target: Target, text: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
    states: list[Tensor] = []
    hook = target.model.model.register_forward_hook(lambda *call: states.append(call[-1].last_hidden_state[0]))
    try:
        ids = torch.tensor([text], device=target.device)
        positions = torch.arange(start, start + len(text), device=target.device)[None]
        logits: Tensor = target.model(input_ids=ids, position_ids=positions).logits[0]
    finally:
        hook.remove()
    return states[0], logits


def _error(found: Tensor, expected: Tensor) -> float:
    expected = expected.float()
    error = (found.float() - expected).square().mean() / expected.square().mean()
    return float(error.sqrt())
