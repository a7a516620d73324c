"""The device half on onnxruntime."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import onnxruntime as ort

from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.errors import MoaError

_OUTPUTS = [each.name for each in fields(StepResult)]


class OnnxBackend(Backend):
    """Runs a graph written by ``moa-export --target onnx`` or ``web`` on the CPU: a device half, or a writer, which has
    no inputs for memory rows.

    onnxruntime reads contiguous arrays where they lie, so a slice of a preallocated cache costs no copy.

    Args:
        graph: the ``.onnx`` file.
        threads: processor threads for one step; two serve a model this small best.

    Raises:
        MoaError: the file is no graph of the device half, or ``threads`` is less than 1.
    """

    def __init__(self, graph: Path, *, threads: int = 2) -> None:
        if threads < 1:
            raise MoaError(f"threads must be at least 1, not {threads}")
        try:
            self._session = ort.InferenceSession(
                str(graph), session_options(threads), providers=["CPUExecutionProvider"]
            )
            inputs = {tensor.name: tensor.shape for tensor in self._session.get_inputs()}
            outputs = {tensor.name: tensor.shape for tensor in self._session.get_outputs()}
            _, self._kv_heads, self._head_dim = inputs["self_keys"]
            self._top_k = outputs["top_tokens"][1]
            self._looks_at_rows = "memory_keys" in inputs
            if self._looks_at_rows and inputs["memory_keys"][1:] != inputs["self_keys"][1:]:
                raise ValueError("it begins with layers of the target, which is no longer supported")
        except Exception as error:  # onnxruntime's errors share no public base class
            raise MoaError(f"onnxruntime cannot load {graph} as a device half: {error}") from error

    @property
    def top_k(self) -> int:
        return int(self._top_k)

    @property
    def kv_shape(self) -> tuple[int, int]:
        return int(self._kv_heads), int(self._head_dim)

    @property
    def max_positions(self) -> None:
        return None

    @property
    def needs_a_row(self) -> bool:
        return self._looks_at_rows

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        given = inputs.by_name() if self._looks_at_rows else inputs.of_tokens()
        return StepResult(*self._session.run(_OUTPUTS, given))


def session_options(threads: int) -> ort.SessionOptions:
    """How onnxruntime is set up for the device half; benchmarks set up what they compare with it alike."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Between two steps the device waits for the network; spinning threads would drain its battery.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Graphs for browsers are widened when they are loaded, as they are there; others have nothing of the kind.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options
