"""Attention of a drafter's step to keys and values in several arrays, as a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from moa_decoder.graph_builder import GraphBuilder, Port
from moa_decoder.spec import LayerSpec
from moa_runtime.backends.base import Bool, Float32
from moa_server.engine.onnx_sessions import session_options


def attention_session(spec: LayerSpec, threads: int | None, *, parts: int) -> ort.InferenceSession:
    """Build attention of ``q [rows, heads * head_dim]`` to keys and values that lie in several arrays, ``[any,
    kv_heads, head_dim]`` each, with a mask; in one array without. :func:`seen` has the inputs of the former."""
    graph, size = GraphBuilder(), spec.heads * spec.head_dim
    inputs: dict[str, Port] = {"q": (np.float32, ["rows", size])}
    for part in range(parts):
        port: Port = (np.float32, [f"seen_{part}", spec.kv_heads, spec.head_dim])
        inputs |= {f"{name}_{part}": port for name in ("keys", "values")}
    mask = None
    if parts > 1:
        inputs["mask"] = (np.bool_, ["rows", "seen"])
        mask = "mask"
    everything = [(f"keys_{part}", f"values_{part}") for part in range(parts)]
    graph.output("mixed", graph.attention("q", spec, everything, mask))
    return graph.session(inputs, {"mixed": (np.float32, ["rows", size])}, session_options(threads))


def seen(parts: Sequence[tuple[Float32, Float32]], mask: Bool) -> dict[str, Any]:
    """Return what rows attend to, as inputs of :func:`attention_session`.

    Args:
        parts: keys and values, ``[any, kv_heads, head_dim]`` each.
        mask: of the rows, ``[rows, all of them]``.
    """
    made: dict[str, Any] = {"mask": mask}
    for number, (keys, values) in enumerate(parts):
        made[f"keys_{number}"], made[f"values_{number}"] = keys, values
    return made
