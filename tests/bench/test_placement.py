"""Who drafts in simulated scenarios, on answers of the toy."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bench.recorded_toy import toy_recording
from moa_bench.cli import main
from moa_bench.placement import present
from moa_bench.placement.measure import compared
from moa_bench.placement.scenarios import CHANGES, TOKENS, Scenario, Times, scenarios
from moa_bench.placement.simulate import hold
from moa_bench.shapes.recording import Recording
from moa_bench.shapes.replay import Replay
from moa_runtime.options import DRAFTINGS

TIMES = Times(
    step_s=0.001,
    query_s=0.0001,
    server_step_s=None,
    server_query_s=0.0,
    pass_s=0.03,
    token_s=0.0001,
    queue_s=0.0,
    trip_s=0.002,
    jitter=0.0,
)
FAR = replace(TIMES, trip_s=0.3)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return toy_recording(150)


@pytest.fixture(scope="module")
def replays(recording: Recording) -> list[Replay]:
    return [Replay(recording, answer) for answer in recording.answers]


def scenario(before: Times, after: Times | None = None) -> Scenario:
    return Scenario(0, before, after or before, "none", (0, 1))


def test_a_server_that_decodes_alone_takes_a_pass_a_token(replays: list[Replay]) -> None:
    held = hold(replays, scenario(TIMES), "server")
    assert held.pushed == 1.0
    assert held.seconds / held.tokens == pytest.approx(TIMES.pass_s + TIMES.token_s, rel=0.01)


def test_a_device_pays_the_round_trip_for_each_draft(replays: list[Replay]) -> None:
    near, far = (hold(replays, scenario(times), "device") for times in (TIMES, FAR))
    assert near.text == far.text and near.pushed == far.pushed == 0.0
    assert near.seconds / near.tokens < TIMES.pass_s < far.seconds / far.tokens


def test_a_server_that_drafts_is_faster_for_it(replays: list[Replay]) -> None:
    drafting = replace(TIMES, server_step_s=0.001, server_query_s=0.0001)
    alone, drafts = (hold(replays, scenario(times), "server") for times in (TIMES, drafting))
    assert drafts.text == alone.text and drafts.seconds < 0.8 * alone.seconds


@pytest.mark.parametrize(("times", "best"), [(TIMES, "device"), (FAR, "server")])
def test_auto_finds_out_who_is_faster(replays: list[Replay], times: Times, best: str) -> None:
    found = compared(replays, scenario(times))
    assert found.best == best
    assert found.held["auto"].seconds < 1.25 * found.held[found.best].seconds
    assert (found.held["auto"].pushed > 0.5) == (best == "server")


def test_auto_follows_a_link_that_changes(replays: list[Replay]) -> None:
    found = compared(replays, scenario(TIMES, FAR))
    auto, device, server = (found.held[drafting] for drafting in ("auto", "device", "server"))
    assert auto.seconds < device.seconds and 0 < auto.pushed < 1
    assert len({auto.text, device.text, server.text}) == 1


def test_scenarios_are_drawn_alike_for_the_same_seed() -> None:
    lengths = [150, 90, 400]
    drawn = list(scenarios(300, 7, lengths))
    assert drawn == list(scenarios(300, 7, lengths)) != list(scenarios(300, 8, lengths))
    assert {each.change for each in drawn} == set(CHANGES)
    assert all((each.before == each.after) == (each.change == "none") or "free" in each.change for each in drawn)
    assert all(0.001 <= each.after.trip_s <= 0.3 for each in drawn)
    assert all(sum(lengths[at] for at in each.answers) >= TOKENS or len(each.answers) == 3 for each in drawn)


def test_the_command_prints_one_object_and_tables(recording: Recording, tmp_path: Path, capsys) -> None:
    path = tmp_path / "recording"
    recording.write(path)
    assert main(["placement", "--recording", str(path), "--scenarios", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["benchmark"], found["partial"], len(found["scenarios"])) == ("placement", False, 4)
    for each in found["scenarios"]:
        assert set(each["ms_per_token"]) == set(DRAFTINGS) and each["best"] in ("device", "server")
        ratio = each["ms_per_token"]["auto"] / each["ms_per_token"][each["best"]]
        assert math.isclose(each["ratio"], ratio, rel_tol=0.01)
    summary, worst = present.tables(found)
    assert summary.rows[-1][:3] == ["all", "", 4] and len(worst.rows) == 4
    figure = Figure()
    present.draw(found, figure)
    assert len(figure.axes) == 3  # one is the colour bar


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--recording", "no-such-file"], "make it with moa-bench shapes --recording no-such-file"),
        (["--recording", "no-such-file", "--scenarios", "0"], "--scenarios must be at least 1"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(argv: list[str], said: str, capsys) -> None:
    assert main(["placement", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1
