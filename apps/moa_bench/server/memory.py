"""How much memory the verifier's process takes."""

from __future__ import annotations

from moa_bench.verifier import VerifierGoneError


class PeakMemory:
    """The largest resident set of a process over its samples.

    Attributes:
        bytes: None where there is no process to look at.

    Args:
        pid: None for a verifier elsewhere.
    """

    def __init__(self, pid: int | None) -> None:
        import psutil

        self.bytes: int | None = None
        self._process = None if pid is None else psutil.Process(pid)

    def sample(self) -> None:
        """Raises VerifierGoneError: the process has ended."""
        if self._process is None:
            return
        resident = self._process.memory_info().rss
        if resident == 0:  # ended, and not waited for yet
            raise VerifierGoneError("the verifier ended in the middle of the measurement")
        self.bytes = max(resident, self.bytes or 0)
