"""How much processor time the verifier's process takes."""

from __future__ import annotations

from moa_bench.verifier import VerifierGoneError


def cpu_seconds(pid: int | None) -> float | None:
    """Of all threads of a process since it began; None where there is no process to look at.

    Raises:
        VerifierGoneError: the process has ended.
    """
    if pid is None:
        return None
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        raise VerifierGoneError("the verifier ended in the middle of the measurement") from None
    return float(times.user + times.system)
