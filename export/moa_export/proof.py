"""The proof of an export: every graph is read back from disk, run, and compared with PyTorch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moa_export.parity import compare
from moa_export.progress import Advance
from moa_export.recipe import Tolerance
from moa_export.recordings import Recording
from moa_export.targets.base import NotRun
from moa_export.tau import Tau, replay
from moa_runtime.backends.base import Backend

PARITY_CONVERSATIONS = 6
_TIMED_STEPS, _TIMED_CONTEXT = 20, 128
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"

#: ``{"status": ..., "reason": ...}`` and figures; how a check stands in the manifest.
Check = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """The float32 device half in PyTorch, and what it did.

    Attributes:
        stop_tokens: ids that end a turn.
    """

    backend: Backend
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


def prove(runner: Backend | NotRun, reference: Reference, tolerance: Tolerance, advance: Advance) -> Proof:
    """Compare an exported graph with the reference.

    Args:
        advance: called once for the parity check and once for each conversation of the tau check.
    """
    if isinstance(runner, NotRun):
        skipped = {"status": NOT_RUN, "reason": runner.reason}
        return Proof({"parity": skipped, "tau": skipped}, None)
    parity = compare(reference.backend, runner, reference.recordings[:PARITY_CONVERSATIONS])
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
    return Proof(checks, _step_ms(runner))


def _check(failures: Sequence[str], figures: Mapping[str, Any]) -> Check:
    if failures:
        return {"status": FAILED, "reason": "; ".join(failures), **figures}
    return {"status": PASSED, **figures}


def _step_ms(backend: Backend) -> float:
    """Median time of a one-token step behind some cached tokens; `moa-bench device` measures it with care."""
    cache = np.zeros((_TIMED_CONTEXT, *backend.kv_shape), np.float32)
    token, position, query = (np.array([n], np.int64) for n in (1, _TIMED_CONTEXT, 0))
    mask = np.ones((1, _TIMED_CONTEXT + 1), np.bool_)
    times = []
    for _ in range(_TIMED_STEPS):
        began = time.perf_counter()
        backend.step(token, position, query, cache, cache, mask, cache, cache)
        times.append(time.perf_counter() - began)
    return round(1000 * float(np.median(times)), 3)
