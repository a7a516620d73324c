"""Which pass computes a target."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from moa_drafter.target import Target, deviation_from_transformers
from moa_server.engine.forward import Piece, TargetPass
from moa_server.engine.fused_llama import FusedLlama, misfit
from moa_server.engine.general_pass import GeneralPass
from moa_server.engine.invariance import is_invariant
from moa_server.engine.kv_cache import Room
from moa_server.engine.packed_linear import can_pack
from moa_server.engine.target_settings import EngineError

#: Tokens of the comparison with transformers' own forward: a chain, a single token, and the right path of a tree.
_CHAIN = 6
#: The tree of the comparison, in which a wrong token stands beside the first and the second right one.
_TREE, _PARENTS = (1, 3, 4, 5, 6), (0, 0, 2, 2, 4, 5, 6)
#: How far the two may be apart, relative to the size of what is compared. A pass that is wrong is wrong by about 1.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
#: What transformers' own code raises where it is run in ways that a family does not know.
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)

_log = logging.getLogger(__name__)


def target_pass(target: Target, dtype: torch.dtype, *, keep_last: bool = False) -> tuple[TargetPass, bool]:
    """The fused pass where it computes what transformers computes, else the general one.

    Returns:
        the pass, and whether its results are the same to the bit whatever stands beside them.

    Raises:
        EngineError: neither computes it.
    """
    reason = misfit(target)
    if reason is None:
        try:
            fused = FusedLlama(target, dtype, keep_last=keep_last)
            error = deviation(fused, target)
        except _FAILURES as failure:
            reason = _first_line(failure)
        else:
            if error <= _TOLERANCE[dtype]:
                return fused, _invariant(fused, target, dtype)
            reason = f"it differs from transformers by {error:.2g}"
    _log.info("the target runs through transformers' own forward, which is slower: %s", reason)
    try:
        general = GeneralPass(target, keep_last=keep_last)
        error = deviation(general, target)
    except _FAILURES as failure:
        raise EngineError(f"{_named(target)} cannot be run piece by piece: {_first_line(failure)}") from failure
    if error > 3 * _TOLERANCE[target.model.dtype]:  # rounding may choose other experts
        raise EngineError(f"{_named(target)} computes otherwise piece by piece: its states differ by {error:.2g}")
    return general, False


def _first_line(failure: Exception) -> str:
    return (str(failure).splitlines() or [type(failure).__name__])[0]


def _named(target: Target) -> str:
    return f"the target in {target.folder}, of the architecture {target.config.model_type!r},"


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
    """How far a pass is from transformers' own forward, see :func:`moa_drafter.target.deviation_from_transformers`."""

    def compute(text: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        room = Room(candidate.room_shape, len(text) + len(_PARENTS))
        path, wrong = text[_CHAIN + 1 :], text[0]
        tree = [path[_TREE.index(index)] if index in _TREE else wrong for index in range(len(_PARENTS))]
        pieces = [
            Piece(room, 0, text[:_CHAIN], shift=start),
            Piece(room, _CHAIN, text[_CHAIN : _CHAIN + 1], shift=start),
            Piece(room, _CHAIN + 1, (), tree, _PARENTS, shift=start),
        ]
        states = [candidate.forward([piece])[0] for piece in pieces]
        hidden = torch.cat((*states[:2], states[2][list(_TREE)]))
        return hidden, candidate.logits(hidden)

    return deviation_from_transformers(target, _CHAIN + 1 + len(_TREE), compute)
