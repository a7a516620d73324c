"""Export target ``coreml``: two ``.mlpackage`` models, one that keeps its caches and one for older systems.

Both are ML programs of fixed sizes in float16; weights of 16 and 32 bits are stored as float16 alike. What the
functions are for, :mod:`moa_export.targets.coreml_program` tells.
"""

from __future__ import annotations

import json
import platform
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Protocol

import coremltools as ct
import numpy as np
from coremltools.converters.mil.backend.mil.load import load as as_specification
from coremltools.converters.mil.mil import Program

from moa_drafter.config import DrafterConfig
from moa_drafter.model import MoADrafter
from moa_export.coreml_interpreter import MilFunction, read_package, round_to_half
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
from moa_export.targets.coreml_program import (
    EXTEND_SIZE,
    FUNCTIONS,
    ROWS_SIZE,
    STEP_SIZES,
    stateful_program,
    stateless_program,
    stored_form,
)
from moa_runtime.backends.base import Backend, Float32, StepInputs, StepResult
from moa_runtime.backends.coreml import (
    Array,
    CoremlBackend,
    FixedSizeBackend,
    additive_mask,
    check_capacity,
    heads_first,
    load_model,
    padded,
    rows_first,
    running,
)
from moa_runtime.bundle import TensorSpec
from moa_runtime.errors import MoaError

STATEFUL_FILE, STATELESS_FILE = "DeviceHalf.mlpackage", "DeviceHalfStateless.mlpackage"
# Caches are written in pieces of 32 positions. The Neural Engine has no axes longer than 16384.
_CAPACITY_STEP, _MOST_CAPACITY = 32, 8192
AUTHOR = "The moa-edge authors"
LICENSE = (
    "Apache-2.0. The token embedding and the draft head are taken from the target model and stay under its licence."
)
#: What Xcode shows beside each input, output and state.
FEATURES = {
    "tokens": "Ids of new tokens in the target's vocabulary. Fill up with any id where there are fewer.",
    "positions": "Absolute position of each token in the conversation.",
    "slot": "Where in the cache the first new entry is written; the cache must have room for all of the call.",
    "self_mask": "0 where a token (row) may look at a cache entry (column), -10000 elsewhere.",
    "memory_mask": "0 for each memory row in use, -10000 for the others. At least one must be in use.",
    "self_keys": "Self-attention keys of earlier tokens: [1, heads, positions, head size].",
    "self_values": "Self-attention values of earlier tokens: [1, heads, positions, head size].",
    "memory_keys": "Keys of the memory rows that the server sent: [1, heads, rows, head size].",
    "memory_values": "Values of the memory rows that the server sent: [1, heads, rows, head size].",
    "new_keys": "Keys of memory rows to store: [1, heads, rows, head size].",
    "new_values": "Values of memory rows to store: [1, heads, rows, head size].",
    "top_tokens": "For each new token the most probable next ones, best first, as ids of the target's vocabulary.",
    "top_logprobs": "Their natural log-probabilities over the draft vocabulary.",
    "keys": "Self-attention keys of the new tokens: [1, heads, tokens, head size].",
    "values": "Self-attention values of the new tokens: [1, heads, tokens, head size].",
    "next_slot": "The slot after the last entry written.",
}
_PURPOSE = "Drafts the next tokens of a conversation, for a larger model to verify."


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


class _Evaluated:
    """A package computed with numpy: a :class:`~moa_export.targets.coreml.StatefulModel`."""

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
    """A package in Core ML, on a Mac: a :class:`~moa_export.targets.coreml.StatefulModel`."""

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


def write_package(program: Program, path: Path, opset: ct.target, description: str, facts: Mapping[str, str]) -> Any:
    """Write ``program`` as an ``.mlpackage``. The same program gives the same bytes.

    Args:
        path: the package's folder, which must not exist yet.
        opset: the oldest system that it is for.
        description: what the model does, for Xcode's model page.
        facts: further metadata, by name.

    Returns:
        the model's specification, a protocol buffer ``Model`` as Core ML defines it.
    """
    # The program is what it should be: coremltools' passes would only rename and fuse operators.
    program.skip_all_passes = True
    with tempfile.TemporaryDirectory() as weights:
        specification = as_specification(program, weights, specification_version=opset.value)
        _describe(specification, description, facts)
        ct.models.utils.save_spec(specification, str(path), weights_dir=weights)
    # Which entry comes first in a stored map is otherwise decided anew each time.
    model_file(path).write_bytes(specification.SerializeToString(deterministic=True))
    _fix_identifiers(path / "Manifest.json")
    return specification


