"""A graph of one product, for weights that a test puts there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

ROWS, COLUMNS = 96, 40


def matrix_and_input() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A weight ``[ROWS, COLUMNS]`` whose numbers are mostly positive, and an input ``[5, ROWS]``."""
    rng = np.random.default_rng(1)
    return rng.normal(0.3, 1, (ROWS, COLUMNS)).astype(np.float32), rng.normal(0, 1, (5, ROWS)).astype(np.float32)


def one_product(
    put: Callable[[onnx.ModelProto], None],
    x: NDArray[np.float32],
    folder: Path,
    *,
    ir_version: int,
    options: onnxruntime.SessionOptions | None = None,
) -> NDArray[np.float32]:
    """What onnxruntime computes of ``x @ weight``.

    Args:
        put: puts the weight named ``weight`` into the model, in whatever form.
        folder: in which the graph is written.
        ir_version: of the file.
    """
    sizes = {"x": ["T", ROWS], "y": ["T", COLUMNS]}
    values = {n: onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, size) for n, size in sizes.items()}
    weight = onnx.numpy_helper.from_array(np.zeros((0, 0), np.float32), "weight")
    node = onnx.helper.make_node("MatMul", ["x", "weight"], ["y"], name="product")
    graph = onnx.helper.make_graph([node], "one", [values["x"]], [values["y"]], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=ir_version)
    put(model)
    onnx.save(model, folder / "one.onnx")
    (y,) = onnxruntime.InferenceSession(str(folder / "one.onnx"), options).run(None, {"x": x})
    return y


def widened(codes: NDArray[np.uint8], scales: NDArray[np.float32], least: NDArray[np.float32]) -> NDArray[np.float32]:
    """The matrix ``[ROWS, COLUMNS]`` that rounding with offsets stands for."""
    return (codes * scales[:, :, None] + least[:, :, None]).reshape(COLUMNS, ROWS).T
