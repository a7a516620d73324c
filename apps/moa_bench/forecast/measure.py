"""Measures on this machine what the simulation must be told of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moa_bench.device.steps import RandomInputs
from moa_bench.forecast.answers import Question
from moa_bench.forecast.read import check_counts, check_numbers, read_as
from moa_bench.forecast.times import DrafterTimes, StepTimes, TimedStep, Times
from moa_runtime.backends.base import Backend, StepInputs
from moa_runtime.bundle import Manifest
from moa_runtime.errors import MoaError
from moa_server.engine.base import Engine
from moa_server.engine.warm_up import Trial
from moa_server.scheduling.scheduler import MOST_SEQUENCES
from moa_server.scheduling.step_cost import StepCost

_SEQUENCES, _CONTEXTS, _DRAFTED = (1, 4, 16), (64, 320), (0, 3, 7)
_DRAFTING, _NODES, _BEHIND = (1, 4, 8), (1, 4, 10), 300
_REPEATS = 7
#: Steps of the target, of its drafter and of the device that are timed, for a progress bar.
TIMED = 2 * len(_SEQUENCES) * (len(_CONTEXTS) * len(_DRAFTED) + 1) + len(_DRAFTING) * len(_NODES) + len(_NODES)

RunSteps = Callable[[Sequence[StepInputs]], object]


@dataclass(frozen=True)
class Measured:
    """A machine, and what a target answers to questions.

    Attributes:
        times: without what the verifier does for a verdict, which only a running one shows.
        errors: how much longer each step takes by ``times`` than it took, as a share.
    """

    times: Times
    errors: list[float]
    questions: list[Question]

    def write(self, path: Path, about: dict[str, Any]) -> None:
        """Raises MoaError: the file cannot be written."""
        questions = [asdict(question) for question in self.questions]
        whole = {**about, "times": asdict(self.times), "errors": self.errors, "questions": questions}
        try:
            path.write_text(json.dumps(whole, indent=1) + "\n")
        except OSError as error:
            raise MoaError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Raises MoaError: no such file, or none of this kind."""
        return read_as(path, cls._of, "holds no measured times: expected what moa-bench forecast --measure wrote")

    @classmethod
    def _of(cls, raw: dict[str, Any]) -> Measured:
        """Raises ValueError, KeyError or TypeError: these are none."""
        times = dict(raw["times"])
        times["target"] = StepTimes(**times["target"])
        for name in ("server_drafter", "device"):
            times[name] = DrafterTimes(**times[name])
        questions = [Question(**question) for question in raw["questions"]]
        measured = cls(Times(**times), raw["errors"], questions)
        found = measured.times
        for part in (found.target, found.server_drafter, found.device):
            check_numbers(list(vars(part).values()))
        check_numbers([found.row_s, found.verdict_s])
        check_counts([found.most_sequences, found.cache_tokens], least=1)
        for question in questions:
            check_counts(list(vars(question).values()))
        if not questions:
            raise ValueError
        return measured


def measured_times(
    engine: Engine, server_steps: RunSteps, device: Backend, manifest: Manifest, on_timed: Callable[[], None]
) -> tuple[Times, list[float]]:
    """Time steps of the target with and without memory rows, of its drafter and of the device's; about a minute for
    the default target.

    Args:
        server_steps: runs the drafter beside the target, see :class:`torch_backend.PackedDeviceHalf`.
        on_timed: called for each step that is timed.
    """
    (rounds, prompts), (_, with_rows) = (asyncio.run(_target_steps(engine, rows, on_timed)) for rows in (False, True))
    target = StepTimes.fit([*rounds, *prompts])
    inputs = RandomInputs(manifest, _BEHIND)
    server = _drafter_times(
        [
            (count * nodes, _least(lambda c=count, n=nodes: server_steps([inputs.of(_BEHIND, n)] * c), on_timed))
            for count, nodes in itertools.product(_DRAFTING, _NODES)
        ]
    )
    own = _drafter_times(
        [(nodes, _least(lambda n=nodes: device.step(inputs.of(_BEHIND, n)), on_timed)) for nodes in _NODES]
    )
    times = Times(target, server, own, _row_s(prompts, with_rows), 0.0, MOST_SEQUENCES, engine.cache_use[1])
    return times, [round(error, 4) for error in target.errors([*rounds, *prompts])]


class _Noting(StepCost):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[TimedStep] = []

    def observe(self, tokens: int, products: int, contexts: int, seconds: float) -> None:
        self._steps.append(TimedStep(tokens, products, contexts, seconds))

    def quickest(self) -> TimedStep:
        """Of those since the last call."""
        steps, self._steps = self._steps, []
        return min(steps, key=lambda step: step.seconds)


async def _target_steps(
    engine: Engine, rows: bool, on_timed: Callable[[], None]
) -> tuple[list[TimedStep], list[TimedStep]]:
    """Rounds and pieces of prompts: of each kind the quickest of some."""
    rounds: list[TimedStep] = []
    prompts: list[TimedStep] = []
    for count in _SEQUENCES:
        noted = _Noting()
        with Trial(engine, noted, rows=rows) as trial:
            sequences = [trial.open() for _ in range(count)]
            for more in (_CONTEXTS[0], _CONTEXTS[1] - _CONTEXTS[0]):
                for sequence in sequences:
                    await trial.prefill(sequence, more)
                prompts.append(noted.quickest())
                for drafted in _DRAFTED:
                    for _ in range(_REPEATS):
                        await trial.verify(sequences, drafted)
                    rounds.append(noted.quickest())
                    on_timed()
        on_timed()
    return rounds, prompts


def _row_s(plain: Sequence[TimedStep], with_rows: Sequence[TimedStep]) -> float:
    """Of prompts, which make most of them at once."""
    more_s = sum(b.seconds - a.seconds for a, b in zip(plain, with_rows, strict=True))
    return max(0.0, more_s / sum(step.tokens for step in plain))


def _least(run: Callable[[], object], on_timed: Callable[[], None]) -> float:
    """Seconds of the quickest call, the first one left out: other programs only make calls longer."""
    seconds = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    on_timed()
    return min(seconds[1:])


def _drafter_times(points: Sequence[tuple[int, float]]) -> DrafterTimes:
    """A line through seconds by nodes, by least squares; neither part is negative."""
    nodes, seconds = np.array(points).T
    slope = float(np.cov(nodes, seconds, bias=True)[0, 1] / np.var(nodes))
    slope = max(0.0, slope)
    return DrafterTimes(max(0.0, float(seconds.mean() - slope * nodes.mean())), slope)
