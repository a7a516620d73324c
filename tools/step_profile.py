"""Show the time of a drafting step operator by operator, from the engine's own profiler.

python tools/step_profile.py --bundle BUNDLE [--target onnx|executorch] [--context 512] [--tokens 1]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moa_bench.benchmark import Table
from moa_bench.device_probe import RandomInputs, backend_of
from moa_bench.result import rounded
from moa_runtime.backends.base import StepInputs
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.cli_main import run_program
from moa_runtime.errors import MoaError

_WARM_UP = 5
_TOP_NODES = 10
_KERNEL = "_kernel_time"
#: ExecuTorch's events that contain others.
_OUTER = ("Method::execute", "DELEGATE_CALL", "OPERATOR_CALL")
_NATIVE_CALL = "native_call_"


@dataclass(frozen=True)
class NodeTime:
    """One operator of the graph as it ran, with its milliseconds in a step."""

    name: str
    op: str
    ms: float


@dataclass(frozen=True)
class Profile:
    """Times of a watched step, slower than an unwatched one: read them as shares. Means over the faster half of
    the steps, so that they add up and leave out other work of the machine.

    Attributes:
        nodes: in the order in which they ran; the rest of ``step_ms`` is spent between them.
    """

    step_ms: float
    nodes: Sequence[NodeTime]

    def as_dict(self) -> dict[str, Any]:
        """Return operators by type and the most expensive nodes, the most expensive first, for JSON."""
        by_op: dict[str, list[float]] = defaultdict(list)
        for node in self.nodes:
            by_op[node.op].append(node.ms)
        operators = sorted(by_op.items(), key=lambda item: sum(item[1]), reverse=True)
        top = sorted(self.nodes, key=lambda node: node.ms, reverse=True)[:_TOP_NODES]
        return {
            "step_ms": rounded(self.step_ms),
            "between_nodes_ms": rounded(self.step_ms - sum(node.ms for node in self.nodes)),
            "operators": [{"op": op, "nodes": len(ms), **self._figures(sum(ms))} for op, ms in operators],
            "top_nodes": [{"name": node.name, "op": node.op, **self._figures(node.ms)} for node in top],
        }

    def _figures(self, ms: float) -> dict[str, float | None]:
        return {"ms": rounded(ms), "share": rounded(ms / self.step_ms)}


def profile_onnx(graph: Path, inputs: StepInputs, *, threads: int, repeats: int) -> Profile:
    """Profile ``repeats`` steps with onnxruntime's profiler."""
    import onnxruntime as ort

    from moa_runtime.backends.onnx import session_options

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
    """Read the faster half of the last ``last`` runs from onnxruntime's trace, whose times are microseconds."""
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


def profile_executorch(graph: Path, inputs: StepInputs, *, threads: int, repeats: int) -> Profile:
    """Profile steps with ExecuTorch's trace (ETDump). XNNPACK counts whole microseconds, rounded down."""
    from executorch.devtools import Inspector

    from moa_runtime.backends.executorch import ExecutorchBackend

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
    """Return means over the faster half of the last ``last`` steps.

    Args:
        events: of :class:`executorch.devtools.Inspector`; those that ran have a time in milliseconds for each step.
        seconds: of each step.
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


def profile(bundle: Bundle, target: str, *, context: int, tokens: int, threads: int, repeats: int) -> Profile:
    """Profile a step of one of the bundle's targets.

    Raises:
        MoaError: no profiler for its engine, or a size that the target does not hold.
    """
    profilers = {"onnx": profile_onnx, "executorch": profile_executorch}
    if target not in profilers:
        raise MoaError(
            f"there is no profiler for {target}; there is one for {', '.join(profilers)}", code="no_profiler"
        )
    if not (context >= 0 and tokens >= 1 and context + tokens <= bundle.manifest.max_context):
        raise MoaError(
            f"a context of {context} and {tokens} tokens are more than the target holds, or too few",
            code="out_of_range",
        )
    backend = load_backend(bundle, backend_of(target)[0], threads=threads)
    inputs = RandomInputs(bundle.manifest, context, backend.kv_shape, backend.row_shape).of(context, tokens)
    return profilers[target](bundle.graph_path(target), inputs, threads=threads, repeats=repeats)


def tables_of(figures: dict[str, Any]) -> list[Table]:
    """Make the tables of operators and of the most expensive nodes."""
    rows = [[each["op"], each["nodes"], each["ms"], f"{100 * each['share']:.1f} %"] for each in figures["operators"]]
    between = figures["between_nodes_ms"]
    rows.append(["between operators", None, between, f"{100 * between / figures['step_ms']:.1f} %"])
    top = [[each["name"], each["op"], each["ms"], f"{100 * each['share']:.1f} %"] for each in figures["top_nodes"]]
    note = f"a step took {figures['step_ms']:.3f} ms while it was watched"
    return [
        Table(["operator", "nodes", "ms", "share"], rows, note=note),
        Table(["most expensive nodes", "operator", "ms", "share"], top),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status, see :func:`moa_runtime.cli_main.run_program`."""
    parser = argparse.ArgumentParser(prog="step_profile", description="Show a drafting step's time by operator.")
    parser.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="what moa-export wrote")
    parser.add_argument("--target", default="onnx", help="of the bundle: onnx or executorch (default %(default)s)")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="cached tokens (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=1, metavar="N", help="new tokens (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="processor threads (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="watched steps (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    def work() -> int:
        args = parser.parse_args(argv)
        sizes = {"context": args.context, "tokens": args.tokens, "threads": args.threads, "repeats": args.repeats}
        figures = profile(Bundle.open(args.bundle), args.target, **sizes).as_dict()
        print(json.dumps(figures) if args.json else "\n\n".join(table.text() for table in tables_of(figures)))
        return 0

    return run_program("step_profile", work)


if __name__ == "__main__":
    sys.exit(main())
