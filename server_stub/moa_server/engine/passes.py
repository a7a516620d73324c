"""Which pass computes a target."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from moa_drafter.target import Target
from moa_server.engine.forward import Piece, TargetPass
from moa_server.engine.fused_llama import FusedLlama, misfit
from moa_server.engine.general_pass import GeneralPass
from moa_server.engine.invariance import is_invariant
from moa_server.engine.kv_cache import Room
from moa_server.engine.packed_linear import can_pack

#: Tokens of the comparison with transformers' own forward.
_TRIAL_TOKENS = 12
#: How far the two may be apart, relative to the size of the hidden states. A pass that is wrong is wrong by about 1.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}

_log = logging.getLogger(__name__)


def target_pass(target: Target, dtype: torch.dtype, *, keep_last: bool = False) -> tuple[TargetPass, bool]:
    """The fused pass where it computes what transformers computes, else the general one.

    Returns:
        the pass, and whether its results are the same to the bit whatever stands beside them.
    """
    reason = misfit(target)
    if reason is None:
        fused = FusedLlama(target, dtype, keep_last=keep_last)
        error = deviation(fused, target)
        if error <= _TOLERANCE[dtype]:
            return fused, _invariant(fused, target, dtype)
        reason = f"it differs from transformers by {error:.2g}"
    _log.info("the target runs through transformers' own forward, which is slower: %s", reason)
    return GeneralPass(target, keep_last=keep_last), False


def _invariant(fused: FusedLlama, target: Target, dtype: torch.dtype) -> bool:
    """Whether equality to the bit can be promised: only of packed matrices, on a processor that keeps it."""
    config = target.model.config
    if target.device.type != "cpu" or not can_pack(dtype):
        return False
    if is_invariant(fused, config.vocab_size, config.max_position_embeddings):
        return True
    _log.info("on this processor the target's choices may depend, in the last bits, on what else is in a step")
    return False


@torch.inference_mode()
def deviation(candidate: TargetPass, target: Target) -> float:
    """Root mean square error of the hidden states of a few tokens, relative to transformers' own."""
    vocabulary = target.model.config.vocab_size
    tokens = [(7919 * index + 13) % vocabulary for index in range(_TRIAL_TOKENS)]
    expected: Tensor = target.model.model(input_ids=torch.tensor([tokens], device=target.device)).last_hidden_state[0]
    hidden, _ = candidate.forward([Piece(Room(candidate.room_shape, len(tokens)), 0, tokens)])
    expected = expected.float()
    error = (hidden.float() - expected).square().mean() / expected.square().mean()
    return float(error.sqrt())
