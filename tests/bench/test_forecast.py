"""The forecast: queues with a known answer, tokens that are all there, what is fitted, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy

from bench.forecast_toy import CHAIN, DRAFTS, NOTHING, TIMES, TREE
from bench.recorded_toy import toy_recording
from moa_bench.cli import main
from moa_bench.forecast.answers import Client, Question, Verifier
from moa_bench.forecast.drafts import Drafts, Shape
from moa_bench.forecast.recorded import SHAPES, drafts_of
from moa_bench.forecast.replica import Replica
from moa_bench.forecast.times import DrafterTimes, StepTimes, TimedStep, Times
from moa_bench.forecast.validate import Factors, Observed, Validation, summary
from moa_bench.forecast.window import closed, opened
from moa_bench.server import MODES
from moa_bench.server.figures import figures_of
from moa_bench.server.measure import Load as Measured
from moa_runtime.drafters.base import Prices
from moa_runtime.drafting.cost_model import Throughput
from moa_runtime.drafting.events import Pushed, RoundEnded
from moa_runtime.errors import MoaError
from moa_runtime.session.tree import walk

# -- what steps take -------------------------------------------------------------------------------


def test_the_parts_of_a_step_are_found_again() -> None:
    true = StepTimes(0.03, 0.002, 1e-6, 3e-6)
    sizes = [(1, 100, 100), (8, 800, 100), (16, 800, 800), (256, 65536, 256), (64, 64, 64), (4, 4000, 4000)]
    steps = [TimedStep(*size, true.seconds(*size)) for size in sizes]
    found = StepTimes.fit(steps)
    assert (found.pass_s, found.token_s) == pytest.approx((true.pass_s, true.token_s))
    assert (found.product_s, found.context_s) == pytest.approx((true.product_s, true.context_s))
    assert np.abs(found.errors(steps)).max() < 1e-6


def test_no_part_of_a_step_is_negative() -> None:
    steps = [TimedStep(n, n * c, c, 0.05 - 1e-5 * c) for n in (1, 2, 8) for c in (10, 500)]
    found = StepTimes.fit(steps)
    assert min(found.pass_s, found.token_s, found.product_s, found.context_s) >= 0.0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(MoaError, match="at least four kinds"):
        StepTimes.fit([TimedStep(n, n, n, 0.01) for n in range(1, 9)])


# -- drafts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_tree_has_its_size_and_accepts_what_it_should(shape: Shape) -> None:
    for accepted in range(shape.depth + 1):
        tree = shape.tree(accepted)
        path, _ = walk(tree.tokens, tree.parents, lambda node: 0)
        assert (len(tree.tokens), tree.depth, len(path)) == (shape.nodes, shape.depth, accepted)


def test_tau_is_the_mean_of_what_is_drawn() -> None:
    rng = random.Random(0)
    drawn = [1 + TREE.draw("all", rng) for _ in range(4000)]
    assert TREE.tau("all") == pytest.approx(2.5) and np.mean(drawn) == pytest.approx(2.5, abs=0.06)


def test_a_draft_is_chosen_by_what_its_parts_cost() -> None:
    assert DRAFTS.chosen(Prices(), 8, "all") is TREE
    assert DRAFTS.chosen(Prices(node=0.12), 8, "all") is CHAIN
    assert DRAFTS.chosen(Prices(step=2.0), 8, "all") is NOTHING
    assert DRAFTS.chosen(Prices(), 0, "all") is NOTHING


def test_a_weaker_drafter_has_the_tau_it_is_said_to_have() -> None:
    weaker = DRAFTS.weaker(1.8)
    assert weaker.tau(weaker.shapes[-1]) == pytest.approx(1.8, abs=1e-4)
    assert weaker.tau(weaker.shapes[1]) < DRAFTS.tau(CHAIN) and weaker.tau(weaker.shapes[0]) == 1.0
    for shape, fewer in zip(DRAFTS.shapes, weaker.shapes, strict=True):
        assert sum(fewer.accepted["all"]) == pytest.approx(sum(shape.accepted["all"]))
    with pytest.raises(MoaError, match="at most 2"):
        DRAFTS.weaker(3.0)


def test_drafts_of_a_recording_and_their_file(tmp_path: Path) -> None:
    recording = toy_recording(40)
    tasks = {(3, 1, 4, 1): "first", (3, 1, 4, 5): "second"}
    drafts = drafts_of(recording, tasks)
    assert len(drafts.shapes) == len(SHAPES) and set(drafts.tasks) == {"first", "second"}
    taus = [drafts.tau(shape) for shape in drafts.shapes]
    assert taus[0] == 1.0 and taus[-1] == max(taus) > 1.5
    rounds = drafts.shapes[0].accepted
    assert sum(map(sum, rounds.values())) == sum(recording.lengths)  # a round a token where nothing is drafted
    path = tmp_path / "drafts.json"
    path.write_text(json.dumps(drafts.as_dict()))
    assert Drafts.read(path) == Drafts.read(path) and Drafts.read(path).tasks == drafts.tasks
    with pytest.raises(MoaError, match="other questions"):
        drafts_of(recording, {(1, 2): "qa"})


# -- one replica -----------------------------------------------------------------------------------


def test_a_queue_waits_as_long_as_the_formula_says() -> None:
    """M/D/1: one-token prompts and answers of one token each, one a step; Pollaczek and Khinchine's mean wait."""
    step_s, load = 0.01, 0.7
    times = Times(StepTimes(step_s, 0.0, 0.0, 0.0), DrafterTimes(0, 0), DrafterTimes(0, 0), 0.0, 0.0, 1, 1 << 20)
    one = lambda rng: Question(1, 1)  # noqa: E731
    found = opened(times, DRAFTS, one, lambda rng: 0.0, "stream", load / step_s, 200.0, 0)
    expected_ms = 1000 * (step_s + step_s * load / (2 * (1 - load)))
    assert found.ttft_ms["mean"] == pytest.approx(expected_ms, rel=0.06)
    assert found.busy == pytest.approx(load, rel=0.05)


