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
from moa_bench.result import token_latencies
from moa_bench.simulate import Simulate
from moa_bench.simulated_clock import Pace, Times
from moa_bench.simulation import SHAPES, TOKENS, Client, Field, Placement, hold, name_of, work_of
from moa_bench.target_answers import ReplayEngine
from moa_runtime import optional_deps
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.factory import drafter_for
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.options import DRAFTINGS
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
        assert len(set(answers)) == len(taken) and sum(taken[:-1]) < TOKENS["shapes"] <= sum(taken)
    [(_, few)] = simulation.draw_shapes(1, 0, [10, 10])
    assert sorted(few) == [0, 1]
    lengths = [150, 90, 400]
    placements = list(simulation.draw_placements(300, 7, lengths))
    assert (
        placements
        == list(simulation.draw_placements(300, 7, lengths))
        != list(simulation.draw_placements(300, 8, lengths))
    )
    assert {each.change for each in placements} == set(simulation.CHANGES)
    for each in placements:
        assert (each.before == each.after) == (each.change == "none") or "free" in each.change
        assert 0.001 <= each.after.round_trip_s <= 0.3
        assert sum(lengths[at] for at in each.answers) >= TOKENS["placement"] or len(each.answers) == 3


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


# -- which end drafts ------------------------------------------------------------------------------

TIMES = Times(step_s=0.001, query_s=0.0001, pass_s=0.03, token_s=0.0001, round_trip_s=0.002)
FAR = replace(TIMES, round_trip_s=0.3)
DRAFTING = replace(TIMES, server_step_s=0.001, server_query_s=0.0001)


@pytest.fixture(scope="module")
def long() -> Recording:
    return toy_recording(150)


def scenario(before: Times, after: Times | None = None) -> Placement:
    return Placement(0, before, after or before, "none", (0, 1))


def a_token(client: Client) -> float:
    return client.seconds / (len(client.text) - 2)


@pytest.mark.parametrize("queue_s", [0.0, 0.05])
def test_a_server_that_decodes_alone_takes_a_pass_a_token_and_waits_in_the_queue(long, queue_s: float) -> None:
    client = simulation.hold_placement(long, scenario(replace(TIMES, queue_s=queue_s)), "server")
    assert client.pushed == len(client.text) - 2
    assert a_token(client) == pytest.approx(queue_s + TIMES.pass_s + TIMES.token_s, rel=0.01)


def test_a_device_pays_the_round_trip_and_a_server_its_own_drafts(long: Recording) -> None:
    near, far = (simulation.hold_placement(long, scenario(times), "device") for times in (TIMES, FAR))
    assert near.text == far.text and near.pushed == far.pushed == 0
    assert a_token(near) < TIMES.pass_s < a_token(far)
    alone, drafts = (simulation.hold_placement(long, scenario(times), "server") for times in (TIMES, DRAFTING))
    assert drafts.text == alone.text and drafts.seconds < 0.8 * alone.seconds


@pytest.mark.parametrize(("times", "best"), [(TIMES, "device"), (FAR, "server")])
def test_auto_finds_the_faster_end(long: Recording, times: Times, best: str) -> None:
    found = simulation.compare_placements(long, scenario(times))
    assert found["best"] == found["kind"] == best
    assert found["ratio"] < 1.25
    assert (next(iter(found["means"].values())) > 0.5) == (best == "server")


def test_auto_follows_a_link_that_changes(long: Recording) -> None:
    found = simulation.compare_placements(long, scenario(TIMES, FAR)._replace(change="link slower"))
    assert found["ms_per_token"]["auto"] < found["ms_per_token"]["device"]
    assert 0 < next(iter(found["means"].values())) < 1
    assert found["kind"] == f"{found['best']}, link slower"


# -- a fleet ---------------------------------------------------------------------------------------


def tokens_per_s(recording: Recording, mode: str, sessions: int, times: Times = DRAFTING) -> float:
    answers, passes = simulation.simulate_window(recording, times, mode, sessions, 10.0)
    bursts = [burst for answer in answers for burst in answer.bursts]
    assert passes > 0 and all(0 <= answer.sent <= burst.at <= 10 for answer in answers for burst in answer.bursts)
    return sum(burst.tokens for burst in bursts) / 10


def test_a_stream_of_one_session_takes_a_pass_a_token(recording: Recording) -> None:
    answers, passes = simulation.simulate_window(recording, TIMES, "stream", 1, 10.0)
    latencies = [latency for answer in answers for latency in token_latencies(answer.bursts)]
    assert np.mean(latencies) == pytest.approx(TIMES.pass_s + TIMES.token_s, rel=0.01)
    assert passes == pytest.approx(sum(len(answer.bursts) for answer in answers), abs=1)


def test_sessions_share_passes_until_the_target_is_full(recording: Recording) -> None:
    full = replace(DRAFTING, token_s=0.01)
    one, eight, many = (tokens_per_s(recording, "stream", sessions, full) for sessions in (1, 8, 32))
    assert one < eight < many < 1 / full.token_s
    rates = {mode: tokens_per_s(recording, mode, 4) for mode in ("stream", *DRAFTINGS)}
    assert rates["auto"] > 0 and min(rates["server"], rates["device"]) > 1.2 * rates["stream"] > 0


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


def test_the_command_compares_placements(simulate) -> None:
    found = json.loads(simulate("placement", "--scenarios", "4", "--json")[1])
    assert (found["benchmark"], found["partial"], len(found["scenarios"])) == ("simulate", False, 4)
    for each in found["scenarios"]:
        assert set(each["ms_per_token"]) == set(DRAFTINGS) and each["best"] in ("device", "server")
        ratio = each["ms_per_token"]["auto"] / each["ms_per_token"][each["best"]]
        assert math.isclose(each["ratio"], ratio, rel_tol=0.01)
    summary, worst = Simulate().tables(found)
    assert summary.rows[-1][:2] == ["all", 4] and len(worst.rows) == 4
    assert [row[1] for row in worst.rows] == sorted((each["ratio"] for each in found["scenarios"]), reverse=True)
    assert summary.rows[-1][4] == worst.rows[0][1]
    figure = Figure()
    Simulate().plot(found, figure)
    assert len(figure.axes) == 2
    summary, worst = Simulate().tables(found | {"scenarios": []})  # nothing yet
    assert summary.rows == [["all", 0, None, None, None, None]] and worst.rows == []
    Simulate().plot(found | {"scenarios": []}, Figure())


def test_the_command_simulates_a_fleet(simulate, tmp_path: Path) -> None:
    words = ("--sessions", "4,1", "--seconds", "2")
    status, out, _ = simulate("fleet", *words, "--json", "--plot", str(tmp_path / "plot.png"))
    found = json.loads(out)
    assert status == 0 and [list(modes) for modes in found["sessions"].values()] == [["stream", *DRAFTINGS]] * 2
    assert list(found["sessions"]) == ["1", "4"] and found["settings"]["ms"]["pass"] == 6
    assert set(found["speedup"]["4"]) == set(DRAFTINGS)
    (table,) = Simulate().tables(found)
    assert len(table.rows) == 8 and "step 8" in table.note
    status, out, _ = simulate("fleet", "--sessions", "1", "--seconds", "1", "--times", "8,0.8,-,0,6,0.02,70")
    assert status == 0 and "step None" in out


def test_a_package_that_is_missing_is_named(simulate, monkeypatch) -> None:
    monkeypatch.setitem(optional_deps.MODULES, "bench", ("no_such_package",))
    assert "no_such_package" in refusal(simulate("shapes"))
