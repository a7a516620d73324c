"""Targets and drafters on a processor, in numpy and onnxruntime: the engine of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moa_decoder.gguf_weights import GgufWeights
from moa_drafter.config import Eagle3Config, check_fit
from moa_drafter.drafter_weights import read_weights
from moa_drafter.target_facts import TargetFacts
from moa_drafter.target_folder import gguf_of, weights_of
from moa_server.engine.dtypes import BITS
from moa_server.engine.engine import LocalEngine
from moa_server.engine.invariance import settle
from moa_server.engine.onnx_fusion import OnnxFusion
from moa_server.engine.onnx_pass import OnnxPass
from moa_server.engine.onnx_rows import onnx_rows
from moa_server.engine.rounding_loss import check_rounding


def onnx_engine(
    target: TargetFacts,
    drafter_folder: Path | None,
    max_context: int | None = None,
    *,
    dtype: str,
    threads: int | None = None,
    accept_rounding: bool = False,
    **settings: Any,
) -> LocalEngine:
    """Load target and drafter.

    Args:
        dtype: one of :data:`moa_server.engine.dtypes.BITS`.
        threads: of the processor; all processors if omitted.
        accept_rounding: whether a rounded target is served however much rounding costs.
        settings: see :class:`moa_server.engine.engine.LocalEngine`.

    Raises:
        MoaError: target or drafter is unreadable, or they do not fit together; ``unsupported_target`` if the target is
            none that the pass knows.
    """
    drafter = None if drafter_folder is None else read_weights(drafter_folder)  # the quicker one to fail first
    own, quantised = own_dtype(target)
    weights = weights_of(target.folder, None if quantised and dtype == own else BITS[dtype])
    fusion = None
    if drafter is not None and isinstance(drafter.config, Eagle3Config):
        check_fit(drafter.config, target)
        drafter.config = drafter.config.for_layers(len(weights.spec.layers))
        fusion = OnnxFusion(drafter, threads)
    target_pass = OnnxPass(weights, threads=threads, fusion=fusion)
    settle(target_pass, target.fingerprint)
    prints, rows = ("", None) if drafter is None else (drafter.fingerprint, onnx_rows(drafter, threads))
    engine = LocalEngine(target, target_pass, drafter, prints, rows, max_context, weights=weights, **settings)
    if dtype != "float32" and not quantised:
        engine.perplexity_ratio = check_rounding(
            engine, lambda: LocalEngine(target, OnnxPass(weights_of(target.folder))), accepted=accept_rounding
        )
    return engine


def own_dtype(target: TargetFacts) -> tuple[str, bool]:
    """Return the type in which a target's weights are stored, and whether they are quantised."""
    if parts := gguf_of(target.folder):
        bits = GgufWeights(parts).bits
        return next(name for name, each in BITS.items() if each == bits), bits != 32
    return str(getattr(target.config, "dtype", None) or getattr(target.config, "torch_dtype", "float32")), False
