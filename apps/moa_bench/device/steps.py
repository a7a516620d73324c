"""Loading a target and timing its drafting step beside its floor; runs in the probe's process."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from moa_bench.device.engines import backend_of, floor_of, profile_step
from moa_bench.device.floor import Floor
from moa_bench.device.memory import peak_memory_mb
from moa_bench.result import rounded
from moa_runtime.backends.base import Backend, StepInputs
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle, Manifest
from moa_runtime.errors import MoaError

_WARM_UP = 3

Emit = Callable[[dict[str, Any]], None]


class RandomInputs:
    """Seeded random inputs of a step. The caches of all contexts are parts of the same arrays, as a drafter's are.

    Args:
        longest: the largest context to come.
        kv_shape: of a cache entry; None for the drafter's.
        row_shape: of a memory row; None for that of a cache entry.
    """

    def __init__(
        self,
        manifest: Manifest,
        longest: int,
        kv_shape: tuple[int, int] | None = None,
        row_shape: tuple[int, int] | None = None,
    ) -> None:
        self._random = np.random.default_rng(0)
        self._vocab_size = manifest.vocab_size
        kv_shape = kv_shape or (manifest.kv_heads, manifest.head_dim)
        self._cache, self._memory = (
            tuple(self._random.standard_normal((max(longest, 1), *shape), dtype=np.float32) for _ in range(2))
            for shape in (kv_shape, row_shape or kv_shape)
        )

    def of(self, context: int, tokens: int) -> StepInputs:
        """``context`` cached tokens and as many memory rows (at least the one that a softmax needs), then a chain of
        ``tokens`` queries."""
        (keys, values), (row_keys, row_values), rows = self._cache, self._memory, max(context, 1)
        return StepInputs.chain(
            self._random.integers(self._vocab_size, size=tokens, dtype=np.int64),
            (keys[:context], values[:context]),
            (row_keys[:rows], row_values[:rows]),
            asked=tokens,
        )


def measure_steps(
    *,
    bundle: str,
    target: str,
    threads: int,
    contexts: Sequence[int],
    tokens: Sequence[int],
    repeats: int,
    profile: int | None,
    emit: Emit,
) -> None:
    """Load, step at every context, then time every step beside the floor.

    The settings are those of :class:`moa_bench.device.measure.StepSettings`.

    Args:
        bundle: its folder.
        emit: told each part of the target's result as it is known; of each step, ``{"step": figures}``.

    Raises:
        MoaError: the target cannot run here.
    """
    opened = Bundle.open(bundle)
    before = peak_memory_mb()
    backend = _load(opened, target, threads, emit)
    inputs = RandomInputs(opened.manifest, max([*contexts, profile or 0]), backend.kv_shape, backend.row_shape)
    sizes = [(context, count) for context in contexts for count in tokens]
    for size in sizes:
        backend.step(inputs.of(*size))
    # Read now: the floor is a second copy of the weights.
    peak = peak_memory_mb()
    emit({"peak_memory_mb": rounded(peak, 1), "peak_memory_added_mb": rounded(peak - before, 1)})
    floor: Floor | None = None
    try:
        floor = floor_of(opened, target, threads=threads)
        emit({"floor": _floor_figures(floor)})
    except MoaError as error:
        emit({"floor": {"not_run": str(error)}})
    for context, count in sizes:
        step = _timed(backend, inputs.of(context, count), None if floor is None else floor.prepare(count), repeats)
        emit({"step": {"context": context, "tokens": count, **step}})
    if profile is not None:
        watched = {count: inputs.of(profile, count) for count in tokens}
        emit({"profile": {"context": profile, **_profiles(opened, target, threads, repeats, watched)}})


def interleaved(runs: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Milliseconds of ``repeats`` calls of each function, taken in turns, so that whatever else the machine is
    doing meets all of them alike.

    Before each call that counts comes one that does not: as within a draft, the weights are then where the
    last step left them, and not where the other function did.
    """
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, own in zip(runs, times, strict=True):
            run()
            began = time.perf_counter()
            run()
            own.append(1000 * (time.perf_counter() - began))
    return times


def _load(bundle: Bundle, target: str, threads: int, emit: Emit) -> Backend:
    name, module = backend_of(target)
    began = time.perf_counter()
    # What is missing is told by load_backend, in a sentence.
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
    imported = time.perf_counter()
    backend = load_backend(bundle, name, threads=threads)
    loaded = time.perf_counter()
    emit({"import_ms": rounded(1000 * (imported - began), 1), "load_ms": rounded(1000 * (loaded - imported), 1)})
    return backend


def _timed(
    backend: Backend, inputs: StepInputs, floor: Callable[[], object] | None, repeats: int
) -> dict[str, float | None]:
    """One step's figures; those of the floor are None without one."""
    runs = [lambda: backend.step(inputs), *([floor] if floor else [])]
    interleaved(runs, _WARM_UP)
    step_ms, *floor_ms = interleaved(runs, repeats)
    ms = float(np.median(step_ms))
    least = float(np.median(floor_ms[0])) if floor_ms else None
    return {
        "ms": rounded(ms),
        "p95_ms": rounded(float(np.percentile(step_ms, 95))),
        "floor_ms": rounded(least),
        "ratio": rounded(ms / least) if least else None,
    }


def _floor_figures(floor: Floor) -> dict[str, Any]:
    return {
        "weights": sum(product.k * product.n for product in floor.products),
        "products": [asdict(product) for product in floor.products],
    }


def _profiles(
    bundle: Bundle, target: str, threads: int, repeats: int, steps: Mapping[int, StepInputs]
) -> dict[str, Any]:
    """Profiles of steps by their number of tokens, or why there are none."""
    found = []
    try:
        for tokens, inputs in steps.items():
            profile = profile_step(bundle, target, inputs, threads=threads, repeats=repeats)
            found.append({"tokens": tokens, **profile.as_dict()})
    except MoaError as error:
        return {"not_run": str(error)}
    return {"steps": found}
