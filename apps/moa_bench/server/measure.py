"""The server benchmark: many clients at once, in windows of equal length."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moa_bench.server import MODES
from moa_bench.server.client import Window
from moa_bench.server.fleet import Fleet
from moa_bench.server.memory import PeakMemory
from moa_bench.server.record import ClientRecord
from moa_bench.verifier import Verifier
from moa_runtime.errors import MoaError

_WARM_UP_S = 2.0
_SAMPLE_EVERY_S = 0.05
_LONGEST_FORGETTING_S = 30.0


@dataclass(frozen=True)
class Load:
    """So many clients at work in one mode."""

    clients: int
    mode: str


@dataclass(frozen=True)
class WindowResult:
    """What one window brought.

    Attributes:
        passes: forward passes of the target within it.
        peak_memory: of the verifier's process, bytes; None where that process is not ours.
    """

    clients: list[ClientRecord]
    passes: int
    peak_memory: int | None


@dataclass
class Results:
    """What was measured so far, whole windows only. ``seconds``: wall time, loading not included."""

    windows: dict[Load, list[WindowResult]] = field(default_factory=dict)
    seconds: float = 0.0


def schedule(sessions: Sequence[int], repeats: int, modes: Sequence[str] = MODES) -> list[Load]:
    """Every load ``repeats`` times, the modes in turn, each repetition in the other order.

    Drift of the machine then hits both modes alike.
    """
    order = []
    for repeat in range(repeats):
        turn = modes if repeat % 2 == 0 else modes[::-1]
        order += [Load(clients, mode) for clients in sessions for mode in turn]
    return order


def warm_up(verifier: Verifier, fleet: Fleet, modes: Sequence[str] = MODES) -> None:
    """Let every client work a moment in each mode, so that no window pays for what is only done once.

    Raises:
        MoaError: bundle and verifier do not belong together, or a client fails.
    """
    for mode in modes:
        _measure_window(Load(len(fleet.processes), mode), _WARM_UP_S, verifier, fleet)


def measure(loads: Iterable[Load], seconds: float, verifier: Verifier, fleet: Fleet, results: Results) -> None:
    """Measure one window for every load into ``results``, which hold whole windows also when this ends early.

    Raises:
        VerifierGoneError: the verifier has ended.
        MoaError: a client has ended, or was refused.
    """
    began = time.monotonic()
    try:
        for load in loads:
            found = _measure_window(load, seconds, verifier, fleet)
            results.windows.setdefault(load, []).append(found)
    finally:
        results.seconds = time.monotonic() - began


def _measure_window(load: Load, seconds: float, verifier: Verifier, fleet: Fleet) -> WindowResult:
    _await_forgetting(verifier)
    memory = PeakMemory(verifier.pid)
    before = verifier.forwards()
    end = time.monotonic() + seconds
    fleet.begin(load.clients, Window(load.mode, seconds))
    while (left := end - time.monotonic()) > 0:
        memory.sample()
        if fleet.wait_for_any(min(left, _SAMPLE_EVERY_S)):  # before its time: it failed
            break
    passes = verifier.forwards() - before
    return WindowResult(fleet.collect(), passes, memory.bytes)


def _await_forgetting(verifier: Verifier) -> None:
    """Wait until a verifier of ours holds no conversation of an earlier window, and so none of its memory."""
    if verifier.pid is None:
        return
    give_up = time.monotonic() + _LONGEST_FORGETTING_S
    while verifier.status()["sessions"]:
        if time.monotonic() > give_up:
            raise MoaError(f"the verifier still held conversations after {_LONGEST_FORGETTING_S:g} s")
        time.sleep(_SAMPLE_EVERY_S)
