"""Half an hour of clients that come, go, flood, hang and lie, beside two honest ones.

>>> python -m soak --seconds 1800 --out soak     # with PYTHONPATH=tests

Fails when memory, descriptors or processes grow, the log has an error, or an honest text is not plain decoding's.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from moa_runtime.grammar.compiler import MOST_KEPT
from moa_runtime.session.events import Grammar
from soak import honest
from soak.actors import Crowd
from soak.plot import plot
from soak.served import Served, served

#: Growth of memory that fails.
MOST_GROWTH = 0.05
#: The share of the time in which the verifier warms up: what grows then is not looked at.
WARMING = 1 / 6
#: Answers that are known before.
REFERENCES = 12
#: A conversation outlives its connection for so long that many are held, and many forgotten.
SERVE = ("--threads", "1", "--keep-seconds", "5", "--idle-seconds", "10", "--max-frame-bytes", "65536")
SERVE += ("--cache-tokens", "8192")  # soon full: what grows afterwards is a leak
#: After the last visitor has left, the time until the server has closed what is overdue.
CALM_S = 15.0
#: Attackers at a time.
_THREADS = 64
_TINY = (512, 512)
_DEFAULT = (49152, 8192)


@dataclass
class Sample:
    """One second: bytes, a count, what the honest clients waited for first tokens and for steps, in seconds, and their
    conversations that were refused because all places were taken, or too many connections of their address waited."""

    at: float
    memory: int
    descriptors: int
    first: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    stream: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"second": round(self.at, 2), "memory": self.memory, "descriptors": self.descriptors}
        for name in ("first", "draft", "stream"):
            for kind, value in latencies(getattr(self, name)).items():
                row[f"{name}_{kind}"] = value
        return row


def latencies(seconds: Sequence[float]) -> dict[str, float | None]:
    """Milliseconds."""
    if not seconds:
        return {"p50_ms": None, "p95_ms": None, "longest_ms": None}
    ordered = [round(1000 * value, 2) for value in sorted(seconds)]
    return {"p50_ms": median(ordered), "p95_ms": ordered[int(0.95 * (len(ordered) - 1))], "longest_ms": ordered[-1]}


@dataclass
class Result:
    """What came out.

    Attributes:
        memory_growth: of the median over the last tenth of the time against the tenth behind the first sixth.
        descriptors_before, descriptors_after: open while no client is connected.
        processes_before, processes_after: of grammars, while no client is connected.
        problems: why it fails, empty where it does not.
    """

    seconds: float
    memory_before: int
    memory_after: int
    memory_most: int
    memory_growth: float
    descriptors_before: int
    descriptors_after: int
    processes_before: int
    processes_after: int
    log_bytes: int
    visits: dict[str, int]
    refused: int
    first: dict[str, float | None]
    draft_steps: int
    draft: dict[str, float | None]
    stream_steps: int
    stream: dict[str, float | None]
    problems: list[str]


async def disturb(running: Served, seconds: float, seed: int) -> tuple[list[Sample], Crowd, list[str]]:
    """Let the crowd in for ``seconds``; what honest clients do is sampled every second."""
    known = honest.references(running.target, REFERENCES, seed)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=honest.run, args=(running.target, known, seed, there), daemon=True)
    process.start()
    crowd, more = Crowd(running.target, seed), Crowd(running.target, seed + 1)
    visiting = asyncio.create_task(crowd.run())
    # Twice as many at first: memory that an allocator keeps from the worst moment is no leak, so that comes early.
    warming = asyncio.create_task(asyncio.wait_for(more.run(), seconds * WARMING))
    samples: list[Sample] = []
    problems: list[str] = []
    began = time.monotonic()
    try:
        while (at := time.monotonic() - began) < seconds and not visiting.done() and running.running:
            sample = Sample(at, running.memory, running.descriptors)
            while here.poll():
                kind, value = here.recv()
                if kind == "differs":
                    problems.append(f"after {at:.0f} s: {value}")
                else:
                    getattr(sample, kind).append(value)
            samples.append(sample)
            await asyncio.sleep(1)
    finally:
        visiting.cancel()
        warming.cancel()
        results = await asyncio.gather(visiting, warming, return_exceptions=True)
        process.kill()
        process.join()
    if isinstance(results[0], Exception):
        problems.append(f"an actor failed: {results[0]!r}")
    if not running.running:
        problems.append("the verifier died")
    return samples, crowd, problems


def at_rest(running: Served) -> tuple[int, int]:
    """Descriptors and processes."""
    return running.descriptors, running.processes


def fill_grammars(running: Served) -> None:
    """Have as many grammars compiled as a verifier keeps, each with a process and a descriptor.

    Raises:
        RuntimeError: processes of their answers stay when these are forgotten.
    """
    for number in range(MOST_KEPT):
        honest.constrained(running.target, Grammar("regex", f"[a-z]{{{number + 1}}}"))
    deadline = time.monotonic() + CALM_S
    while running.processes > MOST_KEPT + 2:  # that which forks them, and the last answer's until another one comes
        if time.monotonic() > deadline:
            raise RuntimeError(f"{MOST_KEPT} grammars are kept by {running.processes} processes")
        time.sleep(0.2)


def judge(
    running: Served, samples: Sequence[Sample], before: tuple[int, int], crowd: Crowd, problems: Sequence[str]
) -> Result:
    """What the samples show; ``before`` is what was there :func:`at_rest`."""
    tenth = max(1, len(samples) // 10)
    warm = int(len(samples) * WARMING)
    first = median(sample.memory for sample in samples[warm : warm + tenth])
    last = median(sample.memory for sample in samples[-tenth:])
    after, log = at_rest(running) if running.running else (0, 0), running.log.read_text()
    found = [*problems]
    if last > first * (1 + MOST_GROWTH):
        found.append(f"memory grew from {first / 1e6:.1f} to {last / 1e6:.1f} MB")
    for name, was, left in zip(("descriptors", "processes"), before, after, strict=True):
        if left > was:
            found.append(f"there were {was} {name} before, {left} are there after all have left")
    if "Traceback" in log or "moa-serve: error" in log:
        found.append(f"the log has an error: {log[:500]}")
    names = ("first", "draft", "stream")
    first_token, draft, stream = ([value for sample in samples for value in getattr(sample, name)] for name in names)
    if not draft or not stream:
        found.append(f"the honest clients made {len(draft)} rounds and {len(stream)} tokens")
    return Result(
        samples[-1].at if samples else 0.0,
        int(first),
        int(last),
        max(sample.memory for sample in samples),
        round(last / first - 1, 4),
        before[0],
        after[0],
        before[1],
        after[1],
        len(log),
        dict(crowd.visits.most_common()),
        sum(len(sample.refused) for sample in samples),
        latencies(first_token),
        len(draft),
        latencies(draft),
        len(stream),
        latencies(stream),
        found,
    )


def _is_calm(running: Served, before: tuple[int, int]) -> bool:
    return all(left <= was for was, left in zip(before, at_rest(running), strict=True))


def soak(seconds: float, out: Path, model: str | None = None, seed: int = 0) -> Result:
    """Run it; ``out`` gets ``samples.csv``, ``soak.svg``, ``result.json`` and the verifier's ``log``.

    Args:
        model: ``default`` for the built-in target; a random tiny one else, which strains the server most.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        options, sizes = [*SERVE], _DEFAULT
        if model != "default":
            options, sizes = [*SERVE, *_tiny(Path(folder))], _TINY
        with served(out / "log", options, *sizes) as running:
            fill_grammars(running)
            before = at_rest(running)
            samples, crowd, problems = asyncio.run(disturb(running, seconds, seed))
            deadline = time.monotonic() + CALM_S
            while running.running and not _is_calm(running, before) and time.monotonic() < deadline:
                time.sleep(0.2)
            result = judge(running, samples, before, crowd, problems)
    rows = [sample.row() for sample in samples]
    with (out / "samples.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (out / "result.json").write_text(json.dumps(asdict(result), indent=2) + "\n")
    plot(rows, out / "soak.svg")
    return result


def _tiny(folder: Path, head_dim: int = 16) -> list[str]:
    from support.tiny import make_tiny_drafter, make_tiny_target

    target = make_tiny_target(folder / "target", head_dim=head_dim)
    return ["--model", str(target), "--drafter", str(make_tiny_drafter(target, folder / "drafter"))]


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 1 where something grew, broke or differed."""
    parser = argparse.ArgumentParser(prog="python -m soak", description="Strain a verifier and watch it.")
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=Path("soak-result"), help="folder (default: %(default)s)")
    parser.add_argument("--model", choices=("tiny", "default"), default="tiny", help="target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    options = parser.parse_args(argv)
    result = soak(options.seconds, options.out, options.model, options.seed)
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        growth = f"{result.memory_before / 1e6:.1f} -> {result.memory_after / 1e6:.1f} MB ({result.memory_growth:+.1%})"
        print(f"memory {growth}, descriptors {result.descriptors_before} -> {result.descriptors_after} at rest")
        print(f"processes of grammars: {result.processes_before} -> {result.processes_after} at rest")
        print(f"first tokens: {result.first}")
        print(f"drafting: {result.draft_steps} steps, {result.draft}")
        print(f"streaming: {result.stream_steps} steps, {result.stream}")
        print(f"{sum(result.visits.values())} visits; {result.refused} honest conversations were refused")
        print(f"{result.log_bytes} bytes of log; see {options.out}")
    for problem in result.problems:
        print(f"soak: {problem}", file=sys.stderr)
    return 1 if result.problems else 0
