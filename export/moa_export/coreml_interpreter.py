"""Compute Core ML's ML programs, read back from an ``.mlpackage``, with numpy.

Core ML runs on Apple's systems only. Elsewhere this interpreter checks an export on the machine that made it: the same
file, the same inputs, the same rounding to float16 after every operator. It cannot show what a device adds to that,
such as sums in float16 or a defect of a driver.

Operators mean what coremltools' documentation of MIL says; only those of the exported programs are here. float16
values are float32 arrays of numbers that float16 holds: the results of :data:`ARITHMETIC` are rounded, those of
:data:`MOVEMENT` need no rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.frontend.milproto.load import load as as_program
from coremltools.converters.mil.mil import types
from numpy.typing import NDArray

from moa_export.errors import ExportError

Array = NDArray[Any]
Operator = Callable[..., Any]
#: The tensors that a model keeps between calls, by name.
States = dict[str, Array]
# The numpy type for values of each type.
_STORAGE = {"fp16": np.float32, "fp32": np.float32, "int32": np.int32, "int8": np.int8, "uint8": np.uint8}


class MilError(ExportError):
    """A program that cannot be evaluated, or inputs that are not its own; the message names the operator or input."""


@dataclass(frozen=True)
class TensorType:
    """Shape and numpy dtype of an input, an output or a state."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def read_package(package: Path) -> dict[str, MilFunction]:
    """Read the functions of an ``.mlpackage``, by name.

    Raises:
        MilError: there is no ML program, or one that coremltools cannot read back.
    """
    try:
        specification = ct.models.utils.load_spec(str(package))
        weights = package / "Data" / "com.apple.CoreML" / "weights"
        program = as_program(specification, specification.specificationVersion, str(weights))
    except Exception as error:  # protocol buffers, the reader of weights and coremltools share no base class
        raise MilError(f"cannot read the ML program in {package}: {error}", code="damaged") from error
    return {name: MilFunction(function) for name, function in program.functions.items()}


