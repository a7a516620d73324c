"""``python -m moa_bench.device_probe``: measure one target of a bundle in a process that holds nothing else.

One request arrives as JSON on stdin; parts of the target's result leave as lines of JSON on stdout. A target that
cannot run here is the part ``{"not_run": reason}``. See :func:`moa_bench.device.run_probe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moa_bench.result import rounded
from moa_runtime.backends.base import Backend, StepInputs
from moa_runtime.backends.load import BACKENDS, load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError
from moa_runtime.manifest import Manifest

_WARM_UP = 3

Emit = Callable[[dict[str, Any]], None]


def main() -> int:
    # Engines may print; stdout is kept for the result.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def emit(part: dict[str, Any]) -> None:
            print(json.dumps(part), file=out, flush=True)

        request = json.load(sys.stdin)
        work = {"steps": measure_steps, "answers": measure_answers}[request.pop("work")]
        try:
            work(**request, emit=emit)
        except MoaError as error:
            emit({"not_run": str(error)})
    return 0


def backend_of(target: str) -> tuple[str, str]:
    """Return name and module of the backend for the bundle's target of that name. Raises MoaError if there is none."""
    for name, entry in BACKENDS.items():
        if entry.graph == target:
            return name, entry.module
    runs = ", ".join(entry.graph for entry in BACKENDS.values())
    raise MoaError(f"the runtime has no backend for {target!r}; it has some for {runs}", code="no_backend")


# -- steps -----------------------------------------------------------------------------------------------


class RandomInputs:
    """Seeded random inputs of a step. The caches of all contexts are parts of the same arrays, as a drafter's are.

    Args:
        longest: the largest context to come.
        kv_shape, row_shape: of a cache entry and of a memory row; None for the drafter's.
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
        """Make ``context`` cached tokens and as many memory rows (at least the one that a softmax needs), then a chain
        of ``tokens`` queries."""
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
    emit: Emit,
) -> None:
    """Load the target, step at every context, then time every step; all new tokens are queries.

    Args:
        contexts: numbers of cached tokens, and of memory rows.
        tokens: numbers of new tokens.
        repeats: timed calls of each step.
        emit: gets each part of the target's result as it is known; of each step ``{"step": figures}``.

    Raises:
        MoaError: the target cannot run here.
    """
    opened = Bundle.open(bundle)
    before = peak_memory_mb()
    backend = _load(opened, target, threads, emit)
    inputs = RandomInputs(opened.manifest, max(contexts), backend.kv_shape, backend.row_shape)
    sizes = [(context, count) for context in contexts for count in tokens]
    for size in sizes:
        backend.step(inputs.of(*size))
    peak = peak_memory_mb()
    emit({"peak_memory_mb": rounded(peak, 1), "peak_memory_added_mb": rounded(peak - before, 1)})
    for context, count in sizes:
        step = inputs.of(context, count)
        [ms] = interleaved([lambda step=step: backend.step(step)], repeats + _WARM_UP)
        ms = ms[_WARM_UP:]
        figures = {"ms": rounded(float(np.median(ms))), "p95_ms": rounded(float(np.percentile(ms, 95)))}
        emit({"step": {"context": context, "tokens": count, **figures}})


def interleaved(runs: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Return milliseconds of ``repeats`` calls of each function, taken in turns, so that other work on the machine
    affects all of them alike.

    An untimed call precedes each timed one: as within a draft, the weights are then where the last step left them, and
    not where the other function did.
    """
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, own in zip(runs, times, strict=True):
            run()
            began = time.perf_counter()
            run()
            own.append(1000 * (time.perf_counter() - began))
    return times


def peak_memory_mb() -> float:
    """Return the most physical memory that this program has held so far, in megabytes (10^6 bytes)."""
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


def _load(bundle: Bundle, target: str, threads: int, emit: Emit) -> Backend:
    name, module = backend_of(target)
    began = time.perf_counter()
    # load_backend reports a missing package in a sentence.
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
    imported = time.perf_counter()
    backend = load_backend(bundle, name, threads=threads)
    loaded = time.perf_counter()
    emit({"import_ms": rounded(1000 * (imported - began), 1), "load_ms": rounded(1000 * (loaded - imported), 1)})
    return backend


# -- answers ---------------------------------------------------------------------------------------------


def measure_answers(
    *,
    bundle: str,
    target: str,
    threads: int,
    url: str,
    token: str,
    questions: Sequence[str],
    draft_length: Any,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    emit: Emit,
) -> None:
    """Ask each question in a conversation of its own and count the processor time of this process meanwhile.

    Args:
        bundle: its folder.
        draft_length: a :data:`moa_runtime.options.DraftLength`.
        sampling: fields of :class:`moa_runtime.session.events.Sampling`.
        emit: gets ``{"answer": figures}`` after each answer; loading and connecting are not counted.

    Raises:
        MoaError: the target cannot run here, or the verifier refuses or is lost.
    """
    # Imported here: the memory of these packages would count as that of steps.
    from moa_runtime.chat import Chat
    from moa_runtime.drafters.factory import drafter_for
    from moa_runtime.drafting.draft_controllers import controller_for
    from moa_runtime.options import LoopSettings
    from moa_runtime.session.events import Sampling
    from moa_runtime.transport import Endpoint

    # Drafting is measured: on a busy machine a late verdict must not make the device write on alone, which would count
    # as drafting too.
    patient = LoopSettings(late_after_s=120.0, prefill_late_after_s=120.0, drafting="device")
    opened = Bundle.open(bundle)
    name, _ = backend_of(target)
    backend = load_backend(opened, name, threads=threads)

    async def ask(question: str) -> dict[str, Any]:
        chat = Chat(
            opened,
            Endpoint(url, token),
            drafter=drafter_for(opened.manifest, backend),
            controller=controller_for(draft_length),
            settings=patient,
        )
        async with chat:
            await chat.open()
            cpu, wall = time.process_time(), time.perf_counter()
            events = chat.send(question, max_new_tokens=max_new_tokens, sampling=Sampling(**sampling))
            statistics = (await finished(events)).statistics
            return {
                "committed": statistics.tokens,
                "drafted": statistics.drafted,
                "cpu_s": rounded(time.process_time() - cpu),
                "wall_s": rounded(time.perf_counter() - wall),
            }

    for question in questions:
        emit({"answer": asyncio.run(ask(question))})


async def finished(events: AsyncIterator[Any]) -> Any:
    """Follow a chat's events to the end of the answer; returns its :class:`~moa_runtime.events.AnswerFinished`. Raises
    MoaError: the connection was lost; the chat would write on and wait for it."""
    from moa_runtime.events import AnswerFinished, LinkChanged, LinkStatus

    async for event in events:
        if isinstance(event, LinkChanged) and event.status is LinkStatus.OFFLINE:
            raise MoaError(f"the connection to the verifier was lost: {event.detail}", code="connection_lost")
        if isinstance(event, AnswerFinished):
            return event
    raise MoaError("the answer ended without its last event", code="connection_lost")


if __name__ == "__main__":
    sys.exit(main())
