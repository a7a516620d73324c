"""Stored weights of the ONNX graph, and what tracing and rounding cost in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxscript import ir

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import load_bound, load_checkpoint, save_checkpoint
from moa_drafter.config import LayerDims
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_export.recipe import PRESETS, Recipe, Weights
from moa_export.recordings import Recording
from moa_export.targets.base import TargetOptions
from moa_export.targets.onnx import GRAPH_FILE, OnnxTarget, capture
from moa_export.targets.onnx_graph import put_with_offsets, round_with_offsets, take_matrices
from moa_export.targets.web import put_rounded, put_rounded_with_offsets
from moa_export.validation import compare, rehearse
from moa_runtime.backends.base import Backend, StepInputs
from moa_runtime.backends.load import load_backend
from moa_runtime.backends.onnx import session_options
from moa_runtime.bundle import Bundle
from support.refusals import refused
from support.tiny import make_tiny_bundle


def test_a_traced_graph_holds_no_copy_of_the_matrices(drafter: MoADrafter) -> None:
    model, matrices = capture(drafter, Recipe())
    weights = [layer.weight.detach().numpy() for _, layer in drafter.named_modules() if hasattr(layer, "in_features")]
    weights.append(drafter.head.numpy())
    assert len(matrices) == 13
    for matrix in matrices.values():
        assert any(np.shares_memory(matrix, weight) for weight in weights)
    floats = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert sum(len(tensor.raw_data) for tensor in floats) < 1024
    operators = {node.input[1]: node.op_type for node in model.graph.node if len(node.input) > 1}
    assert {operators[name] for name in matrices} == {"MatMul"}


def test_a_product_with_a_bias_is_no_matrix_to_take() -> None:
    sizes = {"x": [2, 3], "bias": [5], "y": [2, 5]}
    x, bias, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, size) for n, size in sizes.items())
    weight = onnx.numpy_helper.from_array(np.ones((5, 3), np.float32), "weight")
    node = onnx.helper.make_node("Gemm", ["x", "weight", "bias"], ["y"], name="product", transB=1)
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "one", [x, bias], [y], [weight]))
    with pytest.raises(ValueError, match="product"):
        take_matrices(ir.from_proto(model).graph)


@pytest.mark.parametrize(("linear", "head", "symmetric"), [(8, 4, True), (4, 8, False), (8, 32, False), (32, 8, True)])
def test_every_part_has_its_own_bits(
    drafter: MoADrafter, tmp_path: Path, linear: int, head: int, symmetric: bool
) -> None:
    recipe = Recipe(Weights(linear, 32, symmetric), Weights(head, 32, symmetric), Weights(32))
    target = OnnxTarget(recipe, TargetOptions())
    (entry,) = target.export(drafter, tmp_path).values()
    products = {
        attribute.i
        for node in onnx.load(tmp_path / GRAPH_FILE).graph.node
        if node.op_type == "MatMulNBits"
        for attribute in node.attribute
        if attribute.name == "bits"
    }
    assert products == {linear, head} - {32}
    keys, values = np.random.default_rng(0).standard_normal((2, 30, 2, 16)).astype(np.float32)
    expected = [rehearse(torch_backend_of(drafter, top_k=16), Recording(list(range(10, 40)), 12, keys, values))]
    assert 0 < compare(expected, target.runner(tmp_path, entry)).mean_logprob_error < 0.25


def round_4(matrix: np.ndarray) -> np.ndarray:
    """The matrix that rounding with offsets stands for."""
    codes, scales, least = round_with_offsets(matrix)
    return (codes * scales[:, :, None] + least[:, :, None]).reshape(matrix.T.shape).T


@pytest.mark.parametrize(
    ("put", "rounded", "error"),
    [
        (put_with_offsets, round_4, 0.1),  # activations are rounded to 8 bits
        (put_rounded_with_offsets, round_4, 1e-5),
        (lambda model, name, matrix: put_rounded(model, name, matrix, Weights(4, 32)), np.asarray, 0.2),
        (lambda model, name, matrix: put_rounded(model, name, matrix, Weights(8, 32)), np.asarray, 0.01),
    ],
    ids=["onnx, 4 bits with offsets", "web, 4 bits with offsets", "web, 4 bits", "web, 8 bits"],
)
def test_a_product_is_that_with_the_rounded_matrix(
    tmp_path: Path, put: Callable[..., None], rounded: Callable[[np.ndarray], np.ndarray], error: float
) -> None:
    rng = np.random.default_rng(1)
    matrix, x = rng.normal(0.3, 1, (96, 40)).astype(np.float32), rng.normal(0, 1, (5, 96)).astype(np.float32)
    sizes = {"x": ["T", 96], "y": ["T", 40]}
    x_info, y_info = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, size) for n, size in sizes.items())
    node = onnx.helper.make_node("MatMul", ["x", "weight"], ["y"], name="product")
    weight = onnx.numpy_helper.from_array(np.zeros((0, 0), np.float32), "weight")
    graph = onnx.helper.make_graph([node], "one", [x_info], [y_info], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    put(model, "weight", matrix)
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options(1))
    (y,) = session.run(None, {"x": x})
    assert np.abs(y - x @ rounded(matrix)).max() < error * np.abs(y).max()


def test_what_one_file_cannot_hold_is_refused_before_any_work(drafter: MoADrafter) -> None:
    llama = LayerDims(hidden_size=4096, num_heads=32, num_kv_heads=4, head_dim=128, intermediate_size=6144)
    config = dataclasses.replace(drafter.config, vocab_size=128256, draft_vocab_size=128256, decoder=llama)
    OnnxTarget(PRESETS["laptop"], TargetOptions()).check(config)
    with refused("too_large"):
        OnnxTarget(PRESETS["max-quality"], TargetOptions()).check(config)


def test_a_sharper_drafter_has_a_sharper_graph(
    tiny_target: Path, tiny_drafter: Path, target: Target, tmp_path: Path
) -> None:
    drafter = load_checkpoint(tiny_drafter)
    drafter.config = dataclasses.replace(drafter.config, sharpness=1.5)
    save_checkpoint(drafter, tmp_path / "drafter")
    make_tiny_bundle(tmp_path / "bundle", tiny_target, tmp_path / "drafter", "none", preset="max-quality")

    def logprobs(backend: Backend) -> np.ndarray:
        nothing, row = (np.zeros((count, *backend.kv_shape), np.float32) for count in (0, 1))
        return backend.step(StepInputs.chain([7, 11, 13], (nothing, nothing), (row, row), asked=3)).top_logprobs

    graph = logprobs(load_backend(Bundle.open(tmp_path / "bundle")))
    sharp, plain = (
        logprobs(torch_backend_of(load_bound(folder, target), top_k=graph.shape[1]))
        for folder in (tmp_path / "drafter", tiny_drafter)
    )
    np.testing.assert_allclose(graph, sharp, atol=0.05)
    assert np.abs(sharp - plain).max() > 0.2
