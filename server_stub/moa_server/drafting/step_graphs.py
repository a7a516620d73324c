"""Attention of a drafter's step to keys and values in several arrays, as graphs of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from moa_decoder.graph_builder import GraphBuilder, Port
from moa_decoder.spec import LayerSpec
from moa_runtime.backends.base import Bool, Float32
from moa_server.engine.onnx_sessions import session_options


class StepAttention:
    """Attention of ``[rows, heads * head_dim]`` to keys and values that lie in one or two arrays, ``[any, kv_heads,
    head_dim]`` each.

    Empty arrays are left out: a product with one ends the process in onnxruntime before 1.32.
    """

    def __init__(self, spec: LayerSpec, threads: int | None) -> None:
        self._masked = [_session(spec, threads, parts=parts, masked=True) for parts in (1, 2)]
        self._unmasked = _session(spec, threads, parts=1, masked=False)

    def __call__(self, queries: Float32, seen: Sequence[tuple[Float32, Float32]], mask: Bool | None = None) -> Float32:
        """Return ``[rows, heads * head_dim]``.

        Args:
            seen: keys and values, at least one of them; without a mask one pair.
            mask: of the rows, ``[rows, all keys]``; None if each attends to all.
        """
        there = [pair for pair in seen if len(pair[0])]
        fed: dict[str, Any] = {"q": queries} if mask is None else {"q": queries, "mask": mask}
        for number, (keys, values) in enumerate(there):
            fed[f"keys_{number}"], fed[f"values_{number}"] = keys, values
        session = self._unmasked if mask is None else self._masked[len(there) - 1]
        mixed: Float32 = session.run(["mixed"], fed)[0]
        return mixed


def _session(spec: LayerSpec, threads: int | None, *, parts: int, masked: bool) -> ort.InferenceSession:
    graph, size = GraphBuilder(), spec.heads * spec.head_dim
    inputs: dict[str, Port] = {"q": (np.float32, ["rows", size])}
    for part in range(parts):
        port: Port = (np.float32, [f"seen_{part}", spec.kv_heads, spec.head_dim])
        inputs |= {f"{name}_{part}": port for name in ("keys", "values")}
    if masked:
        inputs["mask"] = (np.bool_, ["rows", "seen"])
    everything = [(f"keys_{part}", f"values_{part}") for part in range(parts)]
    graph.output("mixed", graph.attention("q", spec, everything, "mask" if masked else None))
    return graph.session(inputs, {"mixed": (np.float32, ["rows", size])}, session_options(threads))
