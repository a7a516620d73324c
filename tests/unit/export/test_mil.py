"""The interpreter of ML programs, and stored weights: what whole packages do not show beside PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from moa_export.quantize import QuantisedEmbedding
from moa_export.recipe import Weights
from support.late import Late
from support.refusals import refused

if TYPE_CHECKING:
    from moa_export.coreml_interpreter import MilFunction

ct, mil = Late("coremltools"), Late("coremltools.converters.mil.mil")
mb = Late("coremltools.converters.mil.mil", "Builder")  # its customary name
interpreter, program = Late("moa_export.coreml_interpreter"), Late("moa_export.targets.coreml_program")
RANDOM = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def built(body: Callable[..., Any], *specs: Any, opset: str = "iOS18") -> MilFunction:
    """A function of inputs ``x0``, ``x1``, ..."""
    names = [f"x{i}" for i in range(len(specs))]
    given = dict(zip(names, specs, strict=True))
    with mil.Function(given, opset_version=ct.target[opset]) as function:
        results = body(*(function.inputs[name] for name in names))
        function.set_outputs(list(results) if isinstance(results, Sequence) else [results])
    return interpreter.MilFunction(function)


def evaluated(body: Callable[..., Any], *values: np.ndarray, **opset: str) -> list[np.ndarray]:
    specs = [mb.TensorSpec(value.shape, mil.types.numpy_type_to_builtin_type(value.dtype)) for value in values]
    outputs = built(body, *specs, **opset)({f"x{i}": value for i, value in enumerate(values)})
    return list(outputs.values())


def test_the_first_of_equal_numbers_is_the_top_one() -> None:
    values, indices = evaluated(
        lambda x: mb.topk(x=x, k=3, axis=-1, ascending=False), np.array([[1, 7, 7, 0, 7]], np.float32)
    )
    assert values.tolist() == [[7, 7, 7]]
    assert indices.tolist() == [[1, 2, 4]]


def test_float16_is_rounded_after_each_operator() -> None:
    half = np.float16

    def body(x: Any) -> Any:
        return mb.sub(x=mb.add(x=x, y=half(1)), y=half(2048))

    values = np.array([2048, 2050, 1, 60000], half)
    (result,) = evaluated(body, values)
    # float16 has steps of 2 from 2048 on: 2049 becomes 2048 and 2051 becomes 2052 before the subtraction.
    assert result.dtype == half
    assert result.tolist() == [0, 4, -2046, 57952]
    (doubled,) = evaluated(lambda x: mb.mul(x=x, y=half(2)), values)
    assert doubled.tolist() == [4096, 4100, 2, np.inf]  # beyond float16, as on a device


@pytest.mark.parametrize("scale", [1e-9, 1e-6, 1e-3, 1.0, 1e3, 1e5])
def test_rounding_to_float16_is_numpys(scale: float) -> None:
    values = floats(1000) * np.float32(scale)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(interpreter.round_to_half(values), values.astype(np.float16).astype(np.float32))


def test_states_are_read_written_and_kept() -> None:
    def body(x: Any, slot: Any, state: Any) -> Any:
        begin = mb.concat(values=[slot, np.zeros(1, np.int32)], axis=0)
        end = mb.add(x=begin, y=np.array([2, 0], np.int32))
        written = mb.slice_update(
            x=mb.read_state(input=state), update=x, begin=begin, end=end, end_mask=[False, True], name="written"
        )
        return mb.reduce_max(x=mb.coreml_update_state(state=state, value=written), axes=[0], keep_dims=False)

    function = built(
        body,
        mb.TensorSpec((2, 3), mil.types.fp16),
        mb.TensorSpec((1,), mil.types.int32),
        mb.state_tensor_placeholder((5, 3), mil.types.fp16),
    )
    states = function.new_states()
    expected = torch.zeros(5, 3)
    for slot in (1, 3, 0):
        new = RANDOM.standard_normal((2, 3)).astype(np.float16)
        expected[slot : slot + 2] = torch.from_numpy(new).float()
        (largest,) = function({"x0": new, "x1": np.array([slot], np.int32)}, states).values()
        np.testing.assert_array_equal(states["x2"], expected.numpy())
        np.testing.assert_array_equal(largest, expected.amax(0).half().numpy())
    with refused("out_of_range", interpreter.MilError):
        function({"x0": new, "x1": np.array([4], np.int32)}, states)
    with refused("wrong_input", interpreter.MilError):
        function({"x0": new, "x1": np.array([0], np.int32)})  # without states


@pytest.mark.parametrize(
    ("operator", "body", "opset"),
    [
        ("erf", lambda x: mb.erf(x=x), "iOS18"),
        ("gather", lambda x: mb.gather(x=x, indices=np.zeros((2, 1), np.int32), axis=1, batch_dims=1), "iOS18"),
        ("topk", lambda x: mb.topk(x=x, k=1, axis=-1, ascending=True), "iOS18"),
        # Without a choice of what is returned.
        ("topk", lambda x: mb.topk(x=x, k=1, axis=-1, ascending=False), "iOS15"),
    ],
)
def test_an_unknown_operator_or_use_is_named(operator: str, body: Callable[..., Any], opset: str) -> None:
    with refused("unknown_operator", interpreter.MilError) as caught:
        evaluated(body, floats(2, 3), opset=opset)
    assert operator in str(caught.value)


def test_wrong_inputs_are_refused() -> None:
    function = built(
        lambda x, i: mb.gather(x=x, indices=i, axis=0),
        mb.TensorSpec((4, 2), mil.types.fp32),
        mb.TensorSpec((1,), mil.types.int32),
    )
    table, index = floats(4, 2), np.array([3], np.int32)
    assert function({"x0": table, "x1": index})
    for wrong in ({"x0": table, "x1": np.array([0, 1], np.int32)}, {"x0": table}):
        with refused("wrong_input", interpreter.MilError):
            function(wrong)
    with refused("out_of_range", interpreter.MilError):
        function({"x0": table, "x1": index + 1})


def test_a_folder_that_is_no_package_is_refused(tmp_path: Path) -> None:
    with refused("damaged", interpreter.MilError):
        interpreter.read_package(tmp_path / "nothing.mlpackage")


@pytest.mark.parametrize("opset", ["iOS17", "iOS18"])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_stored_matrix_is_as_near_as_its_bits_allow(bits: int, opset: str) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 0, 40)[:, None]
    weight[7] = 0
    linear = program.stored_linear("matrix", weight, Weights(bits, 16), ct.target[opset])
    (product,) = evaluated(linear, np.eye(64, dtype=np.float16), opset=opset)
    stored = product.astype(np.float32).T
    error = np.abs(stored - weight.numpy())
    if bits == 4:  # a palette, or scales that clip: no bound for each number
        spread = np.sqrt(np.square(weight.numpy()).mean(axis=1))
        assert (np.sqrt(np.square(error).mean(axis=1)) <= 0.1 * spread + 2**-14).all()
        assert opset != "iOS17" or len(np.unique((stored[0] / spread[0]).round(3))) <= 64
        return
    group = 16 if opset == "iOS18" else 64
    largest = weight.abs().unflatten(1, (-1, group)).amax(2).repeat_interleave(group, 1).numpy()
    step = {16: 2**-10, 8: 1 / 127}[bits] * largest
    assert (error <= 0.52 * step + 2**-13 * largest).all()


@pytest.mark.parametrize("spec", [Weights(16), Weights(8, 0), Weights(8, 16), Weights(4, 0), Weights(4, 32)])
def test_the_stored_embedding_gives_the_rows_of_the_other_targets(spec: Weights) -> None:
    table = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    tokens = np.array([0, 49, 7, 7], np.int32)
    (rows,) = evaluated(program.stored_embedding("table", table, spec), tokens, opset="iOS17")
    other = QuantisedEmbedding(table, spec)(torch.from_numpy(tokens)) if spec.is_integer else table[tokens]
    np.testing.assert_allclose(rows, other.numpy(), rtol=2**-10)
