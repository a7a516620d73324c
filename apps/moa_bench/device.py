"""``moa-bench device``: the cost of drafting on the device in time, memory and processor seconds."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moa_bench import options
from moa_bench.benchmark import Benchmark, Measured, Result, Table
from moa_bench.result import ratio, rounded
from moa_bench.verifier import Verifier, open_verifier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CONTEXTS = (0, 128, 512, 1024, 2048)
#: New tokens of the steps: 1 as in a chain, 8 as in a level of a tree.
_TOKENS = (1, 8)
_LOADING = {"import_ms": "import ms", "load_ms": "load ms"}
_LOADING |= {"peak_memory_mb": "peak MB", "peak_memory_added_mb": "added MB"}
_STEP = {"context": "context", "tokens": "tokens", "ms": "ms", "p95_ms": "p95 ms"}


class Device(Benchmark):
    """Time of a drafting step, memory, and processor seconds per token, for every target in the bundle."""

    name = "device"
    purpose = "The cost of drafting on the device."
    summary = "the cost of drafting on the device: time, memory, processor time"
    description = """\
Measure the cost of drafting on the device, for every target in the bundle that this machine can run.

Steps: milliseconds of one drafting step with 1 new token, as in a chain, and with 8, as in a level of a tree;
every new token is a query. A context of N means N cached tokens and N memory rows, both random. tools/step_floor.py
compares a step with its bare matrix products, tools/step_profile.py shows its time by operator.

Answers: processor seconds of the client, all of its threads, per token of real answers. This stands in for
energy, which programs cannot measure on every device. Of each question the first turn is asked. It needs a
verifier; unless --server names one, one is started, and the client then keeps to the other half of the
processors.

