"""A replica and clients for a while: as many at once as one says, or as they come."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from moa_bench.forecast.answers import Client, Process, Question, Verifier
from moa_bench.forecast.drafts import Drafts
from moa_bench.forecast.replica import Replica
from moa_bench.forecast.times import Times
from moa_bench.latency import mean_ms, percentile_ms, token_latencies
from moa_bench.result import rounded
from moa_bench.server.measure import WindowResult
from moa_bench.server.record import AnswerRecord, ClientRecord

#: Of an open window, before what counts begins.
WARM_UP_S = 8.0


def closed(
    times: Times,
    drafts: Drafts,
    questions: Sequence[Question],
    mode: str,
    clients: int,
    seconds: float,
    seed: int,
    trip_s: float = 0.0,
    client_cpus: int | None = None,
) -> WindowResult:
    """A window of ``moa-bench server``: all clients begin together and ask one question after the other, each with
    another one first; what arrives behind its end does not count.

    Args:
        client_cpus: processors that the clients share; None, and each has its own.
    """
    env = simpy.Environment()
    processors = simpy.Resource(env, client_cpus) if client_cpus else None
    verifier = Verifier(Replica(env, times))
    records: list[ClientRecord] = []
    for number in range(clients):
        first = number % len(questions)
        order = [*questions[first:], *questions[:first]]
        record = ClientRecord([], 0.0)
        records.append(record)
        client = Client(env, verifier, drafts, times, mode, trip_s, random.Random(f"{seed} {number}"), processors)
        env.process(_without_end(client, order, record.answers.append))
    env.run(seconds)
    cut = [ClientRecord([_until(answer, seconds) for answer in record.answers], 0.0) for record in records]
    return WindowResult(cut, verifier.replica.steps, None)


def _without_end(client: Client, order: Sequence[Question], keep: Callable[[AnswerRecord], None]) -> Process:
    while True:
        for question in order:
            yield from client.answer(question, keep)


def _until(answer: AnswerRecord, seconds: float) -> AnswerRecord:
    return AnswerRecord(answer.asked_at, [burst for burst in answer.bursts if burst.at <= seconds])


@dataclass(frozen=True)
class Load:
    """What a replica did under a load, of answers that were asked for within the window.

    Attributes:
        rate: answers asked for a second.
        answers: that were begun.
        finished: share of them that ended before the window did.
        tokens_per_s: that arrived.
        at_once: answers under way, mean.
        busy: share of the time in which the verifier was not idle.
    """

    rate: float
    answers: int
    finished: float
    tokens_per_s: float
    at_once: float
    busy: float
    ms_per_token: dict[str, float | None]
    ttft_ms: dict[str, float | None]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "answers_per_s": rounded(self.rate),
            "answers": self.answers,
            "finished": rounded(self.finished),
            "tokens_per_s": rounded(self.tokens_per_s, 1),
            "at_once": rounded(self.at_once, 2),
            "busy": rounded(self.busy),
            "ms_per_token": self.ms_per_token,
            "ttft_ms": self.ttft_ms,
        }


def opened(
    times: Times,
    drafts: Drafts,
    draw: Callable[[random.Random], Question],
    trip: Callable[[random.Random], float],
    mode: str,
    rate: float,
    seconds: float,
    seed: int,
) -> Load:
    """Clients come at random, ``rate`` a second (Poisson), ask one question each and leave."""
    env = simpy.Environment()
    verifier = Verifier(Replica(env, times))
    rng = random.Random(f"{seed} {rate}")
    records: list[AnswerRecord] = []
    ends: list[float] = []

    def ask() -> Process:
        client = Client(env, verifier, drafts, times, mode, trip(rng), random.Random(rng.random()))
        asked = env.now
        yield from client.answer(draw(rng), records.append)
        ends.append(asked)

    def come() -> Process:
        while True:
            yield env.timeout(rng.expovariate(rate))
            env.process(ask())

    env.process(come())
    env.run(WARM_UP_S)
    busy_s = verifier.replica.busy_s
    env.run(WARM_UP_S + seconds)
    within = [record for record in records if record.asked_at >= WARM_UP_S]
    latencies = [latency for record in within for latency in token_latencies(record.bursts)]
    # Who still waits for the first token has waited as long at least.
    waits = [(record.bursts[0].at if record.bursts else env.now) - record.asked_at for record in within]
    tokens = sum(burst.tokens for record in records for burst in record.bursts if WARM_UP_S <= burst.at <= env.now)
    return Load(
        rate,
        len(within),
        sum(asked >= WARM_UP_S for asked in ends) / max(1, len(within)),
        tokens / seconds,
        _at_once(records, WARM_UP_S, env.now),
        min(1.0, (verifier.replica.busy_s - busy_s) / seconds),
        {"mean": mean_ms(latencies), "p50": percentile_ms(latencies, 50), "p95": percentile_ms(latencies, 95)},
        {"mean": mean_ms(waits), "p95": percentile_ms(waits, 95)},
    )


def _at_once(records: Sequence[AnswerRecord], begin: float, end: float) -> float:
    """Mean number of answers between their question and their last token."""
    lasted = 0.0
    for record in records:
        last = record.bursts[-1].at if record.bursts else end
        lasted += max(0.0, min(last, end) - max(record.asked_at, begin))
    return lasted / (end - begin)
