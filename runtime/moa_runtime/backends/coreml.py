"""The device half on Core ML, whose models have fixed sizes. Only :func:`load_model` needs a Mac."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_runtime.backends.base import Backend, Bool, Float32, Int64, StepInputs, StepResult
from moa_runtime.errors import MoaError

Array = NDArray[Any]
#: Runs a model: inputs by name to outputs by name.
Predict = Callable[[Mapping[str, Array]], Mapping[str, Array]]
#: Added to scores of masked positions; float16 holds it, and any softmax makes it 0.
BLOCKED = np.float32(-1e4)


class FixedSizeBackend(Backend):
    """Run a stateless model of fixed sizes.

    Caches are copied to the front of full-size inputs and the rest is masked. Tokens are fed in pieces of the
    model's size, the last one padded; each piece sees the keys and values of those before it as cached ones.

    Args:
        predict: takes and returns the tensors that ``shapes`` names, as int32 and float32.
        shapes: of the model's inputs and outputs, by name.
    """

    max_positions: int

    def __init__(self, predict: Predict, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._predict = predict
        self._size, self.top_k = shapes["top_tokens"]
        _, kv_heads, self.max_positions, head_dim = shapes["self_keys"]
        self.kv_shape = kv_heads, head_dim
        self._caches = {
            name: np.zeros(shape, np.float32) for name, shape in shapes.items() if name.endswith(("_keys", "_values"))
        }

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`. Raises MoaError if they exceed ``max_positions``."""
        tokens, positions = inputs.tokens, inputs.positions
        held, rows = len(inputs.self_keys), len(inputs.memory_keys)
        check_capacity(self.max_positions, held + len(tokens), rows, int(positions.max()) + 1)
        self._put("self", 0, inputs.self_keys, inputs.self_values)
        self._put("memory", 0, inputs.memory_keys, inputs.memory_values)
        memory_mask = additive_mask(np.arange(self.max_positions)[None] < rows)
        parts = []
        for start in range(0, len(tokens), self._size):
            stop = min(start + self._size, len(tokens))
            mask = self._self_mask(inputs.self_mask[start:stop], held + start)
            part = self._predict(
                {
                    "tokens": padded(tokens[start:stop], self._size),
                    "positions": padded(positions[start:stop], self._size),
                    "self_mask": mask,
                    "memory_mask": memory_mask,
                    **self._caches,
                }
            )
            parts.append(step_result(part, stop - start))
            self._put("self", held + start, parts[-1].keys, parts[-1].values)
        return joined(parts, inputs.queries)

    def _self_mask(self, allowed: Bool, cached: int) -> Float32:
        """``[n, S + T]`` with ``cached`` columns before those of the ``n`` tokens -> ``[size, capacity + size]``."""
        new = len(allowed)
        wide = np.zeros((self._size, self.max_positions + self._size), np.bool_)
        wide[:new, :cached] = allowed[:, :cached]
        wide[:new, self.max_positions : self.max_positions + new] = allowed[:, cached : cached + new]
        return additive_mask(wide)

    def _put(self, cache: str, start: int, keys: Float32, values: Float32) -> None:
        stop = start + len(keys)
        self._caches[f"{cache}_keys"][:, :, start:stop] = heads_first(keys)
        self._caches[f"{cache}_values"][:, :, start:stop] = heads_first(values)


class CoremlBackend(FixedSizeBackend):
    """Run the package that ``moa-export --target coreml`` writes for systems without states, on macOS 14 or later.

    ``graph`` is the ``.mlpackage``, see :func:`load_model`; Core ML chooses its ``threads`` by itself.
    """

    def __init__(self, graph: Path, *, threads: int = 2) -> None:
        model = load_model(graph)
        super().__init__(running(model), shapes_of(model.get_spec().description))


def load_model(package: Path, function: str | None = None) -> Any:
    """Load an ``.mlpackage``, or one ``function`` of it, into Core ML: a ``coremltools.models.MLModel``.

    Raises:
        MoaError: this is no Mac, coremltools is not installed, or Core ML cannot load the package.
    """
    if platform.system() != "Darwin":
        raise MoaError("Core ML runs on macOS only: choose another backend, such as onnx", code="wrong_system")
    try:
        import coremltools
    except ImportError as error:
        text = "the coreml backend needs coremltools: pip install coremltools"
        raise MoaError(text, code="missing_package") from error
    try:
        with warnings.catch_warnings():
            # coremltools only warns of a model that it cannot run.
            warnings.simplefilter("error", RuntimeWarning)
            return coremltools.models.MLModel(str(package), function_name=function)
    except Exception as error:  # coremltools' errors share no base class
        raise MoaError(f"Core ML cannot load {package}: {error}", code="cannot_load") from error


def running(model: Any, **options: Any) -> Predict:
    """Return ``MLModel.predict`` with ``options`` as a function, which raises MoaError if the model cannot be run."""

    def predict(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        try:
            outputs: Mapping[str, Array] = model.predict(dict(inputs), **options)
        except Exception as error:  # coremltools' errors share no base class
            raise MoaError(f"Core ML could not run the model: {error}", code="cannot_run") from error
        return outputs

    return predict


def shapes_of(description: Any) -> dict[str, tuple[int, ...]]:
    """Return shapes by name from the description of a Core ML model or of one of its functions."""
    return {
        feature.name: tuple(feature.type.multiArrayType.shape) for feature in [*description.input, *description.output]
    }


def check_capacity(capacity: int, *needed: int) -> None:
    """Raise MoaError if one of the ``needed`` numbers of positions exceeds ``capacity``."""
    if max(needed) > capacity:
        raise MoaError(
            f"the conversation needs {max(needed)} positions, this Core ML model holds {capacity}: begin a new "
            "conversation, or export with a larger --context",
            code="context_full",
        )


def additive_mask(allowed: Bool) -> Float32:
    """Return 0 where a query attends, :data:`BLOCKED` elsewhere."""
    return np.where(allowed, np.float32(0), BLOCKED)


def padded(numbers: Int64, size: int) -> NDArray[np.int32]:
    """Return ``numbers`` as int32, followed by zeros up to ``size``."""
    return np.pad(numbers, (0, size - len(numbers))).astype(np.int32)


def heads_first(rows: Float32) -> Float32:
    """``[n, kv_heads, head_dim]`` -> ``[1, kv_heads, n, head_dim]``."""
    return rows.swapaxes(0, 1)[None]


def rows_first(heads: Array) -> Float32:
    """``[1, kv_heads, n, head_dim]`` -> float32 ``[n, kv_heads, head_dim]``."""
    return np.ascontiguousarray(heads[0].swapaxes(0, 1), np.float32)


def step_result(outputs: Mapping[str, Array], count: int) -> StepResult:
    """Return a model's outputs for its first ``count`` tokens, each of them a query."""
    return StepResult(
        outputs["top_tokens"][:count].astype(np.int64),
        outputs["top_logprobs"][:count].astype(np.float32),
        rows_first(outputs["keys"])[:count],
        rows_first(outputs["values"])[:count],
    )


def joined(parts: list[StepResult], queries: Int64) -> StepResult:
    """Return the result of one step whose tokens were fed in parts."""
    return StepResult(
        np.concatenate([part.top_tokens for part in parts])[queries],
        np.concatenate([part.top_logprobs for part in parts])[queries],
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.values for part in parts]),
    )
