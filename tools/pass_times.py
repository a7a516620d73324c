"""Time forward passes of a target's GGUF file: ours in 4, 8 and 32 bits, torch's, llama.cpp's, and the bare products.

    python tools/pass_times.py [--target FILE.gguf] [--threads 1] [--contexts 64,512,4000] [--several-contexts 64,512]

One session verifies 1, 2, 4, 8 and 16 rows after each of the contexts, and eight sessions 1 and 2 rows each, with the
logits of all rows. Then come prompts of 64 and 512 rows, with the logits of the last one. All engines take turns.
``int8`` and ``float32`` are our pass over the same numbers, rounded to 8 bits and as they are; ``torch`` is the pass in
torch. ``products`` are the matrix products of our pass in the file's own bits, with the sums of blocks, and nothing
else.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import onnxruntime as ort
import psutil

from moa_bench.benchmark import Table
from moa_bench.device_probe import interleaved
from moa_bench.options import check_at_least, names_of, numbers_of
from moa_bench.peer import gguf_of
from moa_bench.result import machine, ratio, rounded
from moa_decoder.gguf_file import parts_of
from moa_decoder.gguf_weights import GgufWeights
from moa_decoder.graph_builder import GraphBuilder, Port
from moa_decoder.matrix import Matrix, stacked
from moa_decoder.weights import DecoderWeights
from moa_runtime.backends.onnx import session_options
from moa_runtime.cli_main import run_program
from moa_runtime.errors import MoaError
from moa_server.engine.target_pass import Cache, Piece, TargetPass, rounded_up

_BITS: dict[str, Literal[4, 8, 32]] = {"int4": 4, "int8": 8, "float32": 32}
ENGINES = ("int4", "int8", "float32", "torch", "llamacpp", "products")
_ROWS, _SESSIONS, _SESSION_ROWS = (1, 2, 4, 8, 16), 8, (1, 2)
_PROMPTS = (64, 512)
#: Most rows of a pass.
_PIECE = 512
_REPEATS, _PROMPT_REPEATS = 20, 4
#: Parts of our pass by an output of their graphs; all others are layers without their attention.
_PARTS = {"mixed": "attention", "logits": "head"}
_MEMORY = ("loaded_mb", "filled_mb", "thousand_tokens_mb")
_TIMES = ("layers", "attention", "head", "rest", "total")


@dataclass(frozen=True)
class Case:
    """A pass: ``rows`` of each of some sessions, each after ``context`` tokens. Of a prompt the last row is wanted."""

    sessions: int
    rows: int
    context: int

    @property
    def prompt(self) -> bool:
        return self.context == 0

    @property
    def name(self) -> str:
        if self.prompt:
            return f"prompt of {self.rows}"
        return f"{self.sessions} x {self.rows} after {self.context}"


def cases_of(contexts: Iterable[int], several_contexts: Iterable[int]) -> list[Case]:
    """List the passes that are timed: of one session after each of ``contexts``, and of several."""
    single = [Case(1, rows, context) for context in contexts for rows in _ROWS]
    several = [Case(_SESSIONS, rows, context) for context in several_contexts for rows in _SESSION_ROWS]
    return [*single, *several, *(Case(1, rows, 0) for rows in _PROMPTS)]


def tokens_of(count: int) -> list[int]:
    """Draw ``count`` tokens that every vocabulary has; what they are does not matter."""
    return random.choices(range(256), k=count)


class Timed(Protocol):
    """An engine whose passes are timed."""

    def prepare(self, case: Case) -> Callable[[], object]:
        """Fill the caches that a pass needs; returns a function that computes it."""


class OurPass:
    """A :class:`moa_server.engine.target_pass.TargetPass`, with a cache for each session."""

    def __init__(self, target_pass: TargetPass) -> None:
        self.target_pass = target_pass
        self._caches: dict[tuple[int, int], Cache] = {}

    def _filled(self, session: int, context: int, rows: int) -> Cache:
        if (session, context) not in self._caches:
            room = rounded_up(context + max(rows, *_ROWS, *(() if context else _PROMPTS)))
            cache = self._caches[session, context] = self.target_pass.cache_shape.new_cache(room)
            for start in range(0, context, _PIECE):
                self.target_pass.forward([Piece(cache, start, tokens_of(min(_PIECE, context - start)))])
        return self._caches[session, context]

    def prepare(self, case: Case) -> Callable[[], object]:
        """See :meth:`Timed.prepare`."""
        caches = [self._filled(session, case.context, case.rows) for session in range(case.sessions)]
        pieces = [Piece(cache, case.context, tokens_of(case.rows)) for cache in caches]

        def run() -> object:
            hidden, _ = self.target_pass.forward(pieces)
            return self.target_pass.logits([hidden[-1:] if case.prompt else hidden])[0]

        return run


class Peer:
    """llama.cpp, with a context of its own for each number of cached tokens, so that others' cost nothing."""

    def __init__(self, file: Path, threads: int) -> None:
        from moa_bench.llamacpp import LlamaCpp

        self._made: dict[tuple[int, int], Any] = {}
        self._make = partial(LlamaCpp, file, threads=threads)
        self._filled(1, 0)

    def _filled(self, sessions: int, context: int) -> Any:
        if (sessions, context) not in self._made:
            room = rounded_up(max(context + max(_ROWS), *_PROMPTS), 256)
            engine = self._made[sessions, context] = self._make(context=sessions * room, sequences=sessions)
            for session in range(sessions):
                for start in range(0, context, _PIECE):
                    count = min(_PIECE, context - start)
                    engine.forward(tokens_of(count), range(start, start + count), [session] * count, [False] * count)
        return self._made[sessions, context]

    def prepare(self, case: Case) -> Callable[[], object]:
        """See :meth:`Timed.prepare`."""
        engine, rows = self._filled(case.sessions, case.context), case.rows
        positions = [*range(case.context, case.context + rows)] * case.sessions
        sessions = [session for session in range(case.sessions) for _ in range(rows)]
        wanted = [not case.prompt or row == rows - 1 for row in range(rows)] * case.sessions
        tokens = tokens_of(len(positions))

        def run() -> object:
            engine.forward(tokens, positions, sessions, wanted)
            for session in range(case.sessions):
                engine.forget(case.context, session)
            return engine.logits(-1)

        return run


