"""``tools/step_floor.py``: the floor against the weights of the graph, and the command."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from moa_runtime.errors import MoaError
from step_floor import Product, floor_model, main


def float_graph(*nodes: onnx.NodeProto, **weights: np.ndarray) -> onnx.ModelProto:
    """A model of nodes over the input ``x``, with stored weights."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("T", None))]
    outputs = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    opsets = [helper.make_opsetid("", 20)]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def outputs_of(model: onnx.ModelProto, inputs: list[np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {tensor.name: x for tensor, x in zip(session.get_inputs(), inputs, strict=True)})


def test_the_floor_holds_the_products_with_stored_weights_and_computes_them():
    random = np.random.default_rng(0)
    a, b, c = (random.standard_normal(shape, dtype=np.float32) for shape in ((8, 4), (8, 6), (6, 5)))
    bias = random.standard_normal(6, dtype=np.float32)
    model = float_graph(
        helper.make_node("Gemm", ["x", "a"], ["y"], transB=1),
        helper.make_node("Gemm", ["y", "b", "bias"], ["z"]),
        helper.make_node("Cast", ["c"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["z", "wide"], ["w"]),
        helper.make_node("Transpose", ["w"], ["v"]),
        helper.make_node("MatMul", ["w", "v"], ["scores"]),  # both factors are computed: attention
        helper.make_node("Mul", ["scores", "scale"], ["out"]),
        a=a,
        b=b,
        bias=bias,
        c=c.astype(np.float16),
        scale=np.array(2, np.float32),
    )
    floor, products = floor_model(model)
    assert products == [Product("a", 4, 8, 32), Product("b", 8, 6, 32), Product("wide", 6, 5, 16)]
    inputs = [random.standard_normal((3, product.k), dtype=np.float32) for product in products]
    expected = [inputs[0] @ a.T, inputs[1] @ b + bias, inputs[2] @ c.astype(np.float16)]
    for got, wanted in zip(outputs_of(floor, inputs), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_the_floor_refuses_what_it_does_not_know():
    weights = np.ones((4, 4), np.int8)
    unknown = float_graph(helper.make_node("MatMulInteger", ["x", "w"], ["y"], name="product"), w=weights)
    with pytest.raises(MoaError, match="MatMulInteger"):
        floor_model(unknown)
    with pytest.raises(MoaError):
        floor_model(float_graph(helper.make_node("Neg", ["x"], ["y"])))


# -- the command ---------------------------------------------------------------------------------


def test_steps_are_timed_beside_their_floor(onnx_bundle, capsys):
    words = ["--bundle", str(onnx_bundle), "--threads", "1", "--contexts", "0,16", "--repeats", "2"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(step["context"], step["tokens"]) for step in found["steps"]] == [(0, 1), (0, 8), (16, 1), (16, 8)]
    for step in found["steps"]:
        assert step["ratio"] == pytest.approx(step["ms"] / step["floor_ms"], rel=0.01)
    assert main(words) == 0
    assert f": {len(found['products'])}, with " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--contexts", "16,505"], "504"),
        (["--contexts", "many"], "[not_a_number]"),
        (["--target", "stranger", "--contexts", "0"], "[no_backend]"),
    ],
)
def test_bad_input_is_one_sentence(onnx_bundle, words, said, capsys):
    assert main(["--bundle", str(onnx_bundle), *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
