"""Simulated scenarios on answers of the toy, recorded from a drafter that knows it in part."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from moa_bench import simulation
from moa_bench.cli import main
from moa_bench.harness import Conversation, LoopbackVerifier, Round
from moa_bench.recording import RecordedAnswer, RecordedBackend, Recording, replayed_drafter
from moa_bench.simulate import Simulate
from moa_bench.simulated_clock import Pace
from moa_bench.simulation import CURVES, MODES, SHAPES, TOKENS, Field, Fleet, StepCurve, hold, name_of, work_of
from moa_bench.target_answers import ReplayEngine
from moa_runtime import optional_deps
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.factory import drafter_for
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.session.events import Sampling
from support.bench.commands import Run, refusal
from support.bench.toys import MANIFEST, KnowingBackend, recorded, toy_recording
from support.refusals import refused
from support.toy_engine import PRINTS, STOP, VOCAB, ToyEngine

PACE = Pace(step_s=0.002, query_s=0.0004, pass_s=0.03, token_s=0.001, round_trip_s=0.02)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return toy_recording(40)


@pytest.fixture(scope="module")
def field(recording: Recording) -> Field:
    return Field(recording, SHAPES[::5])


# -- a recording and its replay --------------------------------------------------------------------


def really(answer: RecordedAnswer, shape: Budget) -> list[float]:
    """The work of an answer with the drafter that was recorded."""
    rounds: list[Round] = []
    verifier = LoopbackVerifier(ReplayEngine(ToyEngine(), {tuple(answer.prompt): answer.answer}))
    drafter = drafter_for(MANIFEST, KnowingBackend())
    conversation = Conversation(verifier, drafter, PRINTS, (STOP,), FixedShape(shape))
    conversation.answer(answer.prompt, Sampling(), max_new_tokens=len(answer.answer), on_round=rounds.append)
    verifier.close()
    return sum(map(simulation.work_in, rounds)).tolist()


@pytest.mark.parametrize(
    "shape", [Budget.chain(0), Budget.chain(5), Budget.tree(6, 4, 2), Budget.tree(62, 8, 10)], ids=name_of
)
def test_a_replay_drafts_what_the_recorded_drafter_does(recording: Recording, shape: Budget) -> None:
    for number, answer in enumerate(recording.answers):
        assert work_of(recording, number, shape).tolist() == really(answer, shape)


def test_a_path_that_was_never_asked_is_hopeless_unless_the_answer_goes_there(recording: Recording) -> None:
    answer = recording.answers[0]
    text, backend = [*answer.prompt, *answer.answer], RecordedBackend(answer)
    drafter = replayed_drafter(replace(recording, ngrams=False), backend)
    rows = np.zeros((len(answer.prompt), 1, 1), np.float32)
    drafter.add_rows(0, rows, rows)
    known = len(answer.prompt) + 1
    right = drafter.propose(text[: known + 10], Budget.chain(1))
    assert right.scores[0] > -2.0
    wrong = drafter.propose([*text[: known + 10], 1 + text[known + 10] % (VOCAB - 1), 7, 7], Budget.chain(1))
    assert wrong.scores[0] == pytest.approx(-20.0)


def test_a_prompt_may_be_longer_than_a_step_of_the_target() -> None:
    answer = recorded([1 + at % 40 for at in range(700)], 4)
    recording = Recording("knowing", PRINTS, VOCAB, (STOP,), True, [answer])
    assert work_of(recording, 0, Budget.chain(2)).tolist() == really(answer, Budget.chain(2))


# -- shapes ----------------------------------------------------------------------------------------


def test_the_rate_of_a_fixed_shape_is_that_of_a_conversation_on_the_clock(recording: Recording) -> None:
    for shape in (Budget.chain(0, nodes=0), Budget.chain(3), Budget.tree(20, 4, 3)):
        seconds, work = hold(recording, 0, FixedShape(shape), PACE)
        assert work[0] / seconds == pytest.approx(simulation.rate(work, PACE))
        assert work.tolist() == work_of(recording, 0, shape).tolist()
    work = np.array([30, 20, 50, 10, 40, 0.0])
    by_hand = 30 / (20 * 0.002 + 50 * 0.0004 + 10 * (0.02 + 0.031) + 40 * 0.001)
    assert simulation.rate(work, PACE) == pytest.approx(by_hand) == pytest.approx(simulation.rate(2 * work, PACE))


def test_scenarios_are_drawn_within_their_bounds_and_alike_for_the_same_seed() -> None:
    lengths = [90, 60, 120, 80, 100, 70, 110]
    drawn = list(simulation.draw_shapes(200, 7, lengths))
    assert drawn == list(simulation.draw_shapes(200, 7, lengths)) and drawn != list(
        simulation.draw_shapes(200, 8, lengths)
    )
    for pace, answers in drawn:
        assert 0.001 <= pace.step_s <= 0.04 and 0.03 <= pace.query_s / pace.step_s <= 0.5
        assert 0.005 <= pace.pass_s <= 0.3 and 0.0002 <= pace.token_s / pace.pass_s <= 0.15
        assert 0 <= pace.round_trip_s <= 0.4
        taken = [lengths[at] for at in answers]
        assert len(set(answers)) == len(taken) and sum(taken[:-1]) < TOKENS <= sum(taken)
    [(_, few)] = simulation.draw_shapes(1, 0, [10, 10])
    assert sorted(few) == [0, 1]
    fleets = list(simulation.draw_fleets(300, 7, [150, 90, 400]))
    assert fleets == list(simulation.draw_fleets(300, 7, [150, 90, 400])) != list(simulation.draw_fleets(300, 8, [9]))
    assert {each.sessions for each in fleets} == {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert {each.curve for each in fleets} == set(CURVES)
    for each in fleets:
        assert 0.001 <= each.round_trip_s <= 0.3 and 0.0005 <= each.step_s <= 0.02 and 1 <= each.slower <= 3


@pytest.mark.parametrize(
    ("pace", "kind"),
    [
        (PACE, "tree"),
        (replace(PACE, token_s=0.0), "tree"),
        (replace(PACE, step_s=0.04, pass_s=0.01, round_trip_s=0.0), "nothing"),
        (replace(PACE, pass_s=0.1, token_s=0.02, round_trip_s=0.0), None),
    ],
    ids=["near", "a GPU", "a slow device", "a target that feels every token"],
)
def test_drafts_at_their_price_come_near_the_best_fixed_shape(field: Field, pace: Pace, kind: str | None) -> None:
    found = field.run((pace, (0, 1, 0, 1)))
    assert kind is None or found["kind"] == kind
    assert found["share"] > 0.85
    assert found["share"] == pytest.approx(found["rate"] / found["best_rate"], rel=1e-3)
    assert found["ms"]["pass"] == 1000 * pace.pass_s and found["ms"]["trip"] == 1000 * pace.round_trip_s


# -- a fleet ---------------------------------------------------------------------------------------

NEAR = Fleet(0, 1, "cpu float32", 1.0, step_s=0.001, query_s=0.0001, round_trip_s=0.002, jitter=0.0, first=0)


def speed(recording: Recording, fleet: Fleet, mode: str, seconds: float = 20.0) -> float:
    texts, _ = simulation.hold_fleet(recording, fleet, mode, seconds)
    return sum(map(len, texts)) / seconds


def test_a_step_costs_what_its_curve_says() -> None:
    curve = StepCurve((1, 2, 4), (10.0, 11.0, 15.0), 2.0, 100.0)
    assert [curve.seconds(tokens, 1, 0) for tokens in (1, 3, 6)] == pytest.approx([0.010, 0.013, 0.019])
    assert curve.seconds(4, 3, 50) == pytest.approx(0.015 + 2 * 0.002 + 0.005)


def test_a_stream_takes_a_pass_a_token_and_sessions_share_passes(recording: Recording) -> None:
    one = speed(recording, NEAR, "stream")
    assert one == pytest.approx(1 / NEAR.step_seconds(1, 1, 40), rel=0.1)
    eight = NEAR._replace(sessions=8)
    assert 2 * one < speed(recording, eight, "stream") < 8 / NEAR.step_seconds(8, 8, 0)
    _, target = simulation.hold_fleet(recording, eight, "stream", 20.0)
    assert target.rounds / target.passes > 6


def test_a_device_pays_the_round_trip(recording: Recording) -> None:
    near, far = (speed(recording, NEAR._replace(round_trip_s=trip), "device") for trip in (0.002, 0.3))
    assert far < speed(recording, NEAR, "stream") < near


@pytest.mark.parametrize(("sessions", "trip"), [(1, 0.002), (1, 0.3), (4, 0.05)])
def test_auto_is_near_the_best_of_the_others_and_writes_the_same(
    recording, sessions: int, trip: float, monkeypatch
) -> None:
    monkeypatch.setattr(simulation, "_MOST_TOKENS", 300)
    found = simulation.compare_fleets(recording, NEAR._replace(sessions=sessions, round_trip_s=trip))
    rates = found["tokens_per_s"]
    assert found["best"] == max(MODES[1:], key=rates.__getitem__)
    assert found["ratio"] == pytest.approx(rates["auto"] / rates[found["best"]], rel=1e-3) and found["ratio"] > 0.75


# -- on the command line ---------------------------------------------------------------------------


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    few = (SHAPES[0], SHAPES[1], Budget.chain(2), Budget.tree(8, 2, 2))
    monkeypatch.setattr(simulation, "Field", lambda recording: Field(recording, few))


@pytest.fixture
def kept(recording: Recording, tmp_path: Path) -> Path:
    path = tmp_path / "recording"
    recording.write(path)
    return path


@pytest.fixture
def simulate(kept: Path, few_shapes, capsys):
    """Runs ``moa-bench simulate`` on a recording."""

    def run(question: str, *more: str) -> Run:
        return main(["simulate", question, "--recording", str(kept), *more]), *capsys.readouterr()

    return run


def test_the_command_shows_shapes(simulate, tmp_path) -> None:
    more = ("--scenarios", "6", "--seed", "3")
    status, out, _ = simulate("shapes", *more, "--json", "--plot", str(tmp_path / "plot.svg"))
    found = json.loads(out)
    shares = [each["share"] for each in found["scenarios"]]
    assert status == 0 and len(shares) == 6 and all(0.3 < share < 3 and math.isfinite(share) for share in shares)
    settings = found["settings"]
    assert (settings["answers"], settings["question"], settings["seed"]) == (2, "shapes", 3)
    assert str(tmp_path) not in out and (tmp_path / "plot.svg").stat().st_size > 1000
    assert f"{min(shares):.3f}" in simulate("shapes", *more)[1]


def test_the_command_makes_a_recording_if_there_is_none(tiny, questions, few_shapes, tmp_path, capsys) -> None:
    target, drafter, bundle, *_ = tiny
    made = ["--questions", questions, "--limit", "1", "--bundle", bundle, "--model", target, "--drafter", drafter]
    argv = ["simulate", "shapes", "--recording", tmp_path / "recording", "--scenarios", "1", "--json"]
    found = []
    for more in ([*made, "--max-new-tokens", "4"], []):
        assert main(list(map(str, [*argv, *more]))) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["scenarios"] == found[1]["scenarios"] and found[0]["settings"] == found[1]["settings"]


@pytest.mark.parametrize(
    ("ngrams", "same", "other"), [(True, "--ngrams", "--no-ngrams"), (False, "--no-ngrams", "--ngrams")]
)
def test_the_choice_of_a_recording_may_be_repeated(recording, kept, simulate, ngrams, same, other) -> None:
    replace(recording, ngrams=ngrams).write(kept)
    assert json.loads(simulate("shapes", "--scenarios", "1", "--json", same)[1])["settings"]["ngrams"] is ngrams
    assert other in refusal(simulate("shapes", other), "contradiction")


def written_anew(path: Path, header: dict[str, Any], **arrays: Any) -> None:
    """The file with another header and other arrays; None leaves one out."""
    with np.load(path) as file:
        held: dict[str, Any] = dict(file)
    whole = json.loads(held["header"].tobytes()) | header
    held |= {"header": np.frombuffer(json.dumps(whole).encode(), np.uint8)} | arrays
    with path.open("wb") as out:
        np.savez(out, **{name: array for name, array in held.items() if array is not None})


SOME = np.ones(3, np.int32)


@pytest.mark.parametrize(
    ("header", "arrays"),
    [
        ({}, {"top_logprobs-0": np.zeros((3, 4), np.float32)}),
        ({}, {"positions-0": SOME.astype(np.float32)}),
        ({}, {"positions-0": np.int32(1)}),
        ({}, {"tokens-1": None}),
        ({"vocab_size": 7}, {}),
        ({"vocab_size": "many"}, {}),
        ({"fingerprints": {"target": 5, "tokenizer": "b", "drafter": "c"}}, {}),
        ({"fingerprints": {"target": "\ud800", "tokenizer": "b", "drafter": "c"}}, {}),
        ({"texts": [[[1], [True] * 40]] * 2}, {}),
        ({}, {"lengths-0": SOME.astype(complex)}),
        ({}, {"top_logprobs-0": np.zeros((3, 4), complex)}),
        ({"texts": []}, {}),
        ({"texts": [1]}, {}),
        ({"stop_tokens": []}, {}),
    ],
)
def test_a_recording_that_contradicts_itself_is_refused(kept, simulate, header, arrays) -> None:
    written_anew(kept, header, **arrays)
    refusal(simulate("shapes"), "damaged")


def test_probabilities_above_one_and_a_file_cut_short_are_refused(kept: Path, recording: Recording) -> None:
    for wrong in (np.nan, 0.5):
        written_anew(kept, {}, **{"top_logprobs-1": np.full_like(recording.answers[1].top_logprobs, wrong)})
        with refused("damaged"):
            Recording.read(kept)
    kept.write_bytes(kept.read_bytes()[:2000])
    with refused("damaged"):
        Recording.read(kept)


def test_the_command_compares_fleets(simulate, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(simulation, "_MOST_TOKENS", 60)
    monkeypatch.setattr(simulation, "draw_fleets", lambda *_: [NEAR, NEAR._replace(sessions=2, curve="gpu")])
    status, out, _ = simulate("fleet", "--scenarios", "2", "--json", "--plot", str(tmp_path / "plot.png"))
    found = json.loads(out)
    assert (status, found["partial"], len(found["scenarios"])) == (0, False, 2)
    assert all(set(each["tokens_per_s"]) == set(MODES) for each in found["scenarios"])
    summary, worst = Simulate().tables(found)
    assert [row[0] for row in summary.rows] == ["cpu float32", "gpu", "all"] and len(worst.rows) == 2
    ratios = sorted(each["ratio"] for each in found["scenarios"])
    assert [row[3] for row in worst.rows] == ratios and summary.rows[-1][4] == ratios[0]
    summary, worst = Simulate().tables(found | {"scenarios": []})  # nothing yet
    assert summary.rows == [["all", 0, None, None, None, None]] and worst.rows == []
    figure = Figure()
    Simulate().plot(found | {"scenarios": []}, figure)
    assert len(figure.axes) == 2


def test_a_package_that_is_missing_is_named(simulate, monkeypatch) -> None:
    monkeypatch.setitem(optional_deps.MODULES, "bench", ("no_such_package",))
    assert "no_such_package" in refusal(simulate("shapes"))
