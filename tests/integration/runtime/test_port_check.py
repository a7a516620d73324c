"""The worked example of ``docs/bundle.md``: every engine computes the stored numbers.

To make the file again after a change of the tiny drafter: ``python tests/integration/runtime/test_port_check.py``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import pytest

from moa_drafter.architectures.registry import torch_backend_of
from moa_export.golden_step import worked_example
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.load import SharedBackend

STORED = Path(__file__).with_name("port_check.json")
#: Error of 8 bits of weights, and of activations if an engine rounds them, in nats and in cache entries.
TOLERANCES = {"onnx": 0.1, "executorch": 0.15, "web": 0.05, "coreml": 0.15}


def check(backend: Backend, tolerance: float) -> int:
    """Compare with the stored steps as long as their inputs are equal; return the number of steps compared."""
    stored, got = json.loads(STORED.read_text()), worked_example(backend)
    assert got["kv_shape"] == stored["kv_shape"]
    compared = 0
    for ours, theirs in zip(got["steps"], stored["steps"], strict=True):
        if ours["inputs"] != theirs["inputs"]:
            continue  # two candidates that are almost equal may trade places under rounding
        compared += 1
        for name in ("keys", "values"):
            digest, expected = ours["outputs"][name], theirs["outputs"][name]
            assert digest["shape"] == expected["shape"]
            assert digest["first"] == pytest.approx(expected["first"], abs=tolerance)
            assert digest["sum"] == pytest.approx(expected["sum"], abs=10 * tolerance)
        pairs = zip(*(side["outputs"]["top_logprobs"][0] for side in (ours, theirs)), strict=True)
        assert all(abs(a - b) <= tolerance for a, b in pairs)
    return compared


def test_pytorch_computes_what_is_stored(reference: Backend) -> None:
    assert check(reference, 2e-3) == 3


def test_every_backend_computes_what_is_stored(backend: Backend, request: pytest.FixtureRequest) -> None:
    assert check(backend, TOLERANCES[request.node.callspec.params["backend"]]) >= 2


def test_a_wrong_layout_is_noticed(reference: Backend) -> None:
    class Transposed(SharedBackend):
        def step(self, inputs: StepInputs) -> StepResult:
            keys, values = (rows[:, ::-1].copy() for rows in (inputs.memory_keys, inputs.memory_values))
            return super().step(dataclasses.replace(inputs, memory_keys=keys, memory_values=values))

    with pytest.raises(AssertionError):
        check(Transposed(reference), 0.05)


def make() -> None:
    from moa_drafter.checkpoint import load_bound
    from moa_drafter.target import load_target
    from support.tiny import make_tiny_drafter, make_tiny_target

    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny_target(Path(scratch) / "target")
        drafter = load_bound(make_tiny_drafter(folder, Path(scratch) / "drafter"), load_target(str(folder)))
        STORED.write_text(json.dumps(worked_example(torch_backend_of(drafter, top_k=16)), indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    make()
