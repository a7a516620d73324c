"""What one client notes in one window: when it asked, and when committed tokens arrived."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from moa_bench.latency import Burst


@dataclass(frozen=True)
class AnswerRecord:
    """One answer, finished or not. Times in seconds since the client's window began."""

    asked_at: float
    bursts: list[Burst] = field(default_factory=list)


@dataclass(frozen=True)
class ClientRecord:
    """One client's window. ``cpu_s``: processor seconds of all its threads."""

    answers: list[AnswerRecord]
    cpu_s: float


class Recorder:
    """Notes what happens from now on; what is asked or arrives after ``seconds`` is not noted."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began, self._cpu_began = time.monotonic(), time.process_time()
        self._answers: list[AnswerRecord] = []

    def asked(self) -> None:
        """A question is sent; the tokens that follow belong to its answer."""
        now = self._now()
        if now <= self._seconds:
            self._answers.append(AnswerRecord(now))

    def committed(self, tokens: int) -> None:
        """So many tokens arrived together."""
        now = self._now()
        if now <= self._seconds:
            self._answers[-1].bursts.append(Burst(now, tokens))

    def record(self) -> ClientRecord:
        return ClientRecord(self._answers, time.process_time() - self._cpu_began)

    def _now(self) -> float:
        return time.monotonic() - self._began
