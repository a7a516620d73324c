"""The common part of every benchmark's JSON: settings, machine, versions, and whether it ran to its end."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from moa_runtime.bundle import Fingerprints
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
        settings: what it was measured with: plain values, no paths of this machine.
        seconds: wall time of the measurement without loading.
        problem: a sentence that says why it ended early; the result is then marked partial.
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
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
