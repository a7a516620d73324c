"""Published figures and assumptions that a forecast goes by; ``hardware.json`` and ``demand.json`` say whose."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from moa_bench.forecast.answers import Question
from moa_bench.forecast.times import DrafterTimes, StepTimes, TimedStep, Times, least_squares
from moa_bench.forecast.validate import Observed
from moa_bench.link.profiles import get_profile
from moa_runtime.errors import MoaError

#: Sessions at once that a GPU's serving figures are fitted to; the others are compared.
FIT_TO = (1, 25)
_SERVING_S = 30.0


@dataclass(frozen=True)
class Range:
    """A figure nobody knows exactly. ``high`` and ``low`` are those of the cost or not, as ``said`` tells."""

    low: float
    base: float
    high: float
    said: str = ""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, with the figures that were published of it.

    Attributes:
        steps: of whole batches.
        serving: the same as a server gives its clients, streaming.
        prompt: tokens of each prompt in ``serving``.
        rows: what a memory row takes of the time of a token of a prompt.
        price: US dollars an hour.
    """

    name: str
    title: str
    steps: list[TimedStep]
    serving: Observed
    prompt: int
    rows: float
    price: Range
    drafter: DrafterTimes
    cache_tokens: int
    most_sequences: int

    def times(self, device_ms: float) -> Times:
        """Steps as in whole batches, so many times as long that they agree with two of the serving figures.

        Args:
            device_ms: a step of the device's drafter; a tenth of it for each node that it continues.
        """
        target = StepTimes.fit(self.steps)
        rows = [
            (_steady_s(target, clients, self.prompt, self.serving.most_tokens) / seconds, clients / seconds)
            for clients in FIT_TO
            for seconds in (self.serving.loads[clients, "stream"]["ms_per_token"]["mean"] / 1000,)
        ]
        factor, verdict_s = least_squares(np.array(rows))
        target = target.times(factor)
        device = DrafterTimes(device_ms / 1000, device_ms / 10_000)
        return Times(
            target,
            self.drafter,
            device,
            self.rows * target.token_s,
            verdict_s,
            self.most_sequences,
            self.cache_tokens,
            learns=False,
        )


@dataclass(frozen=True)
class Demand:
    """What users ask for.

    Attributes:
        prompts, answers: tokens, each as likely as any other.
        links: round trips in seconds, with the share of users that have them.
        tau: of the largest drafts; its ``high`` is what was measured.
        device_ms: see :meth:`Gpu.times`.
    """

    prompts: list[int]
    answers: list[int]
    links: list[tuple[float, float]]
    answers_per_user: Range
    peak: Range
    tau: Range
    device_ms: Range

    def question(self, rng: random.Random) -> Question:
        """One of them."""
        return Question(rng.choice(self.prompts), rng.choice(self.answers))

    def trip(self, rng: random.Random) -> float:
        """A user's round trip, seconds."""
        return rng.choices([trip for trip, _ in self.links], [share for _, share in self.links])[0]


def gpu(name: str) -> Gpu:
    """The GPU called so. Raises MoaError: no figures of it."""
    gpus = hardware()["gpus"]
    if name not in gpus:
        raise MoaError(f"there are no figures of the hardware {name!r}; choose one of {', '.join(gpus)}")
    raw = gpus[name]
    step, query = raw["drafter_ms"]["step"] / 1000, raw["drafter_ms"]["query"] / 1000
    price = Range(*(raw["price"][key] for key in ("low", "base", "high")))
    return Gpu(
        name,
        raw["title"],
        [step for row in raw["steps"]["rows"] for step in _steps(*row)],
        _serving(raw["serving"]),
        raw["serving"]["prompt"],
        raw["rows"],
        price,
        DrafterTimes(step, query),
        raw["cache_tokens"],
        raw["most_sequences"],
    )


def demand(measured_tau: float) -> Demand:
    """What is assumed of users.

    Args:
        measured_tau: of the drafts at hand; no other is higher.
    """
    raw = assumptions()
    ranges = {name: Range(**each) for name, each in raw["ranges"].items()}
    tau = ranges["tau"]
    ranges["tau"] = Range(min(tau.low, measured_tau), min(tau.base, measured_tau), measured_tau, tau.said)
    links = [(get_profile(name).round_trip_ms / 1000, share) for name, share in raw["links"].items()]
    return Demand(raw["prompt_tokens"], raw["answer_tokens"], links, **ranges)


@cache
def hardware() -> dict[str, Any]:
    """All of ``hardware.json``."""
    return _read("hardware.json")


@cache
def assumptions() -> dict[str, Any]:
    """All of ``demand.json``."""
    return _read("demand.json")


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text())
    return found


def _steps(sequences: int, prompt: int, answer: int, first_ms: float, token_ms: float) -> list[TimedStep]:
    """A whole batch: its prompts in one step, and one of its tokens half-way through the answers."""
    tokens, context = sequences * prompt, prompt + answer // 2
    return [
        TimedStep(tokens, tokens * prompt, tokens, first_ms / 1000),
        TimedStep(sequences, sequences * context, sequences * context, token_ms / 1000),
    ]


def _serving(raw: dict[str, Any]) -> Observed:
    loads = {
        (clients, "stream"): {"tokens_per_s": tokens_per_s, "ms_per_token": {"mean": token_ms}}
        for clients, token_ms, tokens_per_s in raw["rows"]
    }
    return Observed(loads, _SERVING_S, raw["answer"])


def _steady_s(target: StepTimes, clients: int, prompt: int, answer: int) -> float:
    """A step that gives each of so many streams a token, and reads as much of new prompts as comes with each."""
    context, read = prompt + answer // 2, clients * prompt / answer
    return target.seconds(clients, clients * context, clients * context) + read * target.token_s
