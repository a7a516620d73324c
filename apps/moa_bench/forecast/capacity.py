"""How many answers a replica carries while it keeps a promise, and what that makes for all users."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moa_bench.forecast.data import Demand
from moa_bench.forecast.drafts import Drafts
from moa_bench.forecast.times import Times
from moa_bench.forecast.window import Load, opened

#: Loads that are simulated, as shares of what a replica could do if steps cost nothing but their tokens.
SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)
#: A load that finishes fewer answers than are asked for has no end to its queue.
_LEAST_FINISHED = 0.5
_DAY_S = 86_400.0
HOURS_A_MONTH = 730.0


@dataclass(frozen=True)
class Promise:
    """What 95 of 100 tokens and first tokens take at most, milliseconds."""

    token_ms: float
    first_ms: float

    def kept(self, load: Load) -> bool:
        """Whether a replica under this load keeps it."""
        token_ms, first_ms = load.ms_per_token["p95"], load.ttft_ms["p95"]
        in_time = token_ms is not None and token_ms <= self.token_ms and first_ms is not None
        return in_time and first_ms is not None and first_ms <= self.first_ms


def ceiling(times: Times, demand: Demand) -> float:
    """Answers a second of a replica that streams, if steps took no time besides that of their tokens."""
    prompt, answer = (sum(each) / len(each) for each in (demand.prompts, demand.answers))
    target, context = times.target, prompt + answer / 2
    decode_s = target.token_s + context * (target.product_s + target.context_s) + times.verdict_s
    return 1 / (prompt * target.token_s + answer * decode_s)


def loads_of(
    times: Times, drafts: Drafts, demand: Demand, mode: str, rates: Sequence[float], seconds: float, seed: int
) -> list[Load]:
    """A replica at each rate, in rising order; behind the first one that it cannot carry there is no other."""
    found: list[Load] = []
    for rate in sorted(rates):
        found.append(opened(times, drafts, demand.question, demand.trip, mode, rate, seconds, seed))
        if found[-1].finished < _LEAST_FINISHED:
            break
    return found


def carried(loads: Sequence[Load], promise: Promise) -> float:
    """Answers a second up to which the promise is kept; between two loads by the figure that is nearer to breaking it.
    0 where not even the smallest load keeps it."""
    kept = 0.0
    before: Load | None = None
    for load in loads:
        if promise.kept(load):
            kept, before = load.rate, load
            continue
        if before is None:
            return 0.0
        limits = ((promise.token_ms, "ms_per_token"), (promise.first_ms, "ttft_ms"))
        shares = [_share(limit, getattr(before, name)["p95"], getattr(load, name)["p95"]) for limit, name in limits]
        return kept + min(shares) * (load.rate - kept)
    return kept


def _share(limit: float, low: float | None, high: float | None) -> float:
    """How far from ``low`` to ``high`` the limit lies; all of the way where ``high`` does not break it."""
    if low is None or high is None:
        return 0.0
    return 1.0 if high <= limit else (limit - low) / (high - low)


def busiest(users: float, answers_per_user: float, peak: float) -> float:
    """Answers a second in the busiest hour."""
    return users * answers_per_user / _DAY_S * peak


def replicas(rate: float, each: float, spare: int = 1) -> int | None:
    """How many carry so many answers a second, and ``spare`` more of which any may be lost; None where none can."""
    return math.ceil(rate / each) + spare if each > 0 else None


def money(count: int | None, price: float) -> float | None:
    """US dollars a month for GPUs that run day and night."""
    return None if count is None else count * price * HOURS_A_MONTH
