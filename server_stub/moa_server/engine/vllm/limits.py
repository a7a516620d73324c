"""What holds for every way in which vLLM is used here: sizes, and how it is said that a target cannot be run."""

from __future__ import annotations

import os

import torch

from moa_drafter.config import key_value_size
from moa_drafter.target import TargetFacts
from moa_drafter.vllm_environment import reason
from moa_server.engine.kv_cache import rounded_up
from moa_server.engine.target_settings import EngineError

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


def check_device(device: str) -> None:
    """Raises EngineError: vLLM, as it is installed, computes on another one."""
    from vllm.platforms import current_platform

    if torch.device(device).type != current_platform.device_type:
        raise EngineError(
            f"vLLM as it is installed here computes on {current_platform.device_type}, not on --device {device}: "
            f"choose --device {current_platform.device_type}, or another release of vLLM"
        )


def check_memory(target: TargetFacts, dtype: torch.dtype, blocks: int, device: torch.device) -> None:
    """Raises EngineError: caches of so many blocks are larger than all memory of the device."""
    size = blocks * block_bytes(target, dtype)
    there = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else _memory_bytes()
    if size > there:
        raise EngineError(
            f"caches for {blocks * BLOCK} tokens take {size / 1e9:.1f} GB, and the {device.type} has "
            f"{there / 1e9:.1f} GB: lower --cache-tokens or --max-context"
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def refused(target: TargetFacts, error: Exception) -> EngineError:
    """What is said where vLLM raised ``error`` on a target."""
    return EngineError(
        f"vLLM cannot run the target in {target.folder} here: {reason(error)}; --engine transformers may"
    )