def test_answers_under_way_are_rate_times_time() -> None:
    """Little's law."""
    found = opened(TIMES, DRAFTS, lambda rng: Question(20, 30), lambda rng: 0.0, "stream", 0.8, 120.0, 1)
    ttft_s, token_s = found.ttft_ms["mean"], found.ms_per_token["mean"]
    assert ttft_s is not None and token_s is not None
    lasts_s = (ttft_s + 29 * token_s) / 1000
    assert found.at_once == pytest.approx(found.answers / 120.0 * lasts_s, rel=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_every_answer_gets_its_tokens_once(mode: str) -> None:
    env = simpy.Environment()
    verifier = Verifier(Replica(env, TIMES))
    records: list[Any] = []
    clients = [Client(env, verifier, DRAFTS, TIMES, mode, 0.01, random.Random(seed)) for seed in range(5)]
    for number, client in enumerate(clients):
        env.process(client.answer(Question(30 + number, 40 + number), records.append))
    env.run()
    assert sorted(sum(burst.tokens for burst in record.bursts) for record in records) == [40, 41, 42, 43, 44]
    for record in records:
        arrivals = [burst.at for burst in record.bursts]
        assert arrivals == sorted(arrivals) and arrivals[0] > record.asked_at
    assert not verifier.trips and not verifier.replica._held


def test_streaming_takes_a_step_a_token() -> None:
    window = closed(TIMES, DRAFTS, [Question(10, 100)], "stream", 1, 10.0, 0)
    figures = figures_of({Measured(1, "stream"): [window]}, 10.0, 1)["sessions"]["1"]["stream"]
    assert figures["ms_per_token"]["mean"] == pytest.approx(1000 * (0.02 + 0.001 + 0.001))
    assert figures["passes_per_token"] == pytest.approx(1.0, abs=0.02)


def test_a_device_far_away_is_slower_than_the_server_and_auto_knows() -> None:
    def ms(mode: str, trip_s: float) -> float:
        window = closed(TIMES, DRAFTS, [Question(10, 200)], mode, 1, 60.0, 0, trip_s)
        figures = figures_of({Measured(1, mode): [window]}, 60.0, 1)["sessions"]["1"][mode]
        return float(figures["ms_per_token"]["mean"])

    assert ms("device", 0.3) > 2 * ms("server", 0.3)
    assert ms("auto", 0.3) == pytest.approx(ms("server", 0.3), rel=0.05)
    assert ms("auto", 0.0) < 1.1 * min(ms("device", 0.0), ms("server", 0.0)) < ms("stream", 0.0)


@pytest.mark.parametrize("mode", ["device", "server", "auto"])
def test_controllers_hear_how_many_share_the_target(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: set[int] = set()
    observe = Throughput.observe

    def listen(self: Throughput, outcome: RoundEnded | Pushed) -> None:
        heard.add(outcome.sharing)
        observe(self, outcome)

    monkeypatch.setattr(Throughput, "observe", listen)
    closed(TIMES, DRAFTS, [Question(10, 50)], mode, 3, 5.0, 0)
    assert max(heard) == 3


# -- validation ------------------------------------------------------------------------------------


def observed(times: Times, sessions: tuple[int, ...] = (1, 2, 4)) -> Observed:
    """What the benchmark would have said of a machine with these times."""
    loads: dict[tuple[int, str], Any] = {}
    for count in sessions:
        for mode in ("stream", "server"):
            windows = [closed(times, DRAFTS, [Question(20, 30)], mode, count, 5.0, seed) for seed in (7, 8)]
            figures = figures_of({Measured(count, mode): windows}, 5.0, 1)
            loads[count, mode] = figures["sessions"][str(count)][mode]
    return Observed(loads, 5.0, 30)


def test_the_factors_of_a_slower_machine_are_found() -> None:
    slower = Factors(target=2.0, server_drafter=1.5, verdict_ms=3.0)
    validation = Validation(observed(slower.of(TIMES), (1, 2)), TIMES, DRAFTS, [Question(20, 30)], [1])
    factors = validation.fit()
    assert factors.target == pytest.approx(2.0, rel=0.2)
    found = validation.compared(factors)
    assert {each.sessions for each in found if not each.fitted} == {2}
    speeds = summary(found, fitted=False)["tokens_per_s"]
    assert speeds["worst"] is not None and speeds["worst"] < 0.12


def test_an_error_is_how_much_more_is_simulated() -> None:
    half = observed(Factors(target=2.0).of(TIMES), (1, 2))
    found = Validation(half, TIMES, DRAFTS, [Question(20, 30)], [1]).compared(Factors())
    assert all(each.error > 0.5 for each in found if each.figure == "tokens_per_s")
    assert all(each.error < -0.3 for each in found if each.figure == "ms_per_token mean")


def test_some_session_counts_must_be_left_to_compare_with() -> None:
    for fit_to in ([1, 2, 4], [1, 3]):
        with pytest.raises(MoaError, match="1, 2, 4 sessions"):
            Validation(observed(TIMES), TIMES, DRAFTS, [Question(20, 30)], fit_to)


def test_a_machine_is_measured(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of the times of a real engine and device, whatever they are."""
    from moa_bench.forecast import measure
    from moa_bench.forecast.measure import TIMED, measured_times
    from moa_bench.forecast.measure import Measured as MeasuredTimes
    from moa_runtime.bundle import Bundle

    monkeypatch.setattr(measure, "_REPEATS", 1)
    monkeypatch.setattr(measure, "_CONTEXTS", (9, 20))
    _, _, bundle, backend, engine = tiny
    timed: list[int] = []
    drafting = lambda inputs: [backend.step(each) for each in inputs]  # noqa: E731
    manifest = Bundle.open(bundle).manifest
    times, errors = measured_times(engine, drafting, backend, manifest, lambda: timed.append(1))
    assert len(timed) == TIMED and len(errors) == 24
    assert times.target.pass_s + times.target.token_s > 0 and times.cache_tokens == engine.cache_use[1]
    assert times.device.step_s + times.device.query_s > 0 and times.server_drafter.step_s >= 0
    path = tmp_path / "times.json"
    MeasuredTimes(times, errors, [Question(3, 4)]).write(path, {"machine": "toy"})
    assert MeasuredTimes.read(path) == MeasuredTimes(times, errors, [Question(3, 4)])
    path.write_text("[]")
    with pytest.raises(MoaError, match="holds no measured times"):
        MeasuredTimes.read(path)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def server_result(tmp_path: Path) -> Path:
    path = tmp_path / "server.json"
    sessions: dict[str, Any] = {}
    for (count, mode), figures in observed(TIMES, (1, 2)).loads.items():
        sessions.setdefault(str(count), {})[mode] = figures
    settings = {"seconds": 5.0, "max_new_tokens": 30, "client_cpus": None}
    path.write_text(json.dumps({"benchmark": "server", "sessions": sessions, "settings": settings}))
    return path


@pytest.fixture
def drafts_file(tmp_path: Path) -> Path:
    path = tmp_path / "drafts.json"
    path.write_text(json.dumps(DRAFTS.as_dict()))
    return path


def test_the_validation_is_told_and_drawn(
    server_result: Path, drafts_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moa_bench.forecast.measure import Measured as MeasuredTimes

    times, plot = tmp_path / "times.json", tmp_path / "validation.svg"
    MeasuredTimes(TIMES, [0.0], [Question(20, 30)]).write(times, {})
    arguments = ["forecast", "--validate", str(server_result), "--times", str(times), "--drafts", str(drafts_file)]
    assert main([*arguments, "--fit-to", "1", "--json", "--plot", str(plot)]) == 0
    result = json.loads(capsys.readouterr().out)
    told = result["validation"]
    assert told["fit_to"] == [1] and told["not_fitted"]["tokens_per_s"]["worst"] < 0.2
    assert "line2d" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--users", "0"], "--users must be above 0"),
        (["--token-ms", "nan"], "--token-ms must be above 0"),
        (["--spare", "-1"], "--spare must be at least 0"),
        (["--hardware", "abacus"], "no figures of the hardware 'abacus'; choose one of h100-fp8"),
        (["--validate", "nowhere.json"], "--validate needs --times"),
        (["--validate", "nowhere.json", "--times", "nowhere.json"], "cannot read nowhere.json"),
        (["--record", "drafts.json"], "--record needs --recording"),
        (["--drafts", "nowhere.json"], "cannot read nowhere.json"),
        (["--check", "--drafts", __file__], "holds no drafts"),
        (["--check", "--fit-to", "1,8"], "--fit-to is for --validate"),
        (["--measure", "nowhere/times.json"], "--measure nowhere/times.json cannot be written: there is no such"),
        (["--measure", "."], "--measure . cannot be written: it is a folder, not a file"),
        (["--record", __file__, "--recording", __file__], "is the file of --recording, which would be lost"),
        (["--users", "9", "--plot", "a.svg", "--drafts", "a.svg"], "is the file of --drafts, which would be lost"),
    ],
)
def test_what_cannot_be_done(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", *arguments]) == 2
    said = capsys.readouterr().err
    assert expected in said and "Traceback" not in said


_SHAPE = {"name": "a", "nodes": 2, "depth": 2, "steps": [1], "accepted": {"qa": [1, 2, 3]}}


def _drafts(**changed) -> str:
    return json.dumps({"about": "", "tasks": {"qa": 1}, "shapes": [_SHAPE]} | changed)


def _shape(**changed) -> str:
    return _drafts(shapes=[_SHAPE | changed])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        _drafts(tasks={"qa": 0}),
        _drafts(tasks=["qa"]),
        _drafts(tasks={"other": 1}),
        _drafts(shapes=[]),
        _shape(accepted={"qa": [0, 0]}),
        _shape(accepted={"qa": []}),
        _shape(accepted={"qa": [3, -1]}),
        _shape(accepted={"qa": [float("nan"), 1]}),
        _shape(accepted={"qa": ["1", "2"]}),
        _shape(nodes="x"),
        _shape(nodes=-5, depth=-6),
        _shape(nodes=1, depth=2),
        _shape(nodes=10**9),
        _shape(steps=[0]),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "drafts.json"
    path.write_text(_drafts())
    assert Drafts.read(path).tau(Drafts.read(path).shapes[0]) == pytest.approx(1 + 8 / 6)
    path.write_text(text)
    with pytest.raises(MoaError, match="holds no drafts: expected what moa-bench forecast --record writes"):
        Drafts.read(path)


def test_times_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    from moa_bench.forecast.measure import Measured as MeasuredTimes

    path, part = tmp_path / "times.json", {"step_s": 0.01, "query_s": 0.0}
    target = {"pass_s": 0.05, "token_s": 0.001, "product_s": 0.0, "context_s": 0.0}
    times = {"target": target, "server_drafter": part, "device": part, "row_s": 0.0, "verdict_s": 0.0}
    times |= {"most_sequences": 8, "cache_tokens": 1000}
    good = {"times": times, "errors": [], "questions": [{"prompt": 3, "answer": 5}]}
    path.write_text(json.dumps(good))
    assert MeasuredTimes.read(path).times.target.pass_s == 0.05
    for bad in (
        good | {"times": times | {"target": target | {"pass_s": "x"}}},
        good | {"times": times | {"row_s": float("nan")}},
        good | {"times": times | {"most_sequences": 0}},
        good | {"questions": [{"prompt": 3, "answer": -5}]},
        good | {"questions": []},
    ):
        path.write_text(json.dumps(bad))
        with pytest.raises(MoaError, match="holds no measured times"):
            MeasuredTimes.read(path)
