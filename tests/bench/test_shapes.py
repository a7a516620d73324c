"""Shapes at their price, in scenarios on answers of the toy, recorded from a drafter that knows it in part."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.recorded_toy import MANIFEST, KnowingBackend, recorded, toy_recording
from moa_bench.accept.replay import ReplayEngine
from moa_bench.cli import main
from moa_bench.conversation import Conversation
from moa_bench.loopback import LoopbackVerifier
from moa_bench.pace import Pace
from moa_bench.shapes import measure as measure_module
from moa_bench.shapes.fixed import SHAPES, Counting, Work, kind_of, name_of, work_of
from moa_bench.shapes.measure import TOKENS, Field, Scenario, scenarios
from moa_bench.shapes.recording import RecordedAnswer, Recording
from moa_bench.shapes.replay import Replay, hold
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.factory import drafter_for
from moa_runtime.drafting.cost_model import Throughput
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from toy_engine import PRINTS, STOP, VOCAB, ToyEngine

PACE = Pace(step_s=0.002, query_s=0.0004, pass_s=0.03, token_s=0.001, round_trip_s=0.02)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return toy_recording(40)


@pytest.fixture(scope="module")
def field(recording: Recording) -> Field:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_module, "SHAPES", SHAPES[::5])
        return Field([Replay(recording, answer) for answer in recording.answers])


def really(answer: RecordedAnswer, shape: Budget) -> Work:
    """What an answer takes with the drafter that was recorded."""
    counting = Counting(FixedShape(shape))
    verifier = LoopbackVerifier(ReplayEngine(ToyEngine(), {tuple(answer.prompt): answer.answer}))
    conversation = Conversation(verifier, drafter_for(MANIFEST, KnowingBackend()), PRINTS, (STOP,), counting)
    conversation.answer(answer.prompt, Sampling(), max_new_tokens=len(answer.answer), on_round=lambda outcome: None)
    verifier.close()
    return counting.work


@pytest.mark.parametrize(
    "shape", [Budget.chain(0), Budget.chain(5), Budget.tree(6, 4, 2), Budget.tree(62, 8, 10)], ids=name_of
)
def test_a_replay_drafts_what_the_recorded_drafter_does(recording: Recording, shape: Budget) -> None:
    for answer in recording.answers:
        replay = Replay(recording, answer)
        assert work_of(replay, shape) == really(answer, shape)
        assert replay.backend.unknown == 0


def test_a_path_that_was_never_asked_is_hopeless_unless_the_answer_goes_there(recording: Recording) -> None:
    answer = recording.answers[0]
    text, drafter = [*answer.prompt, *answer.answer], Replay(replace(recording, ngrams=False), answer).drafter()
    rows = np.zeros((len(answer.prompt), 1, 1), np.float32)
    drafter.add_rows(0, rows, rows)
    known = len(answer.prompt) + 1
    right = drafter.propose(text[: known + 10], Budget.chain(1))
    assert right.scores[0] > -2.0
    wrong = drafter.propose([*text[: known + 10], 1 + text[known + 10] % (VOCAB - 1), 7, 7], Budget.chain(1))
    assert wrong.scores[0] == pytest.approx(-20.0)


def test_a_prompt_may_be_longer_than_a_step_of_the_target() -> None:
    answer = recorded([1 + at % 40 for at in range(700)], 4)
    replay = Replay(Recording("knowing", PRINTS, VOCAB, (STOP,), True, [answer]), answer)
    assert work_of(replay, Budget.chain(2)) == really(answer, Budget.chain(2))


def test_a_recording_is_the_same_when_it_is_read(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recording.write(path)
    again = Recording.read(path)
    assert replace(again, answers=[]) == replace(recording, answers=[])
    for read, written in zip(again.answers, recording.answers, strict=True):
        assert (read.prompt, read.answer, read.queries) == (written.prompt, written.answer, written.queries)
        np.testing.assert_array_equal(read.top_tokens, written.top_tokens)
        np.testing.assert_array_equal(read.top_logprobs, written.top_logprobs)


def test_what_shapes_bring_is_known_without_a_clock(field: Field) -> None:
    """The same tokens a second come from a conversation on the clock."""
    for shape in (Budget.chain(0, nodes=0), Budget.chain(3), Budget.tree(20, 4, 3)):
        counting = Counting(FixedShape(shape))
        seconds = hold(field.replays[0], counting, PACE)
        assert counting.work.tokens / seconds == pytest.approx(counting.work.rate(PACE))
        assert counting.work == work_of(field.replays[0], shape)


def test_tokens_a_second_by_hand() -> None:
    work = Work(tokens=30, steps=20, queries=50, passes=10, nodes=40)
    seconds = 20 * 0.002 + 50 * 0.0004 + 10 * (0.02 + 0.031) + 40 * 0.001
    assert work.rate(PACE) == pytest.approx(30 / seconds)
    assert (work + work).rate(PACE) == pytest.approx(work.rate(PACE))


def test_nothing_drafted_is_a_pass_a_token(field: Field) -> None:
    assert (kind_of(SHAPES[0]), kind_of(SHAPES[1])) == ("nothing", "copies")
    length = len(field.replays[0].answer.answer) - 1
    assert work_of(field.replays[0], SHAPES[0]) == Work(tokens=length, passes=length)


def test_scenarios_are_drawn_within_their_bounds_and_again_alike() -> None:
    lengths = [90, 60, 120, 80, 100, 70, 110]
    drawn = list(scenarios(200, 7, lengths))
    assert drawn == list(scenarios(200, 7, lengths)) and drawn != list(scenarios(200, 8, lengths))
    for one in drawn:
        pace = one.pace
        assert 0.001 <= pace.step_s <= 0.04 and 0.03 <= pace.query_s / pace.step_s <= 0.5
        assert 0.005 <= pace.pass_s <= 0.3 and 0.0002 <= pace.token_s / pace.pass_s <= 0.15
        assert 0 <= pace.round_trip_s <= 0.4
        taken = [lengths[at] for at in one.answers]
        assert len(set(one.answers)) == len(taken) and sum(taken[:-1]) < TOKENS <= sum(taken)
    [few] = scenarios(1, 0, [10, 10])
    assert sorted(few.answers) == [0, 1]


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
    outcome = field.run(Scenario(pace, (0, 1, 0, 1)), Throughput())
    assert kind is None or kind_of(outcome.best) == kind
    assert outcome.share > 0.85
    found = outcome.as_dict()
    assert found["share"] == pytest.approx(found["rate"] / found["best_rate"], rel=1e-3)
    assert found["pace_ms"]["pass"] == 1000 * pace.pass_s


# -- on the command line ---------------------------------------------------------------------------


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "SHAPES", (SHAPES[0], SHAPES[1], Budget.chain(2), Budget.tree(8, 2, 2)))


@pytest.fixture
def kept(recording: Recording, tmp_path: Path) -> Path:
    path = tmp_path / "recording"
    recording.write(path)
    return path


def test_the_command_shows_scenarios_of_a_recording(kept, few_shapes, tmp_path, capsys) -> None:
    argv = ["shapes", "--recording", str(kept), "--scenarios", "6", "--seed", "3"]
    assert main([*argv, "--json", "--plot", str(tmp_path / "plot.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    shares = [each["share"] for each in found["scenarios"]]
    assert len(shares) == 6 and all(0.3 < share < 3 and math.isfinite(share) for share in shares)
    assert found["settings"]["answers"] == 2 and str(tmp_path) not in json.dumps(found)
    assert (tmp_path / "plot.svg").stat().st_size > 1000
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "best fixed shape" in out and "The worst" in out and f"{min(shares):.3f}" in out


def test_the_command_makes_a_recording_where_there_is_none(tiny, questions, few_shapes, tmp_path, capsys) -> None:
    target, drafter, bundle, *_ = tiny
    path = tmp_path / "recording"
    made = ["--questions", questions, "--limit", "1", "--bundle", bundle, "--model", target, "--drafter", drafter]
    argv = ["shapes", "--recording", path, "--scenarios", "1", "--json"]
    assert main(list(map(str, [*argv, *made, "--max-new-tokens", "4"]))) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(list(map(str, argv))) == 0
    again = json.loads(capsys.readouterr().out)
    assert first["scenarios"] == again["scenarios"] and first["settings"] == again["settings"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--scenarios", "0"], "--scenarios must be at least 1"),
        (["--limit", "1"], "holds a recording already: leave out --limit"),
        (["--max-new-tokens", "80"], "holds a recording already: leave out --max-new-tokens"),
        (["--max-new-tokens", "1"], "--max-new-tokens must be at least 2"),
        (["--no-ngrams"], "was recorded with an n-gram index: leave out --no-ngrams"),
        (["--recording", "no-such-folder/recording"], "there is no folder no-such-folder"),
        (["--recording", __file__], "is no recording of this version"),
        (["--plot", "plot.txt"], "must end with"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(kept, argv, said, capsys) -> None:
    assert main(["shapes", "--recording", str(kept), *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moa-bench: error: ") and err.count("\n") == 1 and said in err


def test_what_a_recording_was_made_with_may_be_said_again(recording, few_shapes, tmp_path, capsys) -> None:
    for ngrams, same, other in ((True, "--ngrams", "--no-ngrams"), (False, "--no-ngrams", "--ngrams")):
        replace(recording, ngrams=ngrams).write(tmp_path / "recording")
        argv = ["shapes", "--recording", str(tmp_path / "recording"), "--scenarios", "1", "--json"]
        assert main([*argv, same]) == 0
        assert json.loads(capsys.readouterr().out)["settings"]["ngrams"] is ngrams
        assert main([*argv, other]) == 2
        assert f"leave out {other}" in capsys.readouterr().err


def test_a_damaged_recording_is_refused(kept: Path) -> None:
    kept.write_bytes(kept.read_bytes()[:2000])
    with pytest.raises(MoaError, match="is no recording of this version"):
        Recording.read(kept)


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
    ("header", "arrays", "said"),
    [
        ({}, {"positions-1": SOME}, "its answer 2 has lengths of shape"),
        ({}, {"lengths-0": SOME}, "its answer 1 has lengths of shape (3,) and type int32, where the others ask for"),
        ({}, {"tokens-1": SOME}, "has tokens of shape (3,)"),
        ({}, {"top_logprobs-0": np.zeros((3, 4), np.float32)}, "has top_logprobs of shape (3, 4)"),
        ({}, {"top_tokens-0": SOME}, "has top_tokens of shape (3,)"),
        ({}, {"positions-0": SOME.astype(np.float32)}, "has positions of shape (3,) and type float32"),
        ({}, {f"{name}-0": SOME[:0] for name in ("positions", "lengths", "tokens")}, "has top_tokens of shape"),
        ({}, {"positions-0": np.int32(1)}, "is no recording"),
        ({}, {"tokens-1": None}, "is no recording"),
        ({"vocab_size": 7}, {}, "its answer 1 has tokens outside of the 7 of the target"),
        ({"vocab_size": "many"}, {}, "is no recording"),
        ({"texts": []}, {}, "is no recording"),
        ({"texts": [[[], [1, 2]]]}, {}, "its answer 1 has no prompt"),
        ({"texts": [[[1], ["a", "b"]]]}, {}, "its answer 1 has tokens outside of"),
        ({"texts": [1]}, {}, "is no recording"),
        ({"stop_tokens": []}, {}, "is no recording"),
    ],
)
def test_a_recording_that_contradicts_itself_is_refused_in_a_sentence(kept, header, arrays, said, capsys) -> None:
    written_anew(kept, header, **arrays)
    assert main(["shapes", "--recording", str(kept)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moa-bench: error: ") and err.count("\n") == 1 and said in err


def test_probabilities_of_a_recording_are_none_above_one(kept: Path, recording: Recording) -> None:
    for wrong in (np.nan, 0.5):
        written_anew(kept, {}, **{"top_logprobs-1": np.full_like(recording.answers[1].top_logprobs, wrong)})
        with pytest.raises(MoaError, match="its answer 2 has negative lengths or positions, or probabilities above 1"):
            Recording.read(kept)
