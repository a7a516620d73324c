"""Export target ``coreml``: two ``.mlpackage`` models, one that keeps its caches and one for older systems.

Both are ML programs of fixed sizes in float16; weights of 16 and 32 bits are stored as float16 alike. What the
functions are for, :mod:`moa_export.targets.coreml_program` tells. The offline writer
(:mod:`moa_export.targets.coreml_writer`) is a package that keeps its caches.
"""

from __future__ import annotations

import json
import platform
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.backend.mil.load import load as as_specification
from coremltools.converters.mil.mil import Program

from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.config import DrafterConfig
from moa_drafter.model import MoADrafter
from moa_export.coreml_interpreter import MilError, read_package, round_to_half
from moa_export.errors import ExportError
from moa_export.graph_files import TOP_K
from moa_export.recipe import Recipe
from moa_export.targets.base import (
    NotRun,
    Specs,
    TargetOptions,
    check_drafter,
    entry_of,
    plain_signature,
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
from moa_export.targets.coreml_writer import WRITER_FUNCTIONS, writer_program
from moa_runtime.backends.base import Backend, Float32, StepInputs, StepResult
from moa_runtime.backends.coreml import (
    Array,
    CoremlBackend,
    FixedSizeBackend,
    Predict,
    additive_mask,
    check_capacity,
    heads_first,
    load_model,
    padded,
    rows_first,
    running,
)
from moa_runtime.errors import MoaError
from moa_runtime.manifest import TargetEntry, TensorSpec

STATEFUL_FILE, STATELESS_FILE = "DeviceHalf.mlpackage", "DeviceHalfStateless.mlpackage"
WRITER_FILE = "Writer.mlpackage"
# Caches are written in pieces of 32 positions. The Neural Engine has no axes longer than 16384.
_CAPACITY_STEP, _MOST_CAPACITY = 32, 8192
AUTHOR = "The moa-edge authors"
LICENSE = (
    "Apache-2.0. The token embedding and the draft head are taken from the target model and stay under its licence."
)
_WRITER_LICENSE = "That of the model, see the bundle's folder licenses."
#: What Xcode shows beside each input, output and state; a writer's states have the number of a layer besides.
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
_WRITER_PURPOSE = "Writes an answer while there is no server to ask."


class CoremlTarget:
    """See :class:`moa_export.targets.base.ExportTarget` and :class:`moa_export.targets.base.WriterTarget`."""

    rotates = True
    #: Without a Mac a step takes a second.
    writer_answers = 2

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None:
        self._recipe, self._context = recipe, options.context

    def check(self, config: DrafterConfig) -> None:
        """See :meth:`moa_export.targets.base.ExportTarget.check`."""
        check_drafter("coreml", config, layers=False)
        if self._context % _CAPACITY_STEP or not 0 < self._context <= _MOST_CAPACITY:
            raise ExportError(
                f"coreml takes a --context that is a multiple of {_CAPACITY_STEP} and at most {_MOST_CAPACITY}, not "
                f"{self._context}",
                code="out_of_range",
            )
        self._recipe.check_symmetric("coreml", "linear", "head", "embedding")
        self._recipe.check_divides(config)

    def export(self, drafter: MoADrafter, folder: Path) -> dict[str, TargetEntry]:
        """Write both packages."""
        stateful = stateful_program(drafter, self._recipe, self._context)
        stored = self._stored(ct.target.iOS18)
        entries = {"coreml": _write_stateful(stateful, folder / STATEFUL_FILE, FUNCTIONS, _PURPOSE, stored, LICENSE)}
        stateless = stateless_program(drafter, self._recipe, self._context)
        description = f"{_PURPOSE} Its caches are inputs, which the caller extends by the outputs keys and values."
        stored = self._stored(ct.target.iOS17)
        main = _write(stateless, folder / STATELESS_FILE, ct.target.iOS17, description, stored, LICENSE)
        details = {"least_systems": {"iOS": 17, "macOS": 14}, "stored": stored}
        return {**entries, "coreml-stateless": _entry(folder / STATELESS_FILE, main, details)}

    def runner(self, folder: Path, entry: TargetEntry) -> Backend | NotRun:
        """Load a package into Core ML on a Mac; elsewhere compute its program with numpy."""
        package, shapes = folder / entry.file, _shapes_of(entry)
        if platform.system() != "Darwin" and not entry.states:
            return FixedSizeBackend(read_package(package)["main"], shapes)
        try:
            return StatefulBackend(*_functions_of(package, entry), shapes) if entry.states else CoremlBackend(package)
        except MilError:
            raise
        except MoaError as error:
            return NotRun(str(error))

    def export_writer(self, weights: RoundedWeights, folder: Path) -> TargetEntry:
        """Write a package with ``--context`` positions, or those of the model if it has fewer."""
        capacity = min(self._context, weights.spec.max_context)
        stored = {
            "layers": f"{weights.bits} bits",
            "tables": f"{weights.table_bits} bits",
            "activations": "float16",
            "positions": str(capacity),
        }
        program, path = writer_program(weights, capacity, TOP_K), folder / WRITER_FILE
        entry = _write_stateful(program, path, WRITER_FUNCTIONS, _WRITER_PURPOSE, stored, _WRITER_LICENSE)
        return replace(entry, details={**entry.details, "max_context": capacity})

    def writer_runner(self, folder: Path, entry: TargetEntry) -> Backend:
        """Load a package as :meth:`runner` does. Raises MoaError if Core ML cannot."""
        functions, read_state, write_state = _functions_of(folder / entry.file, entry)
        shapes, layers = _shapes_of(entry), range(len(entry.states) // 2)
        _, heads, *rest = shapes["self_keys_0"]

        def read(name: str) -> Array:
            return np.concatenate([read_state(f"{name}_{layer}") for layer in layers], axis=1)

        def write(name: str, value: Float32) -> None:
            for layer, part in zip(layers, np.split(value, len(layers), axis=1), strict=True):
                write_state(f"{name}_{layer}", np.ascontiguousarray(part))

        return StatefulBackend(functions, read, write, {**shapes, "self_keys": (1, heads * len(layers), *rest)})

    def _stored(self, opset: ct.target) -> dict[str, str]:
        """Return how the parts of a drafter are stored."""
        return {
            "linear": stored_form(self._recipe.linear, opset),
            "head": stored_form(self._recipe.head, opset),
            "embedding": stored_form(self._recipe.embedding, ct.target.iOS18),
            "activations": "float16",
            "positions": str(self._context),
        }


def _write_stateful(
    program: Program, path: Path, functions: Mapping[str, str], purpose: str, stored: Mapping[str, str], license: str
) -> TargetEntry:
    """Write a package whose caches are states. ``functions`` are its functions' purposes by name."""
    purposes = "; ".join(f"{name}: {purpose}" for name, purpose in functions.items())
    description = f"{purpose} Its caches are states. Functions: {purposes}"
    model = _write(program, path, ct.target.iOS18, description, stored, license)
    written = {function.name: function for function in model.functions}
    signatures = {
        name: plain_signature(_specs(written[name].input), _specs(written[name].output)) for name in functions
    }
    details = {
        "least_systems": {"iOS": 18, "macOS": 15},
        "stored": stored,
        "functions": {name: {"purpose": functions[name], **signature} for name, signature in signatures.items()},
    }
    return _entry(path, written[model.defaultFunctionName], details)


def _write(
    program: Program, path: Path, opset: ct.target, description: str, stored: Mapping[str, str], license: str
) -> Any:
    """Write an ``.mlpackage``; the same program gives the same bytes.

    Args:
        opset: the oldest system that it is for.
        description, stored, license: what the model does, and how its parts are stored, for Xcode's model page.

    Returns:
        the model's description, a protocol buffer as Core ML defines it.
    """
    # The program is what it should be: coremltools' passes would only rename and fuse operators.
    program.skip_all_passes = True
    with tempfile.TemporaryDirectory() as weights:
        specification = as_specification(program, weights, specification_version=opset.value)
        model = specification.description
        model.metadata.shortDescription = description
        model.metadata.author = AUTHOR
        model.metadata.license = license
        model.metadata.versionString = version("moa-edge")
        model.metadata.userDefined.update({**stored, "coremltools": ct.__version__})
        for function in model.functions or [model]:
            for feature in (*function.input, *function.output, *function.state):
                feature.shortDescription = FEATURES[re.sub(r"_\d+$", "", feature.name)]
        ct.models.utils.save_spec(specification, str(path), weights_dir=weights)
    # Otherwise the order of a stored map's entries differs each time.
    file = path / "Data" / "com.apple.CoreML" / "model.mlmodel"
    file.write_bytes(specification.SerializeToString(deterministic=True))
    _fix_identifiers(path / "Manifest.json")
    return model


def _functions_of(
    package: Path, entry: TargetEntry
) -> tuple[dict[str, Predict], Callable[[str], Array], Callable[[str, Float32], None]]:
    """Return the functions of a package with states by name, and what reads and writes a state of theirs.

    Raises:
        MoaError: Core ML cannot load it; elsewhere than on a Mac, where numpy computes it, MilError.
    """
    names = entry.details["functions"]
    if platform.system() != "Darwin":
        functions = read_package(package)
        states = functions[next(iter(names))].new_states()
        calls = {name: partial(functions[name], states=states) for name in names}
        return calls, states.__getitem__, states.__setitem__
    models = {name: load_model(package, name) for name in names}
    state = models[next(iter(names))].make_state()
    return {name: running(model, state=state) for name, model in models.items()}, state.read_state, state.write_state


def _shapes_of(entry: TargetEntry) -> dict[str, tuple[int, ...]]:
    return {each.name: tuple(map(int, each.shape)) for each in (*entry.inputs, *entry.outputs, *entry.states)}


def _entry(path: Path, function: Any, details: Mapping[str, Any]) -> TargetEntry:
    """Describe a package by its main function, or its only one."""
    return entry_of(path, _specs(function.input), _specs(function.output), _specs(function.state), details)


def _specs(features: Iterable[Any]) -> Specs:
    """Return the signature that a specification's descriptions of features tell."""
    specs = []
    for feature in features:
        state = feature.type.WhichOneof("Type") == "stateType"
        array = feature.type.stateType.arrayType if state else feature.type.multiArrayType
        dtype = array.ArrayDataType.Name(array.dataType).lower()
        specs.append(TensorSpec(feature.name, dtype, tuple(array.shape)))
    return tuple(specs)


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


class StatefulBackend(Backend):
    """The stateless contract of backends for a model with states, so that it can be compared with PyTorch.

    If the caller's cache is shorter than the states, the rest counts as free; if memory rows differ, they are written
    again from the first difference. A cache that the model did not compute is written to the states. Tokens before the
    first query are only appended, in larger pieces.

    Args:
        functions: of the model, by name; they share its states, which are zero.
        read_state, write_state: return and replace a whole state, by its name.
        shapes: of the states, and of the inputs and outputs of a step function, by name.
    """

    def __init__(
        self,
        functions: Mapping[str, Predict],
        read_state: Callable[[str], Array],
        write_state: Callable[[str, Float32], None],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        _, kv_heads, self._capacity, head_dim = shapes["self_keys"]
        self.max_positions = self._capacity
        self.needs_a_row = "memory_keys" in shapes
        self._functions, self._read_state, self._write_state = functions, read_state, write_state
        self.top_k, self.kv_shape = shapes["top_tokens"][1], (kv_heads, head_dim)

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`.

        Raises:
            MoaError: more positions than the model holds.
        """
        tokens, positions, queries = inputs.tokens, inputs.positions, inputs.queries
        held, count, rows = len(inputs.self_keys), len(tokens), len(inputs.memory_keys)
        check_capacity(self._capacity, held + count, rows, int(positions.max()) + 1)
        self._restore(inputs.self_keys, inputs.self_values)
        if self.needs_a_row:
            self._remember(inputs.memory_keys, inputs.memory_values)
        memory_mask = additive_mask(np.arange(self._capacity)[None] < rows)
        top_tokens = np.zeros((count, self.top_k), np.int64)
        top_logprobs = np.zeros((count, self.top_k), np.float32)
        for name, size, start, stop in self._pieces(held, count, int(queries.min())):
            given: dict[str, Array] = {
                "tokens": padded(tokens[start:stop], size),
                "positions": padded(positions[start:stop], size),
                "slot": np.array([held + start], np.int32),
            }
            if name == "step" or not self.needs_a_row:  # a drafter's entries of tokens depend on no others
                allowed = np.zeros((size, self._capacity), np.bool_)
                allowed[: stop - start, : held + stop] = inputs.self_mask[start:stop, : held + stop]
                given["self_mask"] = additive_mask(allowed)
            if name == "step" and self.needs_a_row:
                given["memory_mask"] = memory_mask
            outputs = self._functions[f"{name}_{size}"](given)
            if name == "step":
                top_tokens[start:stop] = outputs["top_tokens"][: stop - start]
                top_logprobs[start:stop] = outputs["top_logprobs"][: stop - start]
        keys, values = (
            rows_first(self._read_state(name)[:, :, held : held + count]) for name in ("self_keys", "self_values")
        )
        return StepResult(top_tokens[queries], top_logprobs[queries], keys, values)

    def _pieces(self, held: int, count: int, unqueried: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield the calls that feed ``count`` tokens after ``held`` cached ones: ``extend`` or ``step``, its size, the
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
        if self._common_length("self", keys, values) < len(keys):
            for name, rows in (("self_keys", keys), ("self_values", values)):
                state = np.array(self._read_state(name), np.float32)
                state[:, :, : len(rows)] = heads_first(round_to_half(rows))
                self._write_state(name, state)

    def _remember(self, keys: Float32, values: Float32) -> None:
        """Make the memory states begin with these rows."""
        start = self._common_length("memory", keys, values)
        while start < len(keys):
            # If less room is left than a call fills, it writes some rows again.
            slot = min(start, self._capacity - ROWS_SIZE)
            piece = slice(slot, min(slot + ROWS_SIZE, len(keys)))
            unused = ((0, ROWS_SIZE - (piece.stop - slot)), (0, 0), (0, 0))
            given = {"new_keys": keys, "new_values": values}
            given = {name: heads_first(np.pad(rows[piece], unused)) for name, rows in given.items()}
            self._functions[f"remember_{ROWS_SIZE}"]({**given, "slot": np.array([slot], np.int32)})
            start = piece.stop

    def _common_length(self, cache: str, keys: Float32, values: Float32) -> int:
        """Return how many of these rows, from the first on, the states of ``cache`` hold already."""
        same = np.ones(len(keys), np.bool_)
        for name, rows in ((f"{cache}_keys", keys), (f"{cache}_values", values)):
            held = rows_first(self._read_state(name)[:, :, : len(rows)])
            same &= (held == round_to_half(rows)).all(axis=(1, 2))
        return len(same) if same.all() else int(same.argmin())
