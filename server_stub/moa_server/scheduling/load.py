"""How busy the verifier is, as a Welcome tells it."""

from __future__ import annotations

from moa_runtime.wire.moa.v1 import session_pb2 as wire

#: Weight of the newest step.
_NEWEST = 0.1
_MOST_S = 4000.0


class Load:
    """Running means of how long work waits for its step, and of what steps take."""

    def __init__(self) -> None:
        self._queue_s = self._step_s = 0.0
        self._begun = False

    def stepped(self, queue_s: float, step_s: float) -> None:
        """A step was run: how long the first of its pieces had waited since it came, and what the step took."""
        newest = _NEWEST if self._begun else 1.0
        self._begun = True
        self._queue_s += newest * (max(0.0, queue_s) - self._queue_s)
        self._step_s += newest * (max(0.0, step_s) - self._step_s)

    def message(self, answers: int) -> wire.Load:
        """For the wire.

        Args:
            answers: conversations that are being served.
        """
        queue_s, step_s = (min(seconds, _MOST_S) for seconds in (self._queue_s, self._step_s))
        return wire.Load(answers=answers, queue_us=int(1e6 * queue_s), step_us=int(1e6 * step_s))