def model_file(package: Path) -> Path:
    """The specification inside a package."""
    return package / "Data" / "com.apple.CoreML" / "model.mlmodel"


def weights_folder(package: Path) -> Path:
    """The folder of ``weight.bin`` inside a package."""
    return package / "Data" / "com.apple.CoreML" / "weights"


def _describe(specification: Any, description: str, facts: Mapping[str, str]) -> None:
    model = specification.description
    model.metadata.shortDescription = description
    model.metadata.author = AUTHOR
    model.metadata.license = LICENSE
    model.metadata.versionString = version("moa-edge")
    model.metadata.userDefined.update({**facts, "coremltools": ct.__version__})
    for function in model.functions or [model]:
        _describe_features([*function.input, *function.output, *function.state])


def _describe_features(features: Iterable[Any]) -> None:
    for feature in features:
        feature.shortDescription = FEATURES[feature.name]


def _fix_identifiers(manifest: Path) -> None:
    """Replace the random identifiers of a package's items by ones that follow from their paths."""
    content = json.loads(manifest.read_text())
    new = {
        old: str(uuid.uuid5(uuid.NAMESPACE_URL, item["path"])).upper()
        for old, item in content["itemInfoEntries"].items()
    }
    content["itemInfoEntries"] = {new[old]: item for old, item in content["itemInfoEntries"].items()}
    content["rootModelIdentifier"] = new[content["rootModelIdentifier"]]
    manifest.write_text(json.dumps(content, indent=4, sort_keys=True) + "\n")


