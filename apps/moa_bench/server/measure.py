"""The server benchmark: many clients at once, in windows of equal length."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moa_bench.server import MODES
from moa_bench.server.client import Window
from moa_bench.server.cpu import cpu_seconds
from moa_bench.server.fleet import Fleet
from moa_bench.server.memory import PeakMemory
from moa_bench.server.modes import Asked
from moa_bench.server.record import ClientRecord
from moa_bench.verifier import Verifier
from moa_runtime.errors import MoaError

_WARM_UP_S = 2.0
_SAMPLE_EVERY_S = 0.05
_LONGEST_FORGETTING_S = 30.0


@dataclass(frozen=True)
class Load:
    """So many clients at work in one mode.

    Attributes:
        engine: of the verifier, where several are compared; else empty.
    """

    clients: int
    mode: str
    engine: str = ""

    @property
    def name(self) -> str:
        """Of its figures among those of as many clients."""
        return f"{self.engine} {self.mode}" if self.engine else self.mode


@dataclass(frozen=True)
class WindowResult:
    """What one window brought.

    Attributes:
        passes: forward passes of the target within it.
        peak_memory: of the verifier's process, bytes; None where that process is not ours.
        cpu_s: processor time of that process within it, seconds; None likewise.
    """

    clients: list[ClientRecord]
    passes: int
    peak_memory: int | None
    cpu_s: float | None = None


@dataclass
class Results:
    """What was measured so far, whole windows only. ``seconds``: wall time, loading not included."""

    windows: dict[Load, list[WindowResult]] = field(default_factory=dict)
    seconds: float = 0.0


def schedule(
    sessions: Sequence[int], repeats: int, modes: Sequence[str] = MODES, engines: Sequence[str] = ("",)
) -> list[Load]:
    """Every load ``repeats`` times, modes and engines in turn, each repetition in the other order.

    Drift of the machine then hits all of them alike.
    """
    order = []
    for repeat in range(repeats):
        turn = [(mode, engine) for mode in modes for engine in engines][:: 1 if repeat % 2 == 0 else -1]
        order += [Load(clients, mode, engine) for clients in sessions for mode, engine in turn]
    return order


def warm_up(verifiers: Mapping[str, Verifier], fleet: Fleet, modes: Sequence[str] = MODES) -> None:
    """Let every client work a moment in each mode with each verifier: no window pays for what is only done once.

    Raises:
        MoaError: bundle and verifier do not belong together, or a client fails.
    """
    for engine, verifier in verifiers.items():
        for mode in modes:
            _measure_window(Load(len(fleet.processes), mode, engine), _WARM_UP_S, verifier, fleet)


def measure(
    loads: Iterable[Load], seconds: float, verifiers: Mapping[str, Verifier], fleet: Fleet, results: Results
) -> None:
    """Measure one window for every load into ``results``, which hold whole windows also when this ends early.

    Args:
        verifiers: by the name of their engine, as the loads have it.

    Raises:
        VerifierGoneError: the verifier has ended.
        MoaError: a client has ended, or was refused.
    """
    began = time.monotonic()
    try:
        for load in loads:
            found = _measure_window(load, seconds, verifiers[load.engine], fleet)
            results.windows.setdefault(load, []).append(found)
    finally:
        results.seconds = time.monotonic() - began


def _measure_window(load: Load, seconds: float, verifier: Verifier, fleet: Fleet) -> WindowResult:
    _await_forgetting(verifier)
    memory = PeakMemory(verifier.pid)
    before, cpu_before = verifier.forwards(), cpu_seconds(verifier.pid)
    end = time.monotonic() + seconds
    fleet.begin(load.clients, Window(load.mode, seconds, Asked(verifier.endpoint, verifier.http_url)))
    while (left := end - time.monotonic()) > 0:
        memory.sample()
        if fleet.wait_for_any(min(left, _SAMPLE_EVERY_S)):  # before its time: it failed
            break
    passes, cpu_after = verifier.forwards() - before, cpu_seconds(verifier.pid)
    cpu_s = None if cpu_before is None or cpu_after is None else cpu_after - cpu_before
    return WindowResult(fleet.collect(), passes, memory.bytes, cpu_s)


def _await_forgetting(verifier: Verifier) -> None:
    """Wait until a verifier of ours holds no conversation of an earlier window, and so none of its memory."""
    if verifier.pid is None:
        return
    give_up = time.monotonic() + _LONGEST_FORGETTING_S
    while verifier.status()["sessions"]:
        if time.monotonic() > give_up:
            raise MoaError(f"the verifier still held conversations after {_LONGEST_FORGETTING_S:g} s")
        time.sleep(_SAMPLE_EVERY_S)
