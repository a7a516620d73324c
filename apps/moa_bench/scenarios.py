"""Scenarios of ``moa-bench simulate``: the runtime's choices of shapes and drafter against the best fixed ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import simpy
from numpy.typing import NDArray

from moa_bench.harness import Conversation, LoopbackVerifier
from moa_bench.recording import RecordedBackend, Recording, replayed_drafter, replayed_target
from moa_bench.result import rounded
from moa_bench.simulated_clock import Clock, Pace
from moa_bench.simulation import Client, Target, Times
from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.draft_controllers import Controller, FixedShape
from moa_runtime.drafting.events import Pushed, RoundEnded
from moa_runtime.options import DRAFTINGS, Drafting
from moa_runtime.session.events import Sampling

#: Tokens of the answers of a scenario.
TOKENS = {"shapes": 400, "placement": 600}
#: Changes that may happen to a scenario half-way.
CHANGES = ("none", "link slower", "link faster", "verifier busy", "verifier free")


def _log_uniform(rng: random.Random, least: float, most: float) -> float:
    return exp(rng.uniform(log(least), log(most)))


def _some_answers(rng: random.Random, lengths: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Draw numbers of answers until they have ``tokens`` tokens together, or all of them."""
    order = rng.sample(range(len(lengths)), len(lengths))
    taken = next((n for n in range(len(order)) if sum(lengths[at] for at in order[:n]) >= tokens), len(order))
    return tuple(order[:taken])


# -- shapes ----------------------------------------------------------------------------------------------

SHAPES = (
    Budget.chain(0, nodes=0),
    *(Budget.chain(levels) for levels in range(17)),
    *(Budget.tree(nodes, 1) for nodes in (2, 4, 8)),
    *(
        Budget.tree(nodes, levels, width)
        for width, sizes in ((2, (4, 8, 16, 32)), (4, (8, 16, 32, 62)), (10, (16, 32, 62)))
        for levels in (2, 3, 4, 6, 8, 12, 16)
        for nodes in sizes
        if levels <= nodes
    ),
)


def kind_of(shape: Budget) -> str:
    """Return ``"nothing"``, ``"copies"``, ``"chain"`` or ``"tree"``."""
    if not shape.nodes:
        return "nothing"
    return "tree" if shape.branches else "chain" if shape.levels else "copies"


def name_of(shape: Budget) -> str:
    """Name a shape for people."""
    kind = kind_of(shape)
    if kind == "tree":
        return f"tree of {shape.nodes} in {shape.levels} levels, {shape.width} wide"
    return f"chain of {shape.levels}" if kind == "chain" else kind


#: The work of rounds as a vector: tokens committed, steps of the drafter and the nodes that they continued (queries),
#: passes of the target and drafted tokens in them (nodes), and drafts with branches.
WORK = ("tokens", "steps", "queries", "passes", "nodes", "branched")
Work = NDArray[np.float64]


def rate(work: Work, pace: Pace) -> float:
    """Return tokens a second."""
    costs = (pace.step_s, pace.query_s, pace.round_trip_s + pace.compute_s(1), pace.token_s)
    return float(work[0] / (work[1:5] @ costs))


class Counting:
    """A controller that counts the work of its rounds, without prompts. Implements
    :class:`moa_runtime.drafting.draft_controllers.Controller`."""

    def __init__(self, controller: Controller) -> None:
        self._controller, self.work = controller, np.zeros(len(WORK))
        self.budget, self.ahead = controller.budget, controller.ahead

    @property
    def token_s(self) -> float:
        return self._controller.token_s

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        if isinstance(outcome, RoundEnded) and not outcome.supplied:
            steps, branched = outcome.steps, outcome.drafted > outcome.depth
            self.work += (outcome.accepted + 1, len(steps), sum(steps), 1, outcome.drafted, branched)
        self._controller.observe(outcome)


