"""Targets and drafters in torch: the pass that computes a target loaded with transformers, and the engine of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moa_drafter.architectures.eagle3 import Eagle3Drafter
from moa_drafter.config import Reads, check_fit
from moa_drafter.drafter import Drafter
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target, deviation_from_transformers, load_target
from moa_server.engine.base import EngineError, dtype_of
from moa_server.engine.engine import LocalEngine
from moa_server.engine.fused_llama import FusedLlama, misfit
from moa_server.engine.general_pass import GeneralPass, narrow_windows
from moa_server.engine.invariance import is_invariant
from moa_server.engine.memory_rows import MemoryRows, load_drafter
from moa_server.engine.packed_linear import can_pack
from moa_server.engine.target_pass import Fusion, Piece
from moa_server.engine.torch_fusion import TorchFusion

_log = logging.getLogger(__name__)

#: Tokens of the comparison with transformers' own forward: a chain, a single token, and the right path of a tree.
_CHAIN = 6
#: The tree of the comparison, in which the first and the second right token each have a wrong sibling.
_TREE, _PARENTS = (1, 3, 4, 5, 6), (0, 0, 2, 2, 4, 5, 6)
#: Tokens of a window in the comparison, shorter than its texts.
_WINDOW = 4
#: Largest accepted difference, relative to the size of the compared values. A wrong pass differs by about 1.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
#: Exceptions of transformers' own code when a model family does not support a way of running it.
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)


def target_pass(target: Target, dtype: torch.dtype, *, fusion: Fusion | None = None) -> FusedLlama | GeneralPass:
    """Return the fused pass if it computes what transformers computes, otherwise the general one.

    Raises:
        EngineError: neither pass computes it.
    """
    reason = misfit(target)
    if reason is None:
        try:
            fused = FusedLlama(target, dtype, fusion=fusion)
            error = deviation(fused, target)
        except _FAILURES as failure:
            reason = _first_line(failure)
        else:
            if error <= _TOLERANCE[dtype]:
                fused.batch_invariant = _invariant(fused, target, dtype)
                return fused
            reason = f"it differs from transformers by {error:.2g}"
    _log.info("the target runs through transformers' own forward, which is slower: %s", reason)
    wrong = 3 * _TOLERANCE[target.model.dtype]  # rounding may choose other experts
    name = f"the target in {target.folder}, of the architecture {target.config.model_type!r},"
    try:
        general = GeneralPass(target, fusion=fusion)
        error = deviation(general, target)
    except _FAILURES as failure:
        text = f"{name} cannot be run piece by piece: {_first_line(failure)}"
        raise EngineError(text, code="unsupported_target") from failure
    if error > wrong:
        text = f"{name} computes otherwise piece by piece: its states differ by {error:.2g}"
        raise EngineError(text, code="wrong_results")
    with narrow_windows(target.config, _WINDOW) as narrow:
        general.windows = not narrow or deviation(general, target) <= wrong
    return general


def _first_line(failure: Exception) -> str:
    return (str(failure).splitlines() or [type(failure).__name__])[0]


def _invariant(fused: FusedLlama, target: Target, dtype: torch.dtype) -> bool:
    """Whether bit-identical results can be promised: only for packed matrices, on a processor that keeps them."""
    config = target.model.config
    if target.device.type != "cpu" or not can_pack(dtype):
        return False
    invariant = is_invariant(fused, config.vocab_size, config.max_position_embeddings)
    if not invariant:
        _log.info("on this processor the target's choices may depend, in the last bits, on what else is in a step")
    return invariant


@torch.inference_mode()
def deviation(candidate: FusedLlama | GeneralPass, target: Target) -> float:
    """Return the deviation of a pass, see :func:`moa_drafter.target.deviation_from_transformers`."""

    def compute(text: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        cache = candidate.cache_shape.new_cache(len(text) + len(_PARENTS))
        path, wrong = text[_CHAIN + 1 :], text[0]
        tree = [path[_TREE.index(index)] if index in _TREE else wrong for index in range(len(_PARENTS))]
        first, chain, single = _CHAIN + 1, text[:_CHAIN], text[_CHAIN : _CHAIN + 1]
        states = [
            candidate.forward([Piece(cache, 0, chain, shift=start)])[0],
            candidate.forward([Piece(cache, _CHAIN, single, shift=start)])[0],
        ]
        if candidate.trees:
            nodes = candidate.forward([Piece(cache, first, (), tree, _PARENTS, shift=start)])[0]
            states.append(nodes[list(_TREE)])
        else:  # after a draft whose first token alone is right
            candidate.forward([Piece(cache, first, [path[0], *[wrong] * 2], drafted=3, shift=start)])
            cache.keep(first, [0])
            states += [candidate.forward([Piece(cache, first, path[:1], drafted=1, shift=start)])[0]]
            cache.keep(first, [0])
            states += [candidate.forward([Piece(cache, first + 1, path[1:], drafted=len(path) - 1, shift=start)])[0]]
        hidden = torch.cat(states)
        return hidden, torch.from_numpy(np.stack(list(candidate.logits([hidden])))).to(hidden.device)

    return deviation_from_transformers(target, _CHAIN + 1 + len(_TREE), compute)


def torch_engine(
    target: Target,
    drafter: Drafter | None = None,
    drafter_fingerprint: str = "",
    max_context: int | None = None,
    *,
    dtype: str = "auto",
    cache_tokens: int = 32768,
    release_weights: bool = False,
) -> LocalEngine:
    """Make an engine whose target and drafter run in torch.

    Args:
        drafter: with its fingerprint; without one, or with one that reads nothing, there are no memory rows.
        dtype: of the products, "float32" or "bfloat16"; "auto" is float32 on a CPU, bfloat16 elsewhere.
        release_weights: free the weights of the target's own layers if the pass has its own; only the engine can use
            the target afterwards.

    Raises:
        FitError: the drafter is of another target.
        EngineError: target, drafter and settings do not fit together.
    """
    products = dtype_of(dtype, target.device)
    fusion = None
    if isinstance(drafter, Eagle3Drafter):
        check_fit(drafter.config, target)
        drafter.config = drafter.config.for_layers(len(target.layers))
        fusion = TorchFusion(drafter)
    reads = Reads() if drafter is None else drafter.row_reads
    rows = MemoryRows(drafter, products) if drafter is not None and reads else None
    if isinstance(drafter, MoADrafter) and not drafter.is_whole:
        drafter.bind_target(target.embedding, target.head, target.layers)  # as long as they have weights
    own = target_pass(target, products, fusion=fusion)
    engine = LocalEngine(target, own, drafter, drafter_fingerprint, rows, max_context, cache_tokens)
    if release_weights and own.has_own_weights:
        for parameter in (each for layer in target.layers for each in layer.parameters()):
            parameter.data = parameter.data.new_empty(0)
    return engine


def load_torch_engine(
    target_name: str,
    drafter_folder: Path | None,
    device: str = "cpu",
    max_context: int | None = None,
    *,
    dtype: str = "auto",
    **settings: Any,
) -> LocalEngine:
    """Load target and drafter in torch; for the other arguments and ``settings`` see :func:`torch_engine`.

    Raises:
        MoaError: target or drafter is missing, unreadable, or does not fit.
    """
    drafter, fingerprint = load_drafter(drafter_folder, device)  # the quicker one to fail first
    target = load_target(target_name, device=device, dtype=dtype_of(dtype, torch.device(device)))
    return torch_engine(target, drafter, fingerprint, max_context, dtype=dtype, **settings)
