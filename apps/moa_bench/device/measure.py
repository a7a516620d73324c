"""The device benchmark: each of a bundle's targets in processes of its own, first its steps, then whole answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field
from typing import Any

from moa_bench.result import rounded
from moa_bench.verifier import Verifier
from moa_runtime.bundle import Bundle
from moa_runtime.draft_length import DraftLength
from moa_runtime.session.events import Sampling


@dataclass(frozen=True)
class StepSettings:
    """How steps are timed.

    Args:
        threads: processor threads of a step; the runtime's default is 2.
        contexts: cached tokens, and memory rows, of the steps.
        repeats: timed calls of each step.
        profile: the context at which to profile the step, if any.
        tokens: new tokens of the steps: 1 as in a chain, 8 as in a level of a tree. Every token is a query.
    """

    threads: int
    contexts: tuple[int, ...]
    repeats: int
    profile: int | None = None
    tokens: tuple[int, ...] = (1, 8)


@dataclass(frozen=True)
class AnswerSettings:
    """Which answers are written, and how; ``draft_length`` is that of a chain."""

    questions: tuple[str, ...]
    draft_length: DraftLength
    max_new_tokens: int
    sampling: Sampling


@dataclass
class Results:
    """What was measured so far, by target; ready for JSON.

    Attributes:
        seconds: wall time.
    """

    targets: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0


def measure(
    bundle: Bundle,
    steps: StepSettings,
    answers: AnswerSettings | None,
    verifier: Callable[[], AbstractContextManager[Verifier]],
    results: Results,
    on_progress: Callable[[], object] = lambda: None,
) -> None:
    """Measure every target of the bundle into ``results``, also when interrupted.

    Args:
        answers: None leaves them out.
        verifier: opened once the steps are done, which have the machine to themselves.
        on_progress: called after each step's and each answer's figures.

    Raises:
        MoaError: there is no verifier to be had.
    """
    began = time.monotonic()
    try:
        for target in sorted(bundle.manifest.targets):
            figures = results.targets[target] = {}
            _measure_steps(bundle, target, steps, figures, on_progress)
        runnable = {name: figures for name, figures in results.targets.items() if "not_run" not in figures}
        if answers is None or not runnable:
            return
        with verifier() as running:
            for target, figures in runnable.items():
                _measure_answers(bundle, target, steps.threads, answers, running, figures, on_progress)
    finally:
        results.seconds = time.monotonic() - began


def run_probe(work: str, request: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Measure in a fresh process; yields the parts of the result as they come.

    Close the generator to stop early; the process ends with it.

    Args:
        work: ``"steps"`` (:func:`moa_bench.device.steps.measure_steps`) or ``"answers"``
            (:func:`moa_bench.device.answers.measure_answers`); ``request`` holds the arguments.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moa_bench.device.probe"],
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
                said = log.read().decode(errors="replace").strip().splitlines()
                yield {"not_run": f"the engine ended its process ({process.returncode}): {said[-1] if said else ''}"}
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def energy_of(answers: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Totals over answers, and processor seconds per token; None where there is no token to divide by."""
    total = {name: sum(answer[name] for answer in answers) for name in ("committed", "drafted", "cpu_s", "wall_s")}

    def per(tokens: float) -> float | None:
        return rounded(total["cpu_s"] / tokens, 6) if tokens else None

    return {
        "answers": len(answers),
        "committed": total["committed"],
        "drafted": total["drafted"],
        "cpu_s": rounded(total["cpu_s"]),
        "wall_s": rounded(total["wall_s"]),
        "cpu_s_per_committed_token": per(total["committed"]),
        "cpu_s_per_drafted_token": per(total["drafted"]),
    }


def _measure_steps(
    bundle: Bundle, target: str, settings: StepSettings, figures: dict[str, Any], on_progress: Callable[[], object]
) -> None:
    figures["steps"] = []
    request = {"bundle": str(bundle.folder), "target": target, **asdict(settings)}
    with closing(run_probe("steps", request)) as parts:
        for part in parts:
            if "step" in part:
                figures["steps"].append(part["step"])
                on_progress()
            else:
                figures.update(part)


def _measure_answers(
    bundle: Bundle,
    target: str,
    threads: int,
    settings: AnswerSettings,
    verifier: Verifier,
    figures: dict[str, Any],
    on_progress: Callable[[], object],
) -> None:
    endpoint = verifier.endpoint
    request = {"bundle": str(bundle.folder), "target": target, "threads": threads, **asdict(settings)}
    request |= {"url": endpoint.url, "token": endpoint.token}
    answers = []
    with closing(run_probe("answers", request)) as parts:
        for part in parts:
            if "answer" in part:
                answers.append(part["answer"])
                figures["energy"] = energy_of(answers)
                on_progress()
            else:
                figures["energy"] = {**figures.get("energy", {}), **part}