class Products:
    """The products of all layers, and that of the head, each with rows of its own."""

    def __init__(self, weights: DecoderWeights, threads: int) -> None:
        graph, inputs, outputs = GraphBuilder(), dict[str, Port](), dict[str, Port]()
        for layer in range(len(weights.spec.layers)):
            for names in (("q", "k", "v"), ("out",), ("gate", "up"), ("down",)):
                matrix = stacked([weights.matrix(layer, name) for name in names])
                _add_product(graph, f"{names[0]}_{layer}", matrix, inputs, outputs)
        self._layers = _bound_session(graph, inputs, outputs, threads)
        graph, inputs, outputs = GraphBuilder(), {}, {}
        _add_product(graph, "head", weights.head(), inputs, outputs)
        self._head = _bound_session(graph, inputs, outputs, threads)

    def prepare(self, case: Case) -> Callable[[], object]:
        """See :meth:`Timed.prepare`."""
        rows = rounded_up(case.sessions * case.rows, 2)
        runs = [self._layers(rows), self._head(2 if case.prompt else rows)]
        return lambda: [run() for run in runs]


def _add_product(
    graph: GraphBuilder, name: str, matrix: Matrix, inputs: dict[str, Port], outputs: dict[str, Port]
) -> None:
    graph.output(f"{name}_out", graph.product(name, matrix))
    inputs[name] = (np.float32, ["rows", matrix.inputs])
    outputs[f"{name}_out"] = (np.float32, ["rows", matrix.outputs])


def _bound_session(
    graph: GraphBuilder, inputs: Mapping[str, Port], outputs: Mapping[str, Port], threads: int
) -> Callable[[int], Callable[[], object]]:
    """Return a function that takes a number of rows and returns one that runs the graph on random ones."""
    session = graph.session(inputs, outputs, session_options(threads))

    def bound(rows: int) -> Callable[[], object]:
        binding = session.io_binding()
        for bind, ports in ((binding.bind_ortvalue_input, inputs), (binding.bind_ortvalue_output, outputs)):
            for name, (_, (_, size)) in ports.items():
                numbers = np.random.default_rng(0).standard_normal((rows, int(size)), np.float32)
                bind(name, ort.OrtValue.ortvalue_from_numpy(numbers))
        return lambda: session.run_with_iobinding(binding)

    return bound


def load(name: str, file: Path, *, threads: int) -> Timed:
    """Load the engine ``name`` of :data:`ENGINES`."""
    if name == "llamacpp":
        return Peer(file, threads)
    if name == "torch":
        import torch

        from moa_drafter.target import load_target
        from moa_server.engine.fused_llama import FusedLlama

        torch.set_num_threads(threads)
        return OurPass(FusedLlama(load_target(str(file)), torch.float32))
    from moa_server.engine.invariance import settle
    from moa_server.engine.onnx_pass import OnnxPass

    weights = GgufWeights(parts_of(file))
    if name == "products":
        return Products(weights, threads)
    bits = _BITS[name]
    if bits < weights.bits:
        raise MoaError(f"{file} has {weights.bits} bits: leave {name} out of --engines", code="no_engine")
    own = weights if bits == weights.bits else GgufWeights(parts_of(file), bits)
    target_pass = OnnxPass(own, threads=threads)
    settle(target_pass, f"{file.name}, {file.stat().st_size} bytes")  # and so whether single rows are padded
    return OurPass(target_pass)