class MilFunction:
    """One function of a program, computed with numpy.

    float16 numbers are computed in float32 and rounded after each operator. Weights are widened at the first call.

    Args:
        function: as coremltools holds it.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        kinds = {name: variable.sym_type for name, variable in function.inputs.items()}
        self.inputs = {name: _tensor_type(kind) for name, kind in kinds.items() if not types.is_state(kind)}
        self.states = {name: _tensor_type(kind.wrapped_type()) for name, kind in kinds.items() if types.is_state(kind)}
        self.outputs = {variable.name: _tensor_type(variable.sym_type) for variable in function.outputs}

    def new_states(self) -> States:
        """Return states as Core ML makes them: zeros."""
        return {name: np.zeros(kind.shape, np.float32) for name, kind in self.states.items()}

    def __call__(self, inputs: Mapping[str, Array], states: States | None = None) -> dict[str, Array]:
        """Compute the outputs.

        Args:
            inputs: exactly those of :attr:`inputs`; numbers are converted to the input's type.
            states: from :meth:`new_states` of a function with the same states; changed by the call.

        Raises:
            MilError: an input that is missing, unknown or of another shape, states that are missing; an operator
                or a parameter that the interpreter does not know, when first called.
        """
        states = states or {}
        for kind, expected, given in (("inputs", self.inputs, inputs), ("states", self.states, states)):
            if given.keys() != expected.keys():
                reason = f"the function takes the {kind} {_listed(expected)}; it was given {_listed(given)}"
                raise MilError(reason, code="wrong_input")
        constants, steps = self._plan
        values: dict[str, Any] = {**constants, **states}
        for name, tensor in self.inputs.items():
            value = inputs[name]
            if value.shape != tensor.shape:
                reason = f"the input {name} has shape {value.shape}, the function takes {tensor.shape}"
                raise MilError(reason, code="wrong_input")
            values[name] = value.astype(np.float32 if tensor.dtype == np.float16 else tensor.dtype)
            if tensor.dtype == np.float16:
                values[name] = round_to_half(values[name])
        # Values too large for float16 become infinite there, as on a device.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for step in steps:
                step(values, states)
        return {name: values[name].astype(tensor.dtype) for name, tensor in self.outputs.items()}

    @cached_property
    def _plan(self) -> tuple[dict[str, Any], list[Callable[[dict[str, Any], States], None]]]:
        """Constants by name; then what computes each operator, in order."""
        constants: dict[str, Any] = {}
        steps = []
        for operation in self._function.operations:
            if operation.op_type == "const":
                constants[operation.outputs[0].name] = _held(operation.outputs[0].val)
            elif operation.op_type.startswith("constexpr_"):
                constants[operation.outputs[0].name] = _held(operation.materialized_val_inference())
            else:
                steps.append(_planned(operation, constants))
        return constants, steps


def _planned(operation: Any, constants: Mapping[str, Any]) -> Callable[[dict[str, Any], States], None]:
    """Bind an operator to its constants.

    Returns:
        a function that takes the values of variables by name, which it extends, and the states, which it may change.

    Raises:
        MilError: an operator or a parameter that the interpreter does not know.
    """
    kind = operation.op_type
    compute = {**ARITHMETIC, **MOVEMENT, **_STATE_OPERATORS}.get(kind)
    if compute is None:
        reason = f"the interpreter does not know the operator {kind} of {operation.name}"
        raise MilError(reason, code="unknown_operator")
    bound: dict[str, Any] = {}
    reads: dict[str, Any] = {}
    for parameter, variables in operation.inputs.items():
        if isinstance(variables, list | tuple):
            reads[parameter] = [variable.name for variable in variables]
        elif variables.name in constants:
            bound[parameter] = constants[variables.name]
        else:
            reads[parameter] = variables.name
    try:
        inspect.signature(compute).bind(**bound, **reads)
    except TypeError as error:
        reason = f"the interpreter knows {kind}, but not as {operation.name} uses it: {error}"
        raise MilError(reason, code="unknown_operator") from error
    writes = [variable.name for variable in operation.outputs]
    rounds = kind in ARITHMETIC and operation.outputs[0].dtype == types.fp16

    def step(values: dict[str, Any], states: States) -> None:
        arguments = {
            parameter: values[names] if isinstance(names, str) else [values[name] for name in names]
            for parameter, names in reads.items()
        }
        result = compute(**bound, **arguments)
        if rounds:
            result = round_to_half(result)
        if kind == "coreml_update_state":
            values[operation.state.name] = states[operation.state.name] = result
        values.update(zip(writes, result if len(writes) > 1 else (result,), strict=True))

    return step


def round_to_half(values: Array) -> Array:
    """Round float32 numbers to float16, to even in the middle. PyTorch does it in hardware, numpy in software."""
    return torch.from_numpy(np.ascontiguousarray(values)).half().float().numpy()


def _held(value: Any) -> Any:
    """Return a value as the operators take it: numbers of float16 in float32, flags and sizes as Python's own."""
    if isinstance(value, np.bool_ | np.integer):
        return value.item()
    return value.astype(np.float32) if getattr(value, "dtype", None) == np.float16 else value


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _tensor_type(kind: Any) -> TensorType:
    return TensorType(tuple(kind.get_shape()), np.dtype(types.nptype_from_builtin(kind.get_primitive())))


def _supported(condition: bool, what: str) -> None:
    if not condition:
        raise MilError(f"the interpreter has no {what}", code="unknown_operator")


def _matmul(x: Array, y: Array, transpose_x: bool = False, transpose_y: bool = False) -> Array:
    return (x.swapaxes(-1, -2) if transpose_x else x) @ (y.swapaxes(-1, -2) if transpose_y else y)


def _softmax(x: Array, axis: int) -> Array:
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def _reduce_log_sum_exp(x: Array, axes: Array, keep_dims: bool) -> Array:
    largest = x.max(axis=tuple(axes), keepdims=True)
    total = largest + np.log(np.exp(x - largest).sum(axis=tuple(axes), keepdims=True))
    return total if keep_dims else total.squeeze(tuple(axes))


def _gather(x: Array, indices: Array, axis: int, batch_dims: int, validate_indices: bool) -> Array:
    """Take slices; an index out of range, for which a device may return anything, is an error in any case."""
    _supported(batch_dims == 0, "gather with batch dimensions")
    if indices.size and not 0 <= indices.min() <= indices.max() < x.shape[axis]:
        reason = f"gather reads position {indices.min()}..{indices.max()} of an axis of {x.shape[axis]}"
        raise MilError(reason, code="out_of_range")
    return x.take(indices, axis=axis)


def _concat(values: Sequence[Array], axis: int, interleave: bool) -> Array:
    _supported(not interleave, "concat with interleaving")
    return np.concatenate(values, axis=axis)