def hold(recording: Recording, number: int, controller: Controller, pace: Pace) -> float:
    """Let the device write an answer; returns the seconds from its first token on, at that pace."""
    clock, answer = Clock(pace), recording.answers[number]
    verifier = LoopbackVerifier(replayed_target(recording), pace=pace)
    drafter = replayed_drafter(recording, RecordedBackend(answer))
    try:
        conversation = Conversation(verifier, drafter, recording.fingerprints, recording.stop_tokens, controller, clock)
        conversation.ask(answer.prompt, Sampling(), len(answer.answer))
        began = clock.now()
        while conversation.answering:
            conversation.next_round()
    finally:
        verifier.close()
    return clock.now() - began


def work_of(recording: Recording, number: int, shape: Budget) -> Work:
    """Return the work for an answer with drafts of one shape, whose rounds do not depend on time."""
    counting = Counting(FixedShape(shape))
    hold(recording, number, counting, Pace(0.0, 0.0, 0.0, 0.0, 0.0))
    return counting.work


class Field:
    """The fixed shapes, with their work for every answer."""

    def __init__(self, recording: Recording, shapes: Sequence[Budget] = SHAPES) -> None:
        self._recording = recording
        self._works = {
            shape: [work_of(recording, at, shape) for at in range(len(recording.answers))] for shape in shapes
        }

    def run(self, scenario: tuple[Pace, tuple[int, ...]]) -> dict[str, Any]:
        """Compare a new controller with all fixed shapes on the answers of a scenario; plain figures for JSON."""
        pace, answers = scenario
        rates = {shape: rate(sum(works[at] for at in answers), pace) for shape, works in self._works.items()}
        best = max(rates, key=rates.__getitem__)
        counting = Counting(CostModel())
        seconds = sum(hold(self._recording, at, counting, pace) for at in answers)
        work = dict(zip(WORK, counting.work.tolist(), strict=True))
        ms, chosen = pace.in_ms(), work["tokens"] / seconds
        means = {name: rounded(work[name] / work["passes"]) for name in ("tokens", "steps", "nodes", "branched")}
        return {
            "ms": {**ms, "trip": ms.pop("round_trip")},
            "answers": answers,
            "best": name_of(best),
            "kind": kind_of(best),
            "best_rate": rounded(rates[best]),
            "rate": rounded(chosen),
            "share": rounded(chosen / rates[best]),
            "means": {"tau": means.pop("tokens"), **means},
        }


def draw_shapes(count: int, seed: int, lengths: Sequence[int]) -> Iterator[tuple[Pace, tuple[int, ...]]]:
    """Draw paces and answers: a device's step takes 1 to 40 ms and each node that it continues 0.03 to 0.5 of that, a
    pass of the target 5 to 300 ms and each token 0.0002 to 0.15 of that, a round trip up to 400 ms. All are
    log-uniform, the round trip from 1 ms on, less that millisecond."""
    rng = random.Random(seed)
    for _ in range(count):
        step_s, pass_s = _log_uniform(rng, 0.001, 0.04), _log_uniform(rng, 0.005, 0.3)
        query_s, token_s = step_s * _log_uniform(rng, 0.03, 0.5), pass_s * _log_uniform(rng, 0.0002, 0.15)
        pace = Pace(step_s, query_s, pass_s, token_s, _log_uniform(rng, 0.001, 0.401) - 0.001)
        yield pace, _some_answers(rng, lengths, TOKENS["shapes"])


# -- placement -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """A scenario: times before and after ``change``, which happens half-way, and answers by number."""

    seed: int
    before: Times
    after: Times
    change: str
    answers: tuple[int, ...]


