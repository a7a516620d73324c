"""Warming up and ``--doctor``: true about steps, tidy afterwards, and the same through every engine."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from moa_server.cli import main
from moa_server.doctor import (
    DraftingWorth,
    Facts,
    Machine,
    SessionCapacity,
    StepTiming,
    advice,
    measure,
    measure_drafting,
    sessions,
)
from moa_server.engine.base import Capabilities
from moa_server.engine.load import warm_up
from moa_server.scheduling.step_cost import StepCost
from support.server.running import after_steps
from support.toy_engine import ToyEngine

FACTS = Facts("float32", "cpu", "onnx", True, 1 << 30, descriptors=1024, connections=896, max_sessions=64)
MACHINE = Machine(cores=2, threads=2, gpu="", bfloat16=True, resident_bytes=1 << 30)


class Clocked(ToyEngine):
    """A toy whose steps take time on a clock of its own: ``a + b * tokens``, and for memory rows a little more."""

    def __init__(self, a: float, b: float, **options) -> None:
        super().__init__(**options)
        self.now, self._a, self._b = 0.0, a, b

    async def step(self, requests):
        new = 0
        for request in requests:
            held = self.held(request.sequence, request.prefix)
            new += max(0 if request.sampling is None else 1, len(request.prefix) - held) + len(request.draft)
        outcomes = await super().step(requests)
        rows = sum(len(outcome.rows.keys) for outcome in outcomes if outcome.rows is not None)
        self.now += self._a + self._b * new + (0.2 * self._a + 0.1 * self._b * rows if rows else 0.0)
        return outcomes


# -- warming up -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), [(0.04, 0.003), (0.004, 0.0001), (1.0, 0.2)])
def test_warming_up_teaches_what_steps_take(a, b):
    engine, cost = Clocked(a, b), StepCost()
    asyncio.run(warm_up(engine, cost, lambda: engine.now))
    assert cost.memory_seconds(8) == pytest.approx(0.2 * a + 8 * 0.1 * b)
    for tokens in (1, 16, 64):
        assert cost.seconds(tokens, tokens * 128, 128, 1) == pytest.approx(a + b * tokens, rel=0.35)
    assert engine.sequences_open == 0


@pytest.mark.parametrize("max_context", [2, 3, 20, 64, 100, 300])
@pytest.mark.parametrize("most_drafted", [0, 1, 1024])
def test_warming_up_keeps_to_the_engines_limits(max_context, most_drafted):
    engine = ToyEngine(max_context=max_context, capabilities=Capabilities(False, most_drafted), preempts=0.1)
    asyncio.run(warm_up(engine, StepCost()))
    longest = max(len(request.prefix) + len(request.draft) for step in engine.steps for request in step)
    assert 1 <= longest <= max_context and engine.sequences_open == 0
    itself = ToyEngine(capabilities=Capabilities(schedules_itself=True))
    asyncio.run(warm_up(itself, StepCost()))
    assert not itself.steps


# -- the doctor -----------------------------------------------------------------------------------


def timed(one: float, sixteen: float, eight_sequences: float, slowest: float = 1.0) -> list[StepTiming]:
    """Make timings of steps, the slowest of which took ``slowest`` times the median."""
    steps = [
        ("1 token", 1, 1, 512, one),
        ("16 tokens", 1, 16, 512, sixteen),
        ("short", 1, 1, 64, one),
        ("8 sequences", 8, 1, 64, eight_sequences),
        ("prefill", 1, 256, 0, 1.0),
    ]
    return [StepTiming(*step, slowest * step[-1]) for step in steps]


def test_sessions_are_those_that_fit_into_the_rate():
    # 40 ms, and 5 for each further sequence: 13 sessions take 100 ms. A drafted token takes 3: with 8 of them for each
    # session 9 take 40 + 8 * 5 + 72 * 3 = 296 of the 300 ms in which three tokens must be committed.
    assert sessions(timed(0.04, 0.085, 0.0751), 64) == SessionCapacity(12, 9)
    assert sessions(timed(0.04, 0.085, 0.0749), 64) == SessionCapacity(13, 9)
    assert sessions(timed(0.04, 0.085, 0.0749), 5) == SessionCapacity(5, 5)
    assert sessions(timed(0.2, 0.2, 0.2), 64) == SessionCapacity(0, 64)
    assert sessions(timed(0.5, 1.0, 1.0), 64) == SessionCapacity(0, 0)
    # More sequences take several steps.
    assert sessions(timed(0.04, 0.04, 0.04), 1000) == SessionCapacity(128, 448)
    # Noise makes nothing cheaper than nothing.
    assert sessions(timed(0.04, 0.03, 0.03), 64) == SessionCapacity(64, 64)


@pytest.mark.parametrize("engine", [ToyEngine(), ToyEngine(max_context=40), ToyEngine(vocab_size=9)])
def test_steps_are_measured_and_leave_nothing(engine):
    found = asyncio.run(measure(engine))
    sizes = [(step.sequences, step.tokens) for step in found]
    assert sizes == [(1, 1), (1, 4), (1, 8), (1, 16), (1, 1), (8, 1), (1, min(256, engine.max_context))]
    assert all(step.seconds > 0 for step in found) and engine.sequences_open == 0
    requests = [request for step in engine.steps for request in step]
    assert max(len(request.prefix) + len(request.draft) for request in requests) <= engine.max_context
    # Sequences share no text: an engine that finds what it has computed before would seem too fast.
    firsts = {request.sequence: request.prefix[0] for request in requests}
    assert engine.vocab_size < 10 or len(set(firsts.values())) == len(firsts) > 8
    itself = asyncio.run(measure(ToyEngine(capabilities=Capabilities(False, 0, schedules_itself=True))))
    assert {step.tokens for step in itself} == {1, 256} and sessions(itself, 64).streaming > 0  # without drafts


@pytest.mark.parametrize(
    ("engine", "most"),
    [(ToyEngine(), 32), (ToyEngine(max_context=3), 0), (ToyEngine(capabilities=Capabilities(False, 0)), 0)],
)
def test_what_drafting_is_worth_is_measured_by_sessions(engine, most):
    found = asyncio.run(measure_drafting(engine))
    assert [each.sessions for each in found] == [count for count in (1, 2, 4, 8, 16, 32) if count <= most]
    assert engine.sequences_open == 0


def test_a_draft_is_worth_what_it_brings_for_its_time():
    # 8 sessions: 1.6 tokens in 1.2 times the time, 1.96 in 1.5 times, 2.3056 in twice the time
    worth = DraftingWorth.of(8, {0: 0.1, 1: 0.12, 2: 0.15, 4: 0.2})
    assert (worth.length, worth.gain) == (1, pytest.approx(1.6 / 1.2))
    assert (worth.drafted_seconds, worth.pays_from) == (pytest.approx(0.0025), pytest.approx(0.2))
    assert DraftingWorth.of(8, {0: 0.1, 1: 0.17}).length == 0 and DraftingWorth.of(1, {0: 0.2, 1: 0.1}).pays_from == 0
    # A disturbed short step: two tokens took 0.1, so one takes no longer.
    assert DraftingWorth.of(1, {0: 0.3, 1: 0.2, 2: 0.1}).gain == pytest.approx(1 + 0.6 + 0.36)


def test_advice():
    def given(facts=FACTS, machine=MACHINE, able=SessionCapacity(1, 1), slowest=1.5):  # noqa: B008 (frozen)
        return advice(facts, machine, timed(0.04, 0.05, 0.06, slowest), able)

    assert not given()
    assert "--device" in given(machine=Machine(2, 2, "a GPU", None, None))[0]
    assert "--threads 2" in given(machine=Machine(2, 8, "", None, None))[0]
    assert len(given(able=SessionCapacity(0, 0))) == 1
    assert "--doctor again" in given(slowest=2.5)[0]


def test_the_program(capsys, monkeypatch, tiny_target, tiny_drafter):
    def refuse(*arguments):
        raise AssertionError("the doctor listens on nothing")

    monkeypatch.setattr("moa_server.cli.listen", refuse)
    options = ["--doctor", "--model", str(tiny_target), "--drafter", str(tiny_drafter), "--host", "0.0.0.0"]
    assert main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "float32" and found["device"] == "cpu" and found["max_context"] == 512
    assert found["target_pass"] == "onnx"
    # keys and values of 4 layers, 2 heads, 16 numbers of 4 bytes
    assert found["cache_bytes"] == 2 * 4 * 2 * 16 * 4 * found["cache_tokens"]
    assert found["sessions"]["streaming"] > 0 and len(found["steps"]) == 7
    assert main(options) == 0
    out, err = capsys.readouterr()
    assert len(steps_in(err)) == 3
    assert "by the pass onnx" in out and "streaming" in out and "rounding" not in out and "draft at 0.6" in out
    assert main([*options, "--dtype", "int8", "--accept-rounding", "--log-format", "json"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^rounding +perplexity \d\.\d{3} times", out, re.MULTILINE) and not steps_in(err)


def steps_in(err: str) -> list[str]:
    """Titles of the steps that are said; a long one is said again and again."""
    return list(dict.fromkeys(re.findall(r"(?m)^moa-serve: ([\w ]+) \(\d+ s gone\)$", err)))


def test_a_target_that_is_unknown_or_fails_at_once_is_not_served(capsys, monkeypatch, tiny_target):
    assert main(["--doctor", "--model", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err

    async def fail(engine, requests):
        raise RuntimeError("no memory is left")

    monkeypatch.setattr("moa_server.engine.engine.LocalEngine.step", fail)
    assert main(["--model", str(tiny_target), "--port", "0"]) == 2
    out, err = capsys.readouterr()
    assert len(steps_in(err)) == 2
    assert out == "" and after_steps(err).count("\n") == 1 and "RuntimeError: no memory is left  [engine_failed]" in err
