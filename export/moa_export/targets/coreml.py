"""Export target ``coreml``: two ``.mlpackage`` models, one that keeps its caches and one for older systems.

Both are ML programs of fixed sizes in float16; weights of 16 and 32 bits are stored as float16 alike. What the
functions are for, :mod:`moa_export.targets.coreml_program` tells.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import coremltools as ct

from moa_drafter.config import DrafterConfig
from moa_drafter.model import MoADrafter
from moa_export.coreml_interpreter.program import MilFunction, read_package, round_to_half
from moa_export.errors import ExportError
from moa_export.recipe import Recipe
from moa_export.targets.base import (
    Artifact,
    NotRun,
    TargetOptions,
    plain_specs,
    refuse_copied_layers,
    refuse_without_rows,
)
from moa_export.targets.coreml_package import write_package
from moa_export.targets.coreml_program import FUNCTIONS, stateful_program, stateless_program
from moa_export.targets.coreml_stateful import StatefulBackend
from moa_export.targets.coreml_weights import stored_form
from moa_runtime.backends.base import Backend, Float32
from moa_runtime.backends.coreml import Array, CoremlBackend, FixedSizeBackend, load_model, running
from moa_runtime.bundle import TensorSpec
from moa_runtime.errors import MoaError

STATEFUL_FILE, STATELESS_FILE = "DeviceHalf.mlpackage", "DeviceHalfStateless.mlpackage"
# Caches are written in pieces of 32 positions. The Neural Engine has no axes longer than 16384.
_CAPACITY_STEP, _MOST_CAPACITY = 32, 8192


class CoremlTarget:
    """See :class:`moa_export.targets.base.ExportTarget`."""

    extra: ClassVar[str] = "coreml"

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None:
        self._recipe, self._options = recipe, options

    def check(self, config: DrafterConfig) -> None:
        """See :meth:`moa_export.targets.base.ExportTarget.check`."""
        refuse_without_rows("coreml", config)
        refuse_copied_layers("coreml", config.target_layers)
        context = self._options.context
        if context % _CAPACITY_STEP or not 0 < context <= _MOST_CAPACITY:
            raise ExportError(
                f"coreml takes a --context that is a multiple of {_CAPACITY_STEP} and at most {_MOST_CAPACITY}, "
                f"not {context}"
            )
        for part in ("linear", "head", "embedding"):
            weights = getattr(self._recipe, part)
            if weights.is_integer and not weights.symmetric:
                raise ExportError(f"coreml stores the {part} weights without an offset: set symmetric for them")
        self._recipe.check_divides(config)

    def export(self, drafter: MoADrafter, folder: Path) -> list[Artifact]:
        """Write both packages."""
        return [self._stateful(drafter, folder), self._stateless(drafter, folder)]

    def runner(self, folder: Path, artifact: Artifact) -> Backend | NotRun:
        """Core ML on a Mac; elsewhere the program of the package, read back and computed with numpy."""
        package = folder / artifact.file
        if platform.system() != "Darwin":
            functions = read_package(package)
            if artifact.states:
                return StatefulBackend(_Evaluated(functions), _shapes(artifact))
            return FixedSizeBackend(functions["main"], _shapes(artifact))
        try:
            return StatefulBackend(_Loaded(package), _shapes(artifact)) if artifact.states else CoremlBackend(package)
        except MoaError as error:
            return NotRun(str(error))

    def _stateful(self, drafter: MoADrafter, folder: Path) -> Artifact:
        facts = self._facts(ct.target.iOS18)
        specification = write_package(
            stateful_program(drafter, self._recipe, self._options.context),
            folder / STATEFUL_FILE,
            ct.target.iOS18,
            f"{_PURPOSE} Its caches are states. Functions: "
            + "; ".join(f"{name}: {purpose}" for name, purpose in FUNCTIONS.items()),
            facts,
        )
        functions = {function.name: function for function in specification.description.functions}
        main = functions[specification.description.defaultFunctionName]
        details = {
            "least_systems": {"iOS": 18, "macOS": 15},
            "stored": facts,
            "functions": {
                name: {
                    "purpose": purpose,
                    "inputs": plain_specs(_specs(functions[name].input)),
                    "outputs": plain_specs(_specs(functions[name].output)),
                }
                for name, purpose in FUNCTIONS.items()
            },
        }
        return Artifact("coreml", STATEFUL_FILE, _specs(main.input), _specs(main.output), _specs(main.state), details)

    def _stateless(self, drafter: MoADrafter, folder: Path) -> Artifact:
        facts = self._facts(ct.target.iOS17)
        specification = write_package(
            stateless_program(drafter, self._recipe, self._options.context),
            folder / STATELESS_FILE,
            ct.target.iOS17,
            f"{_PURPOSE} Its caches are inputs, which the caller extends by the outputs keys and values.",
            facts,
        )
        main = specification.description
        details = {"least_systems": {"iOS": 17, "macOS": 14}, "stored": facts}
        return Artifact("coreml-stateless", STATELESS_FILE, _specs(main.input), _specs(main.output), (), details)

    def _facts(self, opset: ct.target) -> dict[str, str]:
        """How things are stored, for the model's metadata and the manifest."""
        return {
            "linear": stored_form(self._recipe.linear, opset),
            "head": stored_form(self._recipe.head, opset),
            "embedding": stored_form(self._recipe.embedding, ct.target.iOS18),
            "activations": "float16",
            "positions": str(self._options.context),
        }


_PURPOSE = "Drafts the next tokens of a conversation, for a larger model to verify."


class _Evaluated:
    """A package computed with numpy: a :class:`~moa_export.targets.coreml_stateful.StatefulModel`."""

    def __init__(self, functions: Mapping[str, MilFunction]) -> None:
        self._functions = functions
        self._states = functions[next(iter(FUNCTIONS))].new_states()

    def call(self, function: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return self._functions[function](inputs, self._states)

    def read_state(self, name: str) -> Array:
        return self._states[name]

    def write_state(self, name: str, value: Float32) -> None:
        self._states[name] = round_to_half(value)


class _Loaded:
    """A package in Core ML, on a Mac: a :class:`~moa_export.targets.coreml_stateful.StatefulModel`."""

    def __init__(self, package: Path) -> None:
        models = {name: load_model(package, name) for name in FUNCTIONS}
        self._state = models[next(iter(FUNCTIONS))].make_state()
        self._functions = {name: running(model, state=self._state) for name, model in models.items()}

    def call(self, function: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return self._functions[function](inputs)

    def read_state(self, name: str) -> Array:
        state: Array = self._state.read_state(name)
        return state

    def write_state(self, name: str, value: Float32) -> None:
        self._state.write_state(name, value)


def _shapes(artifact: Artifact) -> dict[str, tuple[int, ...]]:
    tensors = (*artifact.inputs, *artifact.outputs, *artifact.states)
    return {tensor.name: tuple(map(int, tensor.shape)) for tensor in tensors}


def _specs(features: Iterable[Any]) -> tuple[TensorSpec, ...]:
    """Signature out of the descriptions of features in a specification."""
    specs = []
    for feature in features:
        state = feature.type.WhichOneof("Type") == "stateType"
        array = feature.type.stateType.arrayType if state else feature.type.multiArrayType
        dtype = array.ArrayDataType.Name(array.dataType).lower()
        specs.append(TensorSpec(feature.name, dtype, tuple(array.shape)))
    return tuple(specs)