def draw_placements(count: int, seed: int, lengths: Sequence[int]) -> Iterator[Placement]:
    """Draw scenarios; all times are log-uniform. A device's step takes 0.5 to 20 ms and each node that it continues
    0.03 to 0.3 of that; a pass of the target 3 to 60 ms, each token 0.0002 to 0.1 of that; the server's own step 0.03
    to 0.4 of a pass, in two of three scenarios; a round trip 1 to 300 ms. One of three verifiers is busy, and lets
    every pass wait for one to four others; in two of five scenarios link or verifier change."""
    rng = random.Random(seed)
    for number in range(count):
        step_s, pass_s = _log_uniform(rng, 0.0005, 0.02), _log_uniform(rng, 0.003, 0.06)
        server_step_s = pass_s * _log_uniform(rng, 0.03, 0.4) if rng.random() < 2 / 3 else None
        times = Times(
            step_s=step_s,
            query_s=step_s * _log_uniform(rng, 0.03, 0.3),
            server_step_s=server_step_s,
            server_query_s=(server_step_s or 0.0) * _log_uniform(rng, 0.03, 0.3),
            pass_s=pass_s,
            token_s=pass_s * _log_uniform(rng, 0.0002, 0.1),
            queue_s=pass_s * rng.uniform(1, 4) if rng.random() < 1 / 3 else 0.0,
            trip_s=_log_uniform(rng, 0.001, 0.3),
            jitter=rng.uniform(0, 0.5),
        )
        change = rng.choice(CHANGES[1:]) if rng.random() < 0.4 else CHANGES[0]
        factor = _log_uniform(rng, 2, 20)
        after = {
            "none": times,
            "link slower": replace(times, trip_s=min(0.3, times.trip_s * factor)),
            "link faster": replace(times, trip_s=max(0.001, times.trip_s / factor)),
            "verifier busy": replace(times, queue_s=times.queue_s + pass_s * rng.uniform(1, 4)),
            "verifier free": replace(times, queue_s=0.0),
        }[change]
        yield Placement(number + seed, times, after, change, _some_answers(rng, lengths, TOKENS["placement"]))


class Held(NamedTuple):
    """A conversation: seconds from each answer's first token to its last, tokens without those first ones, the text of
    all answers, and the share of tokens that the server wrote without being asked."""

    seconds: float
    tokens: int
    text: tuple[int, ...]
    pushed: float


def hold_placement(recording: Recording, scenario: Placement, drafting: Drafting) -> Held:
    """Have a scenario's answers written, one conversation after the other over one connection."""
    answers = [recording.answers[at] for at in scenario.answers]
    half = sum(len(answer.answer) for answer in answers) // 2
    env = simpy.Environment()

    def times() -> Times:
        return scenario.before if len(client.text) < half else scenario.after

    client: Any = SimpleNamespace(text=[])  # until there is one
    client = Client(env, Target(env, recording, times), recording, times, drafting, scenario.seed)
    env.run(env.process(client.answer(answers)))
    seconds = sum(record.bursts[-1].at - record.bursts[0].at for record in client.records)
    tokens = len(client.text) - len(answers)
    return Held(seconds, tokens, tuple(client.text), client.pushed / max(1, tokens))


def compare_placements(recording: Recording, scenario: Placement) -> dict[str, Any]:
    """Hold a scenario with auto, the device alone and the server alone; plain figures for JSON.

    Raises:
        AssertionError: they wrote different texts.
    """
    held: Mapping[Drafting, Held] = {drafting: hold_placement(recording, scenario, drafting) for drafting in DRAFTINGS}
    assert len({each.text for each in held.values()}) == 1, "whoever drafts, the text is the target's"
    best = min(("device", "server"), key=lambda drafting: held[drafting].seconds)
    return {
        "change": scenario.change,
        "answers": scenario.answers,
        "ms": scenario.before.in_ms(),
        "later_ms": scenario.after.in_ms(),
        "ms_per_token": {drafting: rounded(1000 * each.seconds / each.tokens) for drafting, each in held.items()},
        "best": best,
        "kind": best if scenario.change == "none" else f"{best}, {scenario.change}",
        "ratio": rounded(held["auto"].seconds / held[best].seconds),
        "means": {"by the server": rounded(held["auto"].pushed)},
    }
