"""The device half on onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import onnxruntime as ort

from moa_runtime.backends.base import Backend, StepInputs, StepResult, check_threads
from moa_runtime.backends.eagle3 import Eagle3Inputs, Eagle3Result
from moa_runtime.errors import MoaError

_OUTPUTS = [each.name for each in fields(StepResult)]
_EAGLE3_OUTPUTS = [each.name for each in fields(Eagle3Result)]


class OnnxBackend(Backend):
    """Run a graph of ``moa-export --target onnx`` or ``web`` on the CPU: a device half, or a writer for browsers or of
    an older version, which has no inputs for memory rows. onnxruntime reads contiguous arrays, as a slice of a
    preallocated cache is, without a copy.

    Args:
        graph: the ``.onnx`` file.
        threads: processor threads for one step, at least 1; two are fastest for so small a model.

    Raises:
        MoaError: the file is no graph of the device half.
    """

    def __init__(self, graph: Path, *, threads: int = 2) -> None:
        check_threads(threads)
        with refusing(graph, "a device half"):
            self._session, inputs, self.kv_shape, self.top_k = _load_half(graph, threads)
            self.needs_a_row = "memory_keys" in inputs
            if self.needs_a_row and inputs["memory_keys"][1:] != inputs["self_keys"][1:]:
                raise ValueError("it begins with layers of the target, which is no longer supported")

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        given = inputs.by_name() if self.needs_a_row else inputs.of_tokens()
        return StepResult(*self._session.run(_OUTPUTS, given))


class OnnxEagle3Pass:
    """Run the graph of an EAGLE-3 head on the CPU. Implements :class:`moa_runtime.backends.eagle3.Eagle3Pass`.

    Args:
        graph, threads: see :class:`OnnxBackend`.

    Raises:
        MoaError: the file is no such graph.
    """

    def __init__(self, graph: Path, *, threads: int = 2) -> None:
        check_threads(threads)
        with refusing(graph, "an EAGLE-3 head"):
            self._session, inputs, self.kv_shape, self.top_k = _load_half(graph, threads)
            self.hidden_size = int(inputs["features"][1])

    def __call__(self, inputs: Eagle3Inputs) -> Eagle3Result:
        """See :class:`moa_runtime.backends.eagle3.Eagle3Pass`."""
        return Eagle3Result(*self._session.run(_EAGLE3_OUTPUTS, vars(inputs)))


def _load_half(graph: Path, threads: int) -> tuple[ort.InferenceSession, dict[str, Any], tuple[int, int], int]:
    """Load a device half; return its session, the shapes of its inputs, the shape of a cache entry, and ``top_k``."""
    session, inputs, outputs = load_session(graph, threads)
    _, heads, size = inputs["self_keys"]
    return session, inputs, (int(heads), int(size)), int(outputs["top_tokens"][1])


@contextmanager
def refusing(graph: Path, kind: str) -> Iterator[None]:
    """Turn what onnxruntime raises, whose errors share no public base class, into a MoaError."""
    try:
        yield
    except Exception as error:
        raise MoaError(f"onnxruntime cannot load {graph} as {kind}: {error}", code="cannot_load") from error


def load_session(graph: Path, threads: int) -> tuple[ort.InferenceSession, dict[str, Any], dict[str, Any]]:
    """Load a graph; return its session, and the shapes of its inputs and outputs. Raises onnxruntime's errors."""
    session = ort.InferenceSession(str(graph), session_options(threads), providers=["CPUExecutionProvider"])
    inputs, outputs = session.get_inputs(), session.get_outputs()
    return session, *({tensor.name: tensor.shape for tensor in tensors} for tensors in (inputs, outputs))


def session_options(threads: int) -> ort.SessionOptions:
    """Return the options of the device half, which benchmarks also use for models that they compare with it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Between two steps the device waits for the network; spinning threads would drain its battery.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Graphs for browsers are widened when they are loaded, as in a browser; others have nothing to widen.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options
