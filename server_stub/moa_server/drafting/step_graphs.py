"""Parts of the graphs of a drafter's step: attention to keys and values in several arrays, and candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from moa_decoder.graph_builder import CONTRIB, GraphBuilder, Port
from moa_decoder.spec import LayerSpec
from moa_runtime.backends.base import Bool, Float32
from moa_server.engine.onnx_sessions import session_options


def attention_session(spec: LayerSpec, threads: int | None, *, parts: int) -> ort.InferenceSession:
    """Build attention of ``q [rows, kv_heads, heads / kv_heads, head_dim]`` to keys and values that lie in several
    arrays, ``[any, kv_heads, head_dim]`` each, with a mask; in one array without. :func:`seen` has the inputs of the
    former."""
    graph = GraphBuilder()
    heads, groups, width = spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim
    inputs: dict[str, Port] = {"q": (np.float32, ["rows", heads, groups, width])}
    for part in range(parts):
        inputs |= {f"{name}_{part}": (np.float32, [f"seen_{part}", heads, width]) for name in ("keys", "values")}
    # Heads of one group become further rows, so keys and values are never repeated.
    q = graph.op("Reshape", graph.op("Transpose", "q", perm=[1, 0, 2, 3]), graph.integers(heads, -1, width))
    product: dict[str, Any] = {"domain": CONTRIB, "transBatchB": 1}  # of each head, without moving keys and values
    scores = [graph.op("FusedMatMul", q, f"keys_{part}", transB=1, **product) for part in range(parts)]
    if parts == 1:
        weights = [graph.op("Softmax", scores[0], axis=-1)]
    else:
        inputs |= {"mask": (np.bool_, ["all", "seen"]), "sizes": (np.int64, [parts])}
        whole = graph.op("Concat", *scores, axis=-1)
        seen = graph.op("Where", "mask", whole, graph.constant(np.array(-np.inf, np.float32)))
        weights = graph.ops("Split", graph.op("Softmax", seen, axis=-1), "sizes", outputs=parts, axis=-1)
    mixed = graph.op("FusedMatMul", weights[0], "values_0", **product)
    for part in range(1, parts):
        mixed = graph.op("Add", mixed, graph.op("FusedMatMul", weights[part], f"values_{part}", **product))
    mixed = graph.op("Reshape", mixed, graph.integers(heads, -1, groups, width))
    mixed = graph.op("Transpose", mixed, perm=[1, 0, 2, 3])
    graph.output("mixed", graph.op("Reshape", mixed, graph.integers(-1, heads * groups * width)))
    outputs: dict[str, Port] = {"mixed": (np.float32, ["rows", heads * groups * width])}
    return graph.session(inputs, outputs, session_options(threads))


def seen(parts: Sequence[tuple[Float32, Float32]], mask: Bool, groups: int) -> dict[str, Any]:
    """Return what rows attend to, as inputs of :func:`attention_session`.

    Args:
        parts: keys and values, ``[any, kv_heads, head_dim]`` each.
        mask: of the rows, ``[rows, all of them]``.
        groups: query heads for each of keys and values: they become rows that see the same.
    """
    made: dict[str, Any] = {
        "mask": np.repeat(mask, groups, axis=0),
        "sizes": np.array([len(keys) for keys, _ in parts]),
    }
    for number, (keys, values) in enumerate(parts):
        made[f"keys_{number}"], made[f"values_{number}"] = keys, values
    return made


def add_candidates(graph: GraphBuilder, logits: str, top_k: int) -> None:
    """Add the outputs ``indices`` and ``logprobs`` (nats), ``[rows, top_k]``, best first, of logits ``[rows,
    tokens]``."""
    top, indices = graph.ops("TopK", logits, graph.integers(top_k), outputs=2)
    graph.output("indices", indices)
    # ReduceLogSumExp takes as long as the product.
    best = graph.op("Slice", top, graph.integers(0), graph.integers(1), graph.integers(1))
    total = graph.op("ReduceSum", graph.op("Exp", graph.op("Sub", logits, best)), graph.integers(1))
    graph.output("logprobs", graph.op("Sub", graph.op("Sub", top, best), graph.op("Log", total)))