class StatefulModel(Protocol):
    """A model with several functions and one set of states."""

    def call(self, function: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a function, by name; it reads and changes the states."""

    def read_state(self, name: str) -> Array:
        """A whole state."""

    def write_state(self, name: str, value: Float32) -> None:
        """Replace a whole state."""


class StatefulBackend(Backend):
    """The stateless contract of backends for a model with states, so that it can be compared with PyTorch.

    It remembers the contents of the states. If the caller's cache is shorter, the rest counts as free; if memory rows
    differ, they are written again from the first difference. A cache that the model did not compute is written to the
    states. Tokens before the first query are only appended, in larger pieces.

    Args:
        model: its states zero.
        shapes: of the states, and of the inputs and outputs of a step function, by name.
    """

    def __init__(self, model: StatefulModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        _, kv_heads, self._capacity, head_dim = shapes["self_keys"]
        self._model, self._top_k, self._kv_shape = model, shapes["top_tokens"][1], (kv_heads, head_dim)
        self._own = _Mirror(self._capacity, self._kv_shape)
        self._memory = _Mirror(self._capacity, self._kv_shape)

    @property
    def top_k(self) -> int:
        return self._top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return self._kv_shape

    @property
    def max_positions(self) -> int:
        return self._capacity

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`.

        Raises:
            MoaError: more positions than the model holds.
        """
        tokens, positions, queries = inputs.tokens, inputs.positions, inputs.queries
        held, count, rows = len(inputs.self_keys), len(tokens), len(inputs.memory_keys)
        check_capacity(self._capacity, held + count, rows, int(positions.max()) + 1)
        self._restore(inputs.self_keys, inputs.self_values)
        self._remember(inputs.memory_keys, inputs.memory_values)
        memory_mask = additive_mask(np.arange(self._capacity)[None] < rows)
        top_tokens = np.zeros((count, self._top_k), np.int64)
        top_logprobs = np.zeros((count, self._top_k), np.float32)
        for name, size, start, stop in self._pieces(held, count, int(queries.min())):
            given: dict[str, Array] = {
                "tokens": padded(tokens[start:stop], size),
                "positions": padded(positions[start:stop], size),
                "slot": np.array([held + start], np.int32),
            }
            if name == "step":
                allowed = np.zeros((size, self._capacity), np.bool_)
                allowed[: stop - start, : held + stop] = inputs.self_mask[start:stop, : held + stop]
                given.update(self_mask=additive_mask(allowed), memory_mask=memory_mask)
            outputs = self._model.call(f"{name}_{size}", given)
            if name == "step":
                top_tokens[start:stop] = outputs["top_tokens"][: stop - start]
                top_logprobs[start:stop] = outputs["top_logprobs"][: stop - start]
        keys, values = (
            rows_first(self._model.read_state(name)[:, :, held : held + count]) for name in ("self_keys", "self_values")
        )
        self._own.write(held, keys, values)
        return StepResult(top_tokens[queries], top_logprobs[queries], keys, values)

    def _pieces(self, held: int, count: int, unqueried: int) -> Iterator[tuple[str, int, int, int]]:
        """The calls that feed ``count`` tokens behind ``held`` cached ones: ``extend`` or ``step``, its size, the
        first token and the one after the last. A call needs room for its whole size."""
        start = 0
        while start < count:
            room = self._capacity - held - start
            if start < unqueried and room >= EXTEND_SIZE:
                name, size, limit = "extend", EXTEND_SIZE, unqueried
            else:
                small, large = STEP_SIZES
                size = small if start + small == count or room < large else large
                name, limit = "step", count
            stop = min(start + size, limit)
            yield name, size, start, stop
            start = stop

    def _restore(self, keys: Float32, values: Float32) -> None:
        """Make the self-attention states begin with these entries, which the model need not have computed."""
        known = self._own.common_length(keys, values)
        if known < len(keys):
            self._own.write(known, keys[known:], values[known:])
            self._model.write_state("self_keys", np.ascontiguousarray(heads_first(self._own.keys)))
            self._model.write_state("self_values", np.ascontiguousarray(heads_first(self._own.values)))

    def _remember(self, keys: Float32, values: Float32) -> None:
        """Make the memory states begin with these rows."""
        start = self._memory.common_length(keys, values)
        while start < len(keys):
            # Behind the last full piece of room, some rows are written again.
            slot = min(start, self._capacity - ROWS_SIZE)
            piece = slice(slot, min(slot + ROWS_SIZE, len(keys)))
            self._model.call(
                f"remember_{ROWS_SIZE}",
                {
                    "new_keys": _filled(keys[piece]),
                    "new_values": _filled(values[piece]),
                    "slot": np.array([slot], np.int32),
                },
            )
            self._memory.write(slot, keys[piece], values[piece])
            start = piece.stop


class _Mirror:
    """What the states of one cache hold at positions ``0..length-1``.

    Args:
        capacity: of the states.
        kv_shape: ``(kv_heads, head_dim)``.
    """

    def __init__(self, capacity: int, kv_shape: tuple[int, int]) -> None:
        self.keys, self.values = (np.zeros((capacity, *kv_shape), np.float32) for _ in range(2))
        self._length = 0

    def common_length(self, keys: Float32, values: Float32) -> int:
        """How many of these rows, from the first on, the states hold already."""
        shared = min(self._length, len(keys))
        same = (self.keys[:shared] == keys[:shared]) & (self.values[:shared] == values[:shared])
        differing = np.flatnonzero(~same.all(axis=(1, 2)))
        return int(differing[0]) if differing.size else shared

    def write(self, start: int, keys: Float32, values: Float32) -> None:
        """Rows were written at ``start``; what lies behind them is no longer known."""
        self._length = start + len(keys)
        self.keys[start : self._length] = keys
        self.values[start : self._length] = values


def _filled(rows: Float32) -> Float32:
    """``[n, kv_heads, head_dim]``, at most as many as one call takes -> heads first, zeros added."""
    _, kv_heads, head_dim = rows.shape
    whole = np.zeros((1, kv_heads, ROWS_SIZE, head_dim), np.float32)
    whole[:, :, : len(rows)] = heads_first(rows)
    return whole
