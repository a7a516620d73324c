"""The profile of a step from onnxruntime's own profiler."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moa_bench.device.profile import NodeTime, Profile
from moa_runtime.backends.base import StepInputs
from moa_runtime.backends.onnx import ort, session_options

_WARM_UP = 5
_KERNEL = "_kernel_time"


def profile_onnx(graph: Path, inputs: StepInputs, *, threads: int, repeats: int) -> Profile:
    """See :func:`moa_bench.device.profile.profile_step`."""
    with tempfile.TemporaryDirectory(prefix="moa-profile-") as scratch:
        options = session_options(threads)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(scratch) / "step")
        session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        for _ in range(_WARM_UP + repeats):
            session.run(None, inputs.by_name())
        events = json.loads(Path(session.end_profiling()).read_text())
    return parse_profile(events, repeats)


def parse_profile(events: Sequence[dict[str, Any]], last: int) -> Profile:
    """Read the faster half of the last ``last`` runs out of onnxruntime's trace, whose times are microseconds."""
    runs = sorted((e for e in events if e["name"] == "model_run"), key=lambda event: event["ts"])[-last:]
    undisturbed = sorted(runs, key=lambda run: run["dur"])[: (last + 1) // 2]
    total: dict[tuple[str, str], int] = defaultdict(int)
    for event in sorted(events, key=lambda event: event["ts"]):
        inside = any(run["ts"] <= event["ts"] < run["ts"] + run["dur"] for run in undisturbed)
        if inside and event["cat"] == "Node" and event["name"].endswith(_KERNEL):
            total[event["name"].removesuffix(_KERNEL), event["args"]["op_name"]] += event["dur"]
    to_ms = 1 / 1000 / len(undisturbed)
    return Profile(
        step_ms=to_ms * sum(run["dur"] for run in undisturbed),
        nodes=[NodeTime(name, op, to_ms * microseconds) for (name, op), microseconds in total.items()],
    )
