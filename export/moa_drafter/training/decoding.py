"""Batched generation by the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moa_drafter.target import Target

# Compiled graphs are made for one shape, so on a GPU batches and prompts are rounded up to few sizes.
_PROMPT_BLOCK = 128
_BATCH_BLOCK = 64


def answer_greedily(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The target's greedy answers to token prompts, one batch; each ends with its stop token where it ended."""
    return generate(target, prompts, new_tokens, do_sample=False)


@torch.no_grad()
def generate(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any) -> list[list[int]]:
    """What the target writes behind each prompt; each result ends with its stop token where it ended.

    On a GPU transformers compiles the single-token step with CUDA graphs.

    Args:
        options: of transformers' ``generate``: ``do_sample``, ``temperature``, ``top_p``.
    """
    rows = list(prompts)
    longest = max(map(len, rows))
    compiled = target.device.type == "cuda"
    if compiled:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled is slower, and no reason to stop
        longest = _rounded(longest, _PROMPT_BLOCK)
        rows += [rows[-1]] * (_rounded(len(rows), _BATCH_BLOCK) - len(rows))
    stop = target.stop_tokens
    pad = stop[0]
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in rows], device=target.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in rows], device=target.device)
    out = target.model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        eos_token_id=list(stop),
        pad_token_id=pad,
        top_k=0,
        # Seen to be almost twice as fast as a growing cache at large batches on a CPU.
        cache_implementation="static",
        disable_compile=not compiled,
        **options,
    )
    return [_until_stop(row, stop) for row in out[: len(prompts), longest:].tolist()]


def _rounded(number: int, block: int) -> int:
    return -(-number // block) * block


def _until_stop(tokens: list[int], stop: Sequence[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


def repetitive(tokens: Sequence[int], span: int = 4, share: float = 0.5) -> bool:
    """Whether more than ``share`` of a text's ``span``-grams repeat earlier ones, as looping text does."""
    grams = [tuple(tokens[i : i + span]) for i in range(len(tokens) - span + 1)]
    return len(grams) >= 16 and len(set(grams)) < (1 - share) * len(grams)
