"""What holds for every way in which vLLM is used here: sizes, and how it is said that a target cannot be run."""

from __future__ import annotations

import torch

from moa_drafter.config import key_value_size
from moa_drafter.target import TargetFacts
from moa_server.rooms import rounded_up
from moa_server.target_settings import EngineError

#: Tokens of a block: small ones, for a rewind computes part of one again. vLLM's attention on CPUs wants multiples
#: of 32.
BLOCK = 32
#: Tokens of one draft at most: what vLLM's verification is made for.
MOST_DRAFTED = 128
#: Tokens of vLLM's context that no conversation has: the choice behind one that is full, and one more, for vLLM ends a
#: request that fills its context.
SPARE = 2


def pool_blocks(cache_tokens: int, max_context: int) -> int:
    """Blocks for so many tokens of all sequences together, and at least for a whole context and a draft."""
    return rounded_up(max(cache_tokens, max_context + MOST_DRAFTED), BLOCK) // BLOCK


def block_bytes(target: TargetFacts, dtype: torch.dtype) -> int:
    """What a block takes, all layers together."""
    return BLOCK * key_value_size(target.config) * target.config.num_hidden_layers * dtype.itemsize


def refused(target: TargetFacts, error: Exception) -> EngineError:
    """What is said where vLLM raised ``error`` on a target."""
    why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return EngineError(f"vLLM cannot run the target in {target.folder} here: {why}; --engine transformers may")
