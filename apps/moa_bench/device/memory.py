"""Peak memory of this process."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_memory_mb() -> float:
    """The most physical memory this program has held so far, in megabytes (10^6 bytes)."""
    if sys.platform == "linux":
        # Not ru_maxrss: it survives exec, so a small program started by a large one would report the latter.
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024 / 1e6
    if sys.platform == "win32":
        import psutil

        return float(psutil.Process().memory_info().peak_wset) / 1e6
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak if sys.platform == "darwin" else peak * 1024) / 1e6