class PartTimes:
    """Milliseconds in the graphs of our pass, by part; it watches every session that is run while it is open."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._kept: dict[str, Any] = {}

    def __enter__(self) -> PartTimes:
        for method in ("run", "run_with_iobinding"):
            self._kept[method] = getattr(ort.InferenceSession, method)
            setattr(ort.InferenceSession, method, self._watched(self._kept[method]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, method in self._kept.items():
            setattr(ort.InferenceSession, name, method)

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(session: ort.InferenceSession, *args: Any) -> Any:
            began = time.perf_counter()
            found = method(session, *args)
            names = [_PARTS[port.name] for port in session.get_outputs() if port.name in _PARTS]
            part = names[0] if names else "layers"
            self.ms[part] = self.ms.get(part, 0.0) + 1000 * (time.perf_counter() - began)
            return found

        return run


def parts_of_passes(engine: OurPass, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the milliseconds of each part of our pass: medians, and ``rest`` for what no graph takes."""
    found = []
    for case in cases:
        run, every = engine.prepare(case), []
        with PartTimes() as times:
            for _ in range(_PROMPT_REPEATS if case.prompt else _REPEATS):
                times.ms.clear()
                began = time.perf_counter()
                run()
                total = 1000 * (time.perf_counter() - began)
                every.append({**times.ms, "rest": total - sum(times.ms.values()), "total": total})
        medians = {part: rounded(float(np.median([each.get(part, 0.0) for each in every])), 2) for part in _TIMES}
        found.append({"name": case.name, **medians})
    return found


def measure(names: Sequence[str], file: Path, cases: Sequence[Case], *, threads: int) -> dict[str, Any]:
    """Time all passes; returns plain figures: ``passes``, ``parts`` and ``memory``."""
    longest = max((case for case in cases if case.sessions == 1), key=lambda case: case.context)
    process, engines, memory = psutil.Process(), dict[str, Timed](), {}
    for name in names:
        before = process.memory_info().rss
        engines[name] = engine = load(name, file, threads=threads)
        if isinstance(engine, Products):
            continue
        memory[name] = {"loaded_mb": round((process.memory_info().rss - before) / 1e6)}
        engine.prepare(longest)()
        memory[name]["filled_mb"] = round((process.memory_info().rss - before) / 1e6)
        if isinstance(engine, OurPass):
            memory[name]["thousand_tokens_mb"] = rounded(engine.target_pass.cache_shape.token_bytes / 1e3, 1)
    passes = []
    for case in cases:
        runs = [engine.prepare(case) for engine in engines.values()]
        times = interleaved(runs, _PROMPT_REPEATS if case.prompt else _REPEATS)
        least = {name: rounded(min(each), 2) for name, each in zip(names, times, strict=True)}
        median = {name: rounded(float(np.median(each)), 2) for name, each in zip(names, times, strict=True)}
        passes.append({**asdict(case), "name": case.name, "least_ms": least, "median_ms": median})
    first = engines[names[0]]
    parts = parts_of_passes(first, cases) if isinstance(first, OurPass) and names[0] in _BITS else []
    return {"threads": threads, "passes": passes, "parts": parts, "memory": memory, "machine": machine()}


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Make the tables of what :func:`measure` has returned."""
    names = list(found["passes"][0]["least_ms"])
    first, others = names[0], [name for name in ("llamacpp", "products", "torch") if name in names[1:]]
    times = [
        [
            each["name"],
            *each["least_ms"].values(),
            *(ratio(each["least_ms"][first], each["least_ms"][other]) for other in others),
            *each["median_ms"].values(),
        ]
        for each in found["passes"]
    ]
    header = ["pass", *names, *(f"{first}/{other}" for other in others), *(f"{name}, median" for name in names)]
    title = f"ms, least of many unless it says median; processor threads: {found['threads']}"
    parts = [list(each.values()) for each in found["parts"]]
    memory = [[name, *map(held.get, _MEMORY)] for name, held in found["memory"].items()]
    memory_title = "resident memory, MB; later engines may take what earlier ones have freed"
    return [
        Table(header, times, title=title),
        *([Table(["pass", *_TIMES], parts, title=f"parts of {first}, median ms")] if parts else []),
        Table(["engine", "loaded", "longest context filled", "1,000 tokens"], memory, title=memory_title),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status, see :func:`moa_runtime.cli_main.run_program`."""
    parser = argparse.ArgumentParser(prog="pass_times", description="Time forward passes of a target in turns.")
    parser.add_argument("--target", metavar="FILE", help="GGUF file (default: that of the built-in target)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="processor threads (default %(default)s)")
    parser.add_argument("--contexts", default="64,512,4000", metavar="N,N,...", help="(default %(default)s)")
    parser.add_argument("--several-contexts", default="64,512", metavar="N,N,...", help="(default %(default)s)")
    parser.add_argument("--engines", default=",".join(ENGINES), metavar="NAME,...", help="(default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    def work() -> int:
        args = parser.parse_args(argv)
        names = names_of("--engines", "engine", args.engines, ENGINES)
        check_at_least(args, threads=1)
        contexts = numbers_of("--contexts", args.contexts, 1)
        cases = cases_of(contexts, numbers_of("--several-contexts", args.several_contexts, 1))
        found = measure(names, gguf_of(args.target), cases, threads=args.threads)
        print(json.dumps(found) if args.json else "\n\n".join(table.text() for table in tables(found)))
        return 0

    return run_program("pass_times", work)


if __name__ == "__main__":
    sys.exit(main())
