"""An ``.mlpackage`` as functions that can be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.frontend.milproto.load import load as as_program
from coremltools.converters.mil.mil import types

from moa_export.coreml_interpreter.operators import ARITHMETIC, MOVEMENT, Array, MilError

#: The tensors that a model keeps between calls, by name.
States = dict[str, Array]


@dataclass(frozen=True)
class TensorType:
    """Shape and numpy dtype of an input, an output or a state."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def read_package(package: Path) -> dict[str, MilFunction]:
    """The functions of an ``.mlpackage``, by name.

    Raises:
        MilError: there is no ML program, or one that coremltools cannot read back.
    """
    try:
        specification = ct.models.utils.load_spec(str(package))
        weights = package / "Data" / "com.apple.CoreML" / "weights"
        program = as_program(specification, specification.specificationVersion, str(weights))
    except Exception as error:  # protocol buffers, the reader of weights and coremltools share no base class
        raise MilError(f"cannot read the ML program in {package}: {error}") from error
    return {name: MilFunction(function) for name, function in program.functions.items()}


@dataclass(frozen=True)
class _Step:
    """One operator: what computes it, its constants bound; the variables it reads and writes, by name."""

    compute: Callable[..., Any]
    reads: tuple[tuple[str, str | tuple[str, ...]], ...]
    writes: tuple[str, ...]
    rounds: bool
    state: str | None


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
        """States as Core ML makes them: zeros."""
        return {name: np.zeros(kind.shape, np.float32) for name, kind in self.states.items()}

    def __call__(self, inputs: Mapping[str, Array], states: States | None = None) -> dict[str, Array]:
        """Compute the outputs.

        Args:
            inputs: exactly those of :attr:`inputs`; numbers are converted to the input's type.
            states: from :meth:`new_states` of a function with the same states; changed by the call.

        Raises:
            MilError: an input that is missing, unknown or of another shape, states that are missing; an operator
                or a parameter that the evaluator does not know, when first called.
        """
        if inputs.keys() != self.inputs.keys():
            raise MilError(f"the function takes the inputs {_listed(self.inputs)}; it was given {_listed(inputs)}")
        states = states or {}
        if states.keys() != self.states.keys():
            raise MilError(f"the function keeps the states {_listed(self.states)}; it was given {_listed(states)}")
        constants, steps = self._plan
        values: dict[str, Any] = {**constants, **states}
        for name, kind in self.inputs.items():
            if inputs[name].shape != kind.shape:
                raise MilError(f"the input {name} has shape {inputs[name].shape}, the function takes {kind.shape}")
            values[name] = _taken(inputs[name], kind.dtype)
        # What is too large for float16 becomes infinite there as on a device.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for step in steps:
                _run(step, values, states)
        return {name: values[name].astype(kind.dtype) for name, kind in self.outputs.items()}

    @cached_property
    def _plan(self) -> tuple[dict[str, Any], list[_Step]]:
        """Constants by name, and the operators in order."""
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


def _planned(operation: Any, constants: Mapping[str, Any]) -> _Step:
    """The step of an operator.

    Raises:
        MilError: an operator or a parameter that the evaluator does not know.
    """
    kind = operation.op_type
    compute = {**ARITHMETIC, **MOVEMENT, **_STATE_OPERATORS}.get(kind)
    if compute is None:
        raise MilError(f"the evaluator does not know the operator {kind} of {operation.name}")
    bound, reads = {}, []
    for parameter, variables in operation.inputs.items():
        if isinstance(variables, list | tuple):
            reads.append((parameter, tuple(variable.name for variable in variables)))
        elif variables.name in constants:
            bound[parameter] = constants[variables.name]
        else:
            reads.append((parameter, variables.name))
    try:
        inspect.signature(compute).bind(**bound, **dict(reads))
    except TypeError as error:
        raise MilError(f"the evaluator knows {kind}, but not as {operation.name} uses it: {error}") from error
    return _Step(
        partial(compute, **bound),
        tuple(reads),
        tuple(variable.name for variable in operation.outputs),
        kind in ARITHMETIC and operation.outputs[0].dtype == types.fp16,
        operation.state.name if kind == "coreml_update_state" else None,
    )


def _run(step: _Step, values: dict[str, Any], states: States) -> None:
    arguments = {
        parameter: values[names] if isinstance(names, str) else [values[name] for name in names]
        for parameter, names in step.reads
    }
    result = step.compute(**arguments)
    if step.rounds:
        result = round_to_half(result)
    if step.state is not None:
        values[step.state] = states[step.state] = result
    values.update(zip(step.writes, result if len(step.writes) > 1 else (result,), strict=True))


def round_to_half(values: Array) -> Array:
    """float32 numbers rounded to float16, to even in the middle. PyTorch does it in hardware, numpy in software."""
    return torch.from_numpy(np.ascontiguousarray(values)).half().float().numpy()


# Arrays are never changed in place, so a state may be read without a copy.
_STATE_OPERATORS: dict[str, Callable[..., Any]] = {
    "read_state": lambda input: input,
    "coreml_update_state": lambda state, value: value,
}


def _held(value: Any) -> Any:
    """A value as the operators take it: numbers of float16 in float32, flags and sizes as Python's own."""
    if isinstance(value, np.bool_ | np.integer):
        return value.item()
    return value.astype(np.float32) if getattr(value, "dtype", None) == np.float16 else value


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _taken(value: Array, dtype: np.dtype[Any]) -> Array:
    """An input as the function takes it."""
    if dtype == np.float16:
        return round_to_half(value.astype(np.float32, copy=False))
    return value.astype(dtype)


def _tensor_type(kind: Any) -> TensorType:
    return TensorType(tuple(kind.get_shape()), np.dtype(types.nptype_from_builtin(kind.get_primitive())))
