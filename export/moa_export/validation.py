"""The proof of an export: every graph is read back from disk, run, and compared with PyTorch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import DeviceDrafter
from moa_export.parity import Rehearsal, compare, rehearse
from moa_export.progress import Advance, Progress
from moa_export.recipe import Recipe, Tolerance
from moa_export.recordings import Recording
from moa_export.targets.base import NotRun, StandIn
from moa_export.tau import Tau, replay
from moa_runtime.backends.base import Backend, StepInputs

PARITY_CONVERSATIONS = 6
_TIMED_STEPS, _TIMED_CONTEXT = 20, 128
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
#: Why a check was not made that could have been.
NOT_ASKED = "nobody asked for checks; moa-export verify makes them"

#: ``{"status": ..., "reason": ...}`` and figures; how a check stands in the manifest.
Check = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """What the float32 device half in PyTorch did.

    Attributes:
        rehearsals: of the conversations on which parity is measured.
        recordings: all conversations, on which tau is measured.
        stop_tokens: ids that end a turn.
    """

    rehearsals: Sequence[Rehearsal]
    recordings: Sequence[Recording]
    tau: Tau
    stop_tokens: Sequence[int]


@dataclass(frozen=True)
class Proof:
    """Checks of one artifact by name, and the median time of a one-token step (ms; None where it does not run)."""

    checks: Mapping[str, Check]
    step_ms: float | None

    @property
    def failures(self) -> list[str]:
        """Reasons, one phrase each; empty when nothing failed."""
        return [str(check["reason"]) for check in self.checks.values() if check["status"] == FAILED]


def reference_of(
    drafter: DeviceDrafter,
    recordings: Sequence[Recording],
    recipe: Recipe,
    stop_tokens: Sequence[int],
    progress: Progress,
) -> Reference:
    """Let PyTorch draft along in recorded conversations."""
    backend = torch_backend_of(drafter, top_k=recipe.top_k)
    with progress.stage("drafting with PyTorch", len(recordings)) as advance:
        tau = replay(backend, recordings, stop_tokens=stop_tokens, on_conversation=advance)
        rehearsals = [rehearse(backend, recording) for recording in recordings[:PARITY_CONVERSATIONS]]
    return Reference(rehearsals, recordings, tau, stop_tokens)


def prove(runner: Backend | NotRun | StandIn, reference: Reference, tolerance: Tolerance, advance: Advance) -> Proof:
    """Compare an exported graph with the reference. What only stands in for the engine leaves a check that was not run.

    Args:
        advance: called once for the parity check and once for each conversation of the tau check.
    """
    if isinstance(runner, NotRun):
        return unproved(runner.reason, "parity", "tau")
    if isinstance(runner, StandIn):
        return in_place_of_the_engine(prove(runner.backend, reference, tolerance, advance), runner)
    parity = compare(reference.rehearsals, runner)
    advance()
    checks = {"parity": _check(parity.failures(tolerance), parity.to_dict())}
    tau = replay(runner, reference.recordings, stop_tokens=reference.stop_tokens, on_conversation=advance)
    loss = 1 - tau.value / reference.tau.value
    figures = {
        "before": round(reference.tau.value, 4),
        "after": round(tau.value, 4),
        "loss": round(loss, 4),
        "prompts": len(reference.recordings),
    }
    beyond = [] if loss <= tolerance.tau_loss else [f"tau fell by {loss:.1%}, allowed are {tolerance.tau_loss:.0%}"]
    checks["tau"] = _check(beyond, figures)
    return Proof(checks, step_ms(runner))


def in_place_of_the_engine(proof: Proof, runner: StandIn) -> Proof:
    """A proof by what stood in for the engine, with the check ``engine``, which could not be made."""
    reason = f"{runner.reason}: compared by onnxruntime in Python on the same graph"
    return Proof({**proof.checks, "engine": {"status": NOT_RUN, "reason": reason}}, proof.step_ms)


def unproved(reason: str, *checks: str) -> Proof:
    """No check was made."""
    return Proof({name: {"status": NOT_RUN, "reason": reason} for name in checks}, None)


def _check(failures: Sequence[str], figures: Mapping[str, Any]) -> Check:
    if failures:
        return {"status": FAILED, "reason": "; ".join(failures), **figures}
    return {"status": PASSED, **figures}


def step_ms(backend: Backend) -> float:
    """Median time of a one-token step behind some cached tokens; `moa-bench device` measures it with care."""
    cache, memory = (np.zeros((_TIMED_CONTEXT, *shape), np.float32) for shape in (backend.kv_shape, backend.row_shape))
    inputs = StepInputs.chain([1], (cache, cache), (memory, memory))
    times = []
    for _ in range(_TIMED_STEPS):
        began = time.perf_counter()
        backend.step(inputs)
        times.append(time.perf_counter() - began)
    return round(1000 * float(np.median(times)), 3)