Each target is measured in processes of its own, so that times and memory are its own. Peak memory is that of
loading and of stepping at every context. Loading finds the files in the system's cache.
"""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = options.adder(parser)
        options.add_bundle_options(parser)
        add("--threads N", "processor threads of a step (default %(default)s, as in the runtime)", default=2)
        add(
            "--contexts N,N,...",
            f"contexts of the steps (default {','.join(map(str, _CONTEXTS))}, as far as the target holds them)",
        )
        add("--repeats N", "timed calls of each step (default %(default)s)", default=50)
        add("--no-answers", "leave out the answers; no verifier is needed", action="store_true")
        options.add_question_options(parser, required=False)
        options.add_answer_options(parser, max_new_tokens=48)
        options.add_server_options(parser)
        options.add_target_options(parser)

    def measure(self, args: argparse.Namespace) -> Generator[Measured, None, None]:
        from moa_drafter.progress import Progress

        options.check_at_least(args, threads=1, repeats=1, draft_length=1, max_new_tokens=1)
        questions, sampling = options.questions_of(args), options.sampling_of(args)
        endpoint, bundle = options.endpoint_of(args), options.bundle_of(args)
        most = bundle.manifest.max_context - max(_TOKENS)  # the target holds a step's own tokens, too
        contexts = tuple(context for context in _CONTEXTS if context <= most)
        if args.contexts is not None:
            contexts = options.numbers_of("--contexts", args.contexts, 0, most)
        steps = {"threads": args.threads, "contexts": contexts, "repeats": args.repeats, "tokens": _TOKENS}
        answers = {"draft_length": args.draft_length, "max_new_tokens": args.max_new_tokens}
        answers |= {"sampling": asdict(sampling)}
        if endpoint is not None and not args.no_answers:
            Verifier(endpoint).status()  # a wrong address should not show only after the steps
        targets: dict[str, dict[str, Any]] = {target: {} for target in sorted(bundle.manifest.targets)}
        asked = None if args.no_answers else {**answers, **options.question_settings(args)}
        measured = Measured(
            lambda: {"targets": {target: figures for target, figures in targets.items() if figures}},
            {"target": bundle.manifest.target, **steps, "answers": asked},
            bundle.manifest.fingerprints,
        )
        yield measured
        each = len(contexts) * len(_TOKENS) + (0 if args.no_answers else len(questions))
        common = {"bundle": str(bundle.folder), "threads": args.threads}
        with Progress(total=each * len(targets), desc="device", unit="measurement") as bar:
            for target, figures in targets.items():
                figures["steps"] = []
                for _ in measure_target("steps", {**common, "target": target, **steps}, figures):
                    bar.update()
                    yield measured
            runnable = {target: figures for target, figures in targets.items() if "not_run" not in figures}
            if args.no_answers or not runnable:
                return
            # The verifier starts after the steps, which have the machine to themselves.
            with open_verifier(endpoint, model=args.model, drafter=args.drafter, dtype=args.dtype) as verifier:
                where = {"url": verifier.endpoint.url, "token": verifier.endpoint.token}
                request = {**common, **where, **answers, "questions": [question.turns[0] for question in questions]}
                for target, figures in runnable.items():
                    for _ in measure_target("answers", {**request, "target": target}, figures):
                        bar.update()
                        yield measured

    def tables(self, result: Result) -> list[Table]:
        targets, settings = result["targets"], result["settings"]
        overview = []
        for target, figures in targets.items():
            energy = figures.get("energy", {})
            seconds = (energy.get(f"cpu_s_per_{kind}_token") for kind in ("committed", "drafted"))
            per_token = (None if each is None else 1000 * each for each in seconds)
            overview.append([target, *map(figures.get, _LOADING), *per_token])
        steps = [[target, *map(step.get, _STEP)] for target, figures in targets.items() for step in figures["steps"]]
        header = ["target", *_LOADING.values(), "CPU ms / committed", "CPU ms / drafted"]
        note = f"medians of {settings['repeats']} steps with {settings['threads']} threads; every token is a query"
        return [
            Table(header, overview, note="\n".join(_notes(result))),
            Table(["target", *_STEP.values()], steps, note=note),
        ]

    def plot(self, result: Result, figure: Figure) -> None:
        """Draw milliseconds of a step by context."""
        axes = figure.subplots()
        for target, figures in result["targets"].items():
            for tokens in result["settings"]["tokens"]:
                steps = [step for step in figures["steps"] if step["tokens"] == tokens]
                label = f"{target}, {tokens} token{'s' if tokens > 1 else ''}"
                axes.plot([step["context"] for step in steps], [step["ms"] for step in steps], marker="o", label=label)
        axes.set(title="one drafting step", xlabel="context (tokens)", ylabel="ms", ylim=(0, None))
        if axes.lines:
            axes.legend()


def measure_target(work: str, request: Mapping[str, Any], figures: dict[str, Any]) -> Generator[None, None, None]:
    """Measure one target into ``figures``, see :func:`run_probe`; yields after each step or answer."""
    answers = []
    with closing(run_probe(work, request)) as parts:
        for part in parts:
            if "step" in part:
                figures["steps"].append(part["step"])
                yield
            elif "answer" in part:
                answers.append(part["answer"])
                figures["energy"] = energy_of(answers)
                yield
            elif work == "answers":
                figures["energy"] = {**figures.get("energy", {}), **part}
            else:
                figures.update(part)


def run_probe(work: str, request: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Measure in a fresh process; yields the parts of the result as they come.

    Close the generator to stop early; the process ends with it.

    Args:
        work: ``"steps"`` (:func:`moa_bench.device_probe.measure_steps`) or ``"answers"``
            (:func:`moa_bench.device_probe.measure_answers`); ``request`` holds the arguments.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moa_bench.device_probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            # Ctrl-C reaches this process, which then ends the other.
            start_new_session=os.name == "posix",
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin as stdin:
                json.dump({"work": work, **request}, stdin)
            for line in process.stdout:
                yield json.loads(line)
            if process.wait():
                log.seek(0)
                last = log.read().decode(errors="replace").strip().splitlines()[-1:]
                yield {"not_run": f"the engine ended its process ({process.returncode}): {''.join(last)}"}
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def energy_of(answers: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return totals over answers, and processor seconds per token; None without tokens to divide by."""
    total = {name: sum(answer[name] for answer in answers) for name in ("committed", "drafted", "cpu_s", "wall_s")}
    total |= {name: rounded(total[name]) for name in ("cpu_s", "wall_s")}
    cpu_s = sum(answer["cpu_s"] for answer in answers)
    per_token = {f"cpu_s_per_{kind}_token": ratio(cpu_s, total[kind], 6) for kind in ("committed", "drafted")}
    return {"answers": len(answers), **total, **per_token}


def _notes(result: Result) -> Iterator[str]:
    for target, figures in result["targets"].items():
        for name, part in ((target, figures), (f"{target} energy", figures.get("energy", {}))):
            if "not_run" in part:
                yield f"{name}: not run: {part['not_run']}"
    if (answers := result["settings"]["answers"]) is not None:
        yield (
            f"CPU time of the client, all threads; answers to {answers['questions']} questions, at most "
            f"{answers['max_new_tokens']} tokens each, draft length {answers['draft_length']}"
        )