def _reshape(x: Array, shape: Array) -> Array:
    _supported(bool((shape > 0).all()), "reshape to a size that depends on the input")
    return x.reshape(tuple(shape))


def _topk(
    x: Array, k: int, axis: int, ascending: bool, sort: bool, return_indices: bool, output_indices_dtype: str
) -> tuple[Array, Array]:
    """Return the largest numbers; of equal ones the first wins, while a device may choose another."""
    _supported(not ascending and sort and return_indices, "topk other than sorted from the largest with indices")
    # The k-th largest first, so that only the few numbers that reach it have to be sorted.
    rows = np.moveaxis(x, axis, -1)
    least = np.partition(rows, -k, axis=-1)[..., -k]
    indices = np.empty((*rows.shape[:-1], k), _STORAGE[output_indices_dtype])
    for place in np.ndindex(rows.shape[:-1]):
        candidates = np.flatnonzero(rows[place] >= least[place])
        indices[place] = candidates[np.argsort(-rows[place][candidates], kind="stable")[:k]]
    return np.moveaxis(np.take_along_axis(rows, indices, -1), -1, axis), np.moveaxis(indices, -1, axis)


def _slice_update(
    x: Array,
    update: Array,
    begin: Array,
    end: Array,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
) -> Array:
    """Write ``update`` to ``begin..end`` of each axis of ``x``; a mask widens that to the axis's own limit."""
    first = begin if begin_mask is None else np.where(begin_mask, 0, begin)
    last = end if end_mask is None else np.where(end_mask, x.shape, end)
    if (first < 0).any() or (last > x.shape).any() or tuple(last - first) != update.shape:
        reason = f"slice_update writes {list(update.shape)} to {list(first)}..{list(last)} of {list(x.shape)}"
        raise MilError(reason, code="out_of_range")
    written = x.copy()
    written[tuple(map(slice, first, last))] = update
    return written


def _gelu(x: Array, mode: str) -> Array:
    approximate = {"EXACT": "none", "TANH_APPROXIMATION": "tanh"}[mode]
    gelu: Array = torch.nn.functional.gelu(torch.from_numpy(x), approximate=approximate).numpy()
    return gelu


#: Operators that compute new numbers.
ARITHMETIC: dict[str, Operator] = {
    "abs": lambda x: np.abs(x),
    "add": lambda x, y: x + y,
    "cast": lambda x, dtype: x.astype(_STORAGE[dtype]),
    "floor": lambda x: np.floor(x),
    "gelu": _gelu,
    "linear": lambda x, weight, bias: x @ weight.T + bias,
    "matmul": _matmul,
    "maximum": lambda x, y: np.maximum(x, y),
    "mul": lambda x, y: x * y,
    "real_div": lambda x, y: x / y,
    "reduce_log_sum_exp": _reduce_log_sum_exp,
    "reduce_max": lambda x, axes, keep_dims: x.max(axis=tuple(axes), keepdims=keep_dims),
    "reduce_mean": lambda x, axes, keep_dims: x.mean(axis=tuple(axes), keepdims=keep_dims),
    "reduce_sum": lambda x, axes, keep_dims: x.sum(axis=tuple(axes), keepdims=keep_dims),
    # exp of a large number would overflow; its share is 0 in float16 long before.
    "silu": lambda x: x / (1 + np.exp(np.minimum(-x, 80))),
    "softmax": _softmax,
    "sqrt": lambda x: np.sqrt(x),
    "square": lambda x: x * x,
    "sub": lambda x, y: x - y,
    "tanh": lambda x: np.tanh(x),
}
#: Operators that only choose or rearrange numbers.
MOVEMENT: dict[str, Operator] = {
    "concat": _concat,
    "expand_dims": lambda x, axes: np.expand_dims(x, tuple(axes)),
    "gather": _gather,
    "reshape": _reshape,
    "slice_update": _slice_update,
    "split": lambda x, num_splits, axis: np.split(x, num_splits, axis=axis),
    "tile": lambda x, reps: np.tile(x, tuple(reps)),
    "topk": _topk,
    "transpose": lambda x, perm: x.transpose(tuple(perm)),
}
# Arrays are never changed in place, so a state may be read without a copy.
_STATE_OPERATORS: dict[str, Operator] = {
    "read_state": lambda input: input,
    "coreml_update_state": lambda state, value: value,
}
