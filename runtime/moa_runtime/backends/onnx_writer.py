"""An offline writer on onnxruntime, whose graph writes into the caller's caches."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from moa_runtime.backends.base import Backend, Float32, StepInputs, StepResult, check_threads
from moa_runtime.backends.onnx import load_session, refusing

_CPU = "cpu", 0


class OnnxWriter(Backend):
    """Run a bundle's graph ``writer`` on the CPU. Each layer's keys and values are an input and an output of it,
    ``[1, heads, C, D]``, bound to the same memory, so that a step copies no entry.

    Args:
        graph: the ``.onnx`` file.
        threads: processor threads for one step, at least 1.

    Raises:
        MoaError: the file is no such graph.
    """

    needs_a_row, heads_first = False, True

    def __init__(self, graph: Path, *, threads: int = 2) -> None:
        check_threads(threads)
        with refusing(graph, "a writer"):
            self._session, inputs, outputs = load_session(graph, threads)
            layers = sum(name.startswith("self_keys.") for name in inputs)
            #: Heads of each layer.
            self._heads = [int(inputs[f"self_keys.{number}"][1]) for number in range(layers)]
            self.kv_shape = sum(self._heads), int(inputs["self_keys.0"][3])
            self.top_k = int(outputs["top_tokens"][1])
        self._lock = threading.Lock()
        self._bound: tuple[ref[Float32], ref[Float32], ort.IOBinding] | None = None

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`. Caches that are not laid out heads first, or have no room
        for the new entries, are copied."""
        held, new = len(inputs.self_keys), len(inputs.tokens)
        keys, values = (_with_room(part, held + new) for part in (inputs.self_keys, inputs.self_values))
        shape = len(inputs.queries), self.top_k
        tokens, logprobs = np.empty(shape, np.int64), np.empty(shape, np.float32)
        small: dict[str, NDArray[Any]] = {
            name: np.ascontiguousarray(getattr(inputs, name))
            for name in ("tokens", "positions", "queries", "self_mask")
        }
        with self._lock:
            binding = self._binding(keys, values)
            for name, array in small.items():
                binding.bind_cpu_input(name, array)
            _bind(binding.bind_output, "top_tokens", tokens, shape)
            _bind(binding.bind_output, "top_logprobs", logprobs, shape)
            self._session.run_with_iobinding(binding)
        entries = (part[:, held : held + new].transpose(1, 0, 2) for part in (keys, values))
        return StepResult(tokens, logprobs, *entries)

    def _binding(self, keys: Float32, values: Float32) -> ort.IOBinding:
        """Return the binding of these caches, ``[H, C, D]``; it lasts until other caches come."""
        if self._bound is None or self._bound[0]() is not keys or self._bound[1]() is not values:
            binding, start = self._session.io_binding(), 0
            for number, heads in enumerate(self._heads):
                for name, part in (("keys", keys), ("values", values)):
                    layer = part[start : start + heads]
                    for bind, prefix in ((binding.bind_input, "self_"), (binding.bind_output, "")):
                        _bind(bind, f"{prefix}{name}.{number}", layer, (1, *layer.shape))
                start += heads
            self._bound = ref(keys), ref(values), binding
        return self._bound[2]


def _bind(bind: Any, name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
    bind(name, *_CPU, array.dtype.type, shape, array.ctypes.data)


def _with_room(entries: Float32, count: int) -> Float32:
    """Return the array ``[H, C, D]`` that ``entries [S, H, D]`` are the first of, if ``C >= count``, else a copy."""
    whole = entries.base
    if isinstance(whole, np.ndarray) and whole.ndim == 3 and whole.flags.c_contiguous and whole.flags.writeable:
        turned = whole.transpose(1, 0, 2)
        same = (entries.ctypes.data, entries.strides) == (turned.ctypes.data, turned.strides)
        if same and entries.shape[1:] == turned.shape[1:] and len(turned) >= count:
            return whole
    copy = np.zeros((entries.shape[1], count, entries.shape[2]), np.float32)
    copy[:, : len(entries)] = entries.transpose(1, 0, 2)
    return copy
