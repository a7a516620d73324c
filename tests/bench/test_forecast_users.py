"""The forecast for all users: what a replica carries, GPUs and money, a fleet in a bad evening."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.forecast_toy import DRAFTS, TREE
from moa_bench.forecast import present
from moa_bench.forecast.capacity import Promise, busiest, carried, money, replicas
from moa_bench.forecast.data import assumptions, demand, gpu, hardware
from moa_bench.forecast.fleet import EVERY_S, Outage, Service, evening
from moa_bench.forecast.projection import Case, Plan, cases_of, evenings, projection
from moa_bench.forecast.times import StepTimes
from moa_bench.forecast.window import Load
from moa_bench.output import plot
from moa_bench.server import MODES


def load(rate: float, token_ms: float, first_ms: float = 100.0, at_once: float = 1.0) -> Load:
    return Load(
        rate, 100, 1.0, 0.0, at_once, 0.5, {"mean": token_ms / 2, "p95": token_ms}, {"mean": first_ms, "p95": first_ms}
    )


def test_a_replica_carries_what_keeps_the_promise() -> None:
    loads = [load(1, 10), load(2, 20), load(4, 40, first_ms=900)]
    assert carried(loads, Promise(15, 1000)) == pytest.approx(1.5)
    assert carried(loads, Promise(30, 1000)) == pytest.approx(3.0)
    assert carried(loads, Promise(100, 500)) == pytest.approx(3.0)  # the first token is what breaks it
    assert carried(loads, Promise(100, 1000)) == 4 and carried(loads, Promise(5, 1000)) == 0.0


def test_gpus_and_money() -> None:
    rate = busiest(864_000, 10, 2)
    assert rate == pytest.approx(200)
    assert replicas(rate, 30.0) == 8 and replicas(rate, 30.0, 0) == 7 and replicas(rate, 0.0) is None
    assert money(8, 2.0) == pytest.approx(8 * 2 * 730) and money(None, 2.0) is None


def planned(promise_ms: float = 15.0) -> tuple[Plan, dict[Case, list[Load]]]:
    """Loads by hand: every mode carries three answers a second at 15 ms, drafts of a low tau one."""
    hardware, asked = gpu("h100-fp8"), demand(DRAFTS.tau(TREE))
    plan = Plan(hardware, hardware.times(8.0), asked, DRAFTS, 864_000, Promise(promise_ms, 1000))
    loads = {}
    for case in cases_of(asked):
        slow = 3.0 if case.tau < asked.tau.base else 1.0
        loads[case] = [load(rate / slow, 5.0 * rate, at_once=2 * rate) for rate in (1, 2, 3, 4)]
    return plan, loads


def test_a_projection_counts_gpus_for_the_busiest_hour() -> None:
    plan, loads = planned()
    told = projection(plan, loads)
    rate = 864_000 * 8 / 86_400 * 2
    assert told["answers_per_s"] == pytest.approx(rate) and rate == 160
    assert {mode: figures["gpus"] for mode, figures in told["modes"].items()} == dict.fromkeys(MODES, -(-160 // 3) + 1)
    stream = told["modes"]["stream"]
    assert stream["usd_per_month"]["base"] == pytest.approx(55 * 2.95 * 730, abs=1)
    assert stream["gpus_by"]["answers a user"] == [28, 108] and "tau" not in stream["gpus_by"]
    assert dict(stream["gpus_by_promise"])[20] == 41 and dict(stream["gpus_by_promise"])[100] == 41
    none = projection(planned(1.0)[0], loads)["modes"]["stream"]
    assert none["gpus"] is None and none["usd_per_month"]["base"] is None


def test_a_forecast_is_told_and_drawn(tmp_path: Path) -> None:
    plan, loads = planned()
    base = Case("auto", plan.demand.tau.base, plan.demand.device_ms.base)
    few = replace(plan, users=10_000)
    result = {
        "benchmark": "forecast",
        "projection": projection(few, loads),
        "fleet": evenings(few, "auto", loads[base], lambda: None),
        "assumptions": {"hardware": hardware()["assumptions"], "demand": assumptions()["assumptions"]},
    }
    json.dumps(result)
    text = "\n".join(table.text() for table in present.tables(result))
    assert "whoever is faster (auto)" in text and "1 GPUs lost" in text and "assumed: " in text
    told = result["fleet"]
    assert told["replicas"] == told["scaled_from"] == 1
    lost = [told["evenings"][str(spare)]["lost"]["broken_s"] for spare in (0, 2)]
    assert lost[0] > lost[1]  # without a spare one there is none left
    plot(result, present, tmp_path / "forecast.png")
    assert (tmp_path / "forecast.png").read_bytes()[:4] == b"\x89PNG"


SERVICE = Service((1.0, 10.0), (0.01, 0.02), (0.015, 0.03), (0.1, 0.2), (0.2, 0.4), 1e-5)


def test_a_fleet_writes_as_fast_as_its_replicas() -> None:
    asked = demand(4.0)
    quiet = evening(SERVICE, asked, 4, 2.0, (), 600.0)
    mean_tokens = sum(asked.answers) / len(asked.answers)
    at_once = np.mean([moment.at_once for moment in quiet.moments[4:]])
    # Little's law: 0.5 answers a second for each, which take their first token and then the others at some speed.
    speeds = [np.interp(at_once / 4, SERVICE.at_once, column) for column in (SERVICE.first_s, SERVICE.token_s)]
    assert at_once == pytest.approx(2.0 * (speeds[0] + mean_tokens * speeds[1]), rel=0.15)
    assert quiet.moved == 0 and {moment.up for moment in quiet.moments} == {4}


def test_a_lost_replica_moves_its_answers_and_none_is_lost() -> None:
    lost = evening(SERVICE, demand(4.0), 4, 2.0, (Outage(300.0, 120.0, replicas=2),), 600.0)
    assert lost.moved > 0
    up = {moment.at_s: moment.up for moment in lost.moments}
    assert up[300 + EVERY_S] == 2 and up[420 + EVERY_S] == 4
    before, during = (
        [m.token_ms for m in lost.moments if begin < m.at_s <= end] for begin, end in ((150, 300), (330, 420))
    )
    assert np.mean(during) > np.mean(before)


def test_users_that_come_back_at_once_are_a_rush() -> None:
    back = evening(SERVICE, demand(4.0), 4, 2.0, (Outage(200.0, 200.0, users=0.5),), 600.0)
    at_once = {moment.at_s: moment.at_once for moment in back.moments}
    assert at_once[390] < at_once[195] < at_once[435]
    assert back.asked == pytest.approx(1200, rel=0.1)


def test_published_figures_and_the_closed_form() -> None:
    """What the data files hold can be read, and the form of a step's time fits it."""
    for name in ("h100-fp8", "h100-fp16"):
        published = gpu(name)
        errors = StepTimes.fit(published.steps).errors(published.steps)
        assert max(map(abs, errors)) < 0.35
        times = published.times(8.0)
        assert times.target.pass_s > StepTimes.fit(published.steps).pass_s  # a server is slower than its steps
