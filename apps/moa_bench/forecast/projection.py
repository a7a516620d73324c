"""From one replica under rising loads to GPUs and money for all users."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from moa_bench.forecast.capacity import (
    HOURS_A_MONTH,
    SHARES,
    Promise,
    busiest,
    carried,
    ceiling,
    loads_of,
    money,
    replicas,
)
from moa_bench.forecast.data import Demand, Gpu, Range
from moa_bench.forecast.drafts import Drafts
from moa_bench.forecast.fleet import EVENING, EVENING_S, LOST, LOST_S, Evening, Service, evening
from moa_bench.forecast.times import Times
from moa_bench.forecast.window import Load
from moa_bench.result import rounded
from moa_bench.server import MODES
from moa_runtime.cpus import available_cpus

#: What may be promised, milliseconds a token for 95 of 100.
PROMISES_MS = (5, 6, 7, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100)
#: A fleet that is larger is scaled down to so many replicas, each with as much to do.
MOST_REPLICAS = 20
#: Spare replicas that are compared in a bad evening.
SPARES = (0, 1, 2)


@dataclass(frozen=True)
class Case:
    """A replica that is simulated: who drafts, with drafts of what tau and devices of what speed."""

    mode: str
    tau: float
    device_ms: float


@dataclass(frozen=True)
class Plan:
    """A service that is forecast.

    Attributes:
        users: that use the service in a day.
        spare: replicas of which any may be lost.
        seconds: of each load that is simulated.
    """

    gpu: Gpu
    times: Times
    demand: Demand
    drafts: Drafts
    users: float
    promise: Promise
    spare: int = 1
    seconds: float = 12.0
    seed: int = 0

    def simulate(self, case: Case) -> list[Load]:
        """All loads of one case."""
        times = self.times.scaled(device=case.device_ms / self.demand.device_ms.base)
        drafts = self.drafts.weaker(case.tau)
        base = case.tau == self.demand.tau.base and case.device_ms == self.demand.device_ms.base
        shares = SHARES if base else SHARES[::2]
        rates = [share * ceiling(self.times, self.demand) for share in shares]
        return loads_of(times, drafts, self.demand, case.mode, rates, self.seconds, self.seed)


def cases_of(demand: Demand) -> list[Case]:
    """All that is simulated: every mode at the base, and the ends of what drafting depends on."""
    base = [Case(mode, demand.tau.base, demand.device_ms.base) for mode in MODES]
    drafting = [case for case in base if case.mode != "stream"]
    found = [*base]
    found += [replace(case, tau=tau) for case in drafting for tau in (demand.tau.low, demand.tau.high)]
    able = [case for case in drafting if case.mode != "server"]
    found += [replace(case, device_ms=ms) for case in able for ms in (demand.device_ms.low, demand.device_ms.high)]
    return list(dict.fromkeys(found))


def simulated(plan: Plan, on_case: Callable[[], None]) -> dict[Case, list[Load]]:
    """All cases, on as many processors as there are."""
    cases = cases_of(plan.demand)
    workers = min(len(cases), available_cpus())
    context = multiprocessing.get_context("spawn")
    found: dict[Case, list[Load]] = {}
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        asked = {pool.submit(plan.simulate, case): case for case in cases}
        try:
            for done in concurrent.futures.as_completed(asked):
                found[asked[done]] = done.result()
                on_case()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def projection(plan: Plan, loads: Mapping[Case, Sequence[Load]]) -> dict[str, Any]:
    """GPUs and money of each mode, with what they depend on, one at a time; for JSON."""
    demand, promise = plan.demand, plan.promise
    rate = busiest(plan.users, demand.answers_per_user.base, demand.peak.base)
    modes = {mode: _mode(plan, mode, loads) for mode in MODES}
    return {
        "hardware": plan.gpu.name,
        "title": plan.gpu.title,
        "users": plan.users,
        "promise": asdict(promise),
        "spare": plan.spare,
        "answers_per_s": rounded(rate, 1),
        "price_per_hour": asdict(plan.gpu.price),
        "hours_a_month": HOURS_A_MONTH,
        "demand": {name: asdict(getattr(demand, name)) for name in ("answers_per_user", "peak", "tau", "device_ms")},
        "modes": modes,
    }


def _mode(plan: Plan, mode: str, loads: Mapping[Case, Sequence[Load]]) -> dict[str, Any]:
    demand, gpu, promise = plan.demand, plan.gpu, plan.promise
    base = Case(mode, demand.tau.base, demand.device_ms.base)
    found = loads[base]
    each = carried(found, promise)

    def counted(carried_by_each: float, answers: float | None = None, peak: float | None = None) -> int | None:
        rate = busiest(plan.users, answers or demand.answers_per_user.base, peak or demand.peak.base)
        return replicas(rate, carried_by_each, plan.spare)

    def ends(cases: Sequence[Case]) -> list[int | None]:
        return [counted(carried(loads[case], promise)) for case in cases if case in loads]

    gpus = counted(each)
    ranged: dict[str, list[int | None]] = {
        "answers a user": [counted(each, answers=end) for end in _ends(demand.answers_per_user)],
        "busiest hour": [counted(each, peak=end) for end in _ends(demand.peak)],
    }
    if mode != "stream":
        ranged["tau"] = ends([replace(base, tau=end) for end in _ends(demand.tau)])
    if mode in ("device", "auto"):
        ranged["device step"] = ends([replace(base, device_ms=end) for end in _ends(demand.device_ms)])
    prices = {name: money(gpus, getattr(gpu.price, name)) for name in ("low", "base", "high")}
    return {
        "carried_per_s": rounded(each, 2),
        "gpus": gpus,
        "usd_per_month": {name: rounded(price, 0) for name, price in prices.items()},
        "gpus_by": ranged,
        "gpus_by_promise": [[ms, counted(carried(found, Promise(ms, promise.first_ms)))] for ms in PROMISES_MS],
        "loads": [load.as_dict() for load in found],
    }


def _ends(some: Range) -> tuple[float, float]:
    return some.low, some.high


def evenings(plan: Plan, mode: str, loads: Sequence[Load], on_fleet: Callable[[], None]) -> dict[str, Any]:
    """A lost replica and a bad evening for fleets with other numbers of spare replicas; for JSON."""
    demand, promise = plan.demand, plan.promise
    each = carried(loads, promise)
    needed = replicas(busiest(plan.users, demand.answers_per_user.base, demand.peak.base), each, 0)
    if needed is None:
        return {"mode": mode, "replicas": None, "evenings": {}}
    count = min(needed, MOST_REPLICAS)
    rate = busiest(plan.users, demand.answers_per_user.base, demand.peak.base) * count / needed
    service = Service.of(loads, plan.times.target.token_s)
    found: dict[str, Any] = {}
    for spare in SPARES:
        bad = evening(service, demand, count + spare, rate, EVENING, EVENING_S, plan.seed)
        lost = evening(service, demand, count + spare, rate, LOST, LOST_S, plan.seed)
        found[str(spare)] = {"evening": _told(bad, promise), "lost": _told(lost, promise)}
        on_fleet()
    outages = [asdict(outage) for outage in EVENING]
    return {"mode": mode, "replicas": count, "scaled_from": needed, "outages": outages, "evenings": found}


def _told(found: Evening, promise: Promise) -> dict[str, Any]:
    return {
        "asked": found.asked,
        "moved": found.moved,
        "broken_s": found.broken_s(promise.token_ms, promise.first_ms),
        "worst_token_ms": rounded(max(moment.token_ms for moment in found.moments), 1),
        "worst_first_ms": rounded(max(moment.first_ms for moment in found.moments), 0),
        "moments": [
            [moment.at_s, moment.at_once, rounded(moment.token_ms, 2), rounded(moment.first_ms, 0), moment.up]
            for moment in found.moments
        ],
    }
