"""The common part of every benchmark's JSON, and figures: rounded, divided, and latencies of tokens in bursts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moa_runtime.manifest import Fingerprints
from moa_runtime.optional_deps import installed_versions

RESULT_VERSION = 1
_PACKAGES = ("moa-edge", "numpy", "onnxruntime", "torch", "transformers", "executorch", "coremltools")


def result_of(
    benchmark: str,
    figures: Mapping[str, Any],
    *,
    settings: Mapping[str, Any],
    fingerprints: Fingerprints,
    seconds: float,
    problem: str = "",
) -> dict[str, Any]:
    """Make one benchmark's result, ready for JSON.

    Args:
        figures: what was measured; its keys stand beside the common ones.
        settings: of the measurement, plain values without paths of this machine.
        seconds: wall time of the measurement without loading.
        problem: why it ended early, a sentence; the result is then marked partial.
    """
    return {
        "benchmark": benchmark,
        "version": RESULT_VERSION,
        "partial": bool(problem),
        "problem": problem or None,
        **figures,
        "settings": dict(settings),
        "fingerprints": dataclasses.asdict(fingerprints),
        "seconds": round(seconds, 2),
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": installed_versions(_PACKAGES),
    }


def machine() -> dict[str, Any]:
    """Describe the hardware and system that figures depend on, without names of the machine or its user."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def rounded(figure: float | None, digits: int = 4) -> float | None:
    """Round for JSON: no sample here supports more than four decimals."""
    return None if figure is None else round(figure, digits)


def ratio(total: float, count: float, digits: int = 4) -> float | None:
    """Divide and round; None if ``count`` is 0."""
    return round(total / count, digits) if count else None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return None


@dataclass(frozen=True)
class Burst:
    """Number of committed tokens that arrived together, at the time ``at`` (seconds)."""

    at: float
    tokens: int


def token_latencies(bursts: Sequence[Burst]) -> list[float]:
    """Return the seconds of every token after the first burst of one answer.

    A burst of k tokens that comes t seconds after the burst before it gives each of them t / k. The mean is the pace at
    which the text grows, whether tokens come singly or in bursts.

    Example: one token at 1.0 s, three at 1.6 s and one at 1.7 s give ``[0.2, 0.2, 0.2, 0.1]``.
    """
    return [(burst.at - before.at) / burst.tokens for before, burst in pairwise(bursts) for _ in range(burst.tokens)]


def mean_ms(seconds: Sequence[float]) -> float | None:
    """Return the mean in milliseconds; None without samples."""
    return round(1000 * float(np.mean(seconds)), 2) if seconds else None


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    """Return a percentile in milliseconds, interpolated between samples; None without samples."""
    return round(1000 * float(np.percentile(seconds, percent)), 2) if seconds else None


def latency_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return the mean, the median and the 95th percentile in milliseconds."""
    return {"mean": mean_ms(seconds), "p50": percentile_ms(seconds, 50), "p95": percentile_ms(seconds, 95)}
