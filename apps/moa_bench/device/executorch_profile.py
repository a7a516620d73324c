"""The profile of a step from ExecuTorch's own trace (ETDump), in which XNNPACK's operators have their times too."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from executorch.devtools import Inspector

from moa_bench.device.profile import NodeTime, Profile
from moa_runtime.backends.base import StepInputs
from moa_runtime.backends.executorch import ExecutorchBackend

_WARM_UP = 5
#: Events that hold others.
_OUTER = ("Method::execute", "DELEGATE_CALL", "OPERATOR_CALL")
_NATIVE_CALL = "native_call_"


def profile_executorch(graph: Path, inputs: StepInputs, *, threads: int, repeats: int) -> Profile:
    """See :func:`moa_bench.device.engines.profile_step`. XNNPACK counts whole microseconds, rounded down."""
    backend = ExecutorchBackend(graph, threads=threads, trace=True)
    seconds = []
    for _ in range(_WARM_UP + repeats):
        began = time.perf_counter()
        backend.step(inputs)
        seconds.append(time.perf_counter() - began)
    with tempfile.TemporaryDirectory(prefix="moa-profile-") as scratch:
        trace = str(Path(scratch) / "trace.etdp")
        backend.program.write_etdump_result_to_file(trace, str(Path(scratch) / "debug.bin"))
        blocks = Inspector(etdump_path=trace).event_blocks
    return summarise((event for block in blocks for event in block.events), seconds, repeats)


def summarise(events: Iterable[Any], seconds: list[float], last: int) -> Profile:
    """Means over the faster half of the last ``last`` steps.

    Args:
        events: of :class:`executorch.devtools.Inspector`; those that ran have a time in milliseconds for each step.
        seconds: that each step took.
    """
    first = len(seconds) - last
    undisturbed = first + np.argsort(seconds[first:])[: (last + 1) // 2]
    nodes = []
    for event in events:
        times = event.perf_data.raw if event.perf_data else ()
        if len(times) == len(seconds) and event.name not in _OUTER:
            name = event.name.removeprefix(_NATIVE_CALL)
            nodes.append(NodeTime(name, name.partition(" #")[0], float(np.mean(np.take(times, undisturbed)))))
    return Profile(step_ms=float(1000 * np.mean(np.take(seconds, undisturbed))), nodes=nodes)
