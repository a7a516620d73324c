"""Many replicas in a bad evening, each as a whole: how fast it is depends on how many answers it writes.

One replica was simulated in detail under rising loads. Here each replica is a *flow-equivalent server* (Chandy, Herzog
and Woo 1975, "Parametric analysis of queuing networks"): it shares itself among its answers, at the speed that the
detailed simulation found for as many of them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from moa_bench.forecast.data import Demand
from moa_bench.forecast.window import Load
from moa_server.scheduling.scheduler import STRETCH

#: From a lost replica to the client's Hello elsewhere, seconds: two failed attempts.
_RECONNECT_S = 1.0
#: Part of a step that prompts may have while others are served.
_PROMPTS = (STRETCH - 1) / STRETCH
#: What an evening's figures are taken every, seconds.
EVERY_S = 15.0

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Service:
    """What a replica does for ``at_once`` answers at a time, by rising numbers of them; seconds.

    Attributes:
        token_s, token_p95_s: for a token, mean and 95th percentile.
        first_s, first_p95_s: to the first token.
        prompt_s: of the target for each token of a prompt.
    """

    at_once: tuple[float, ...]
    token_s: tuple[float, ...]
    token_p95_s: tuple[float, ...]
    first_s: tuple[float, ...]
    first_p95_s: tuple[float, ...]
    prompt_s: float

    @classmethod
    def of(cls, loads: Sequence[Load], prompt_s: float) -> Service:
        """From the loads of one replica."""
        rising = sorted(loads, key=lambda load: load.at_once)
        columns = [
            tuple((getattr(load, name)[key] or 0.0) / 1000 for load in rising)
            for name, key in (
                ("ms_per_token", "mean"),
                ("ms_per_token", "p95"),
                ("ttft_ms", "mean"),
                ("ttft_ms", "p95"),
            )
        ]
        return cls(tuple(load.at_once for load in rising), *columns, prompt_s)

    def at(self, column: Sequence[float], answers: float) -> float:
        """A column at so many answers; beyond the last load everything takes longer in proportion."""
        last = self.at_once[-1]
        found = float(np.interp(answers, self.at_once, column))
        return found * max(1.0, answers / last)


@dataclass(frozen=True)
class Outage:
    """What happens at a moment, and for how long, seconds.

    Attributes:
        replicas: that are lost at once.
        users: share of them that have no link; what they would have asked meanwhile they ask within ``rush_s`` of its
            return.
    """

    at_s: float
    lasts_s: float
    replicas: int = 0
    users: float = 0.0
    rush_s: float = 30.0


#: A quarter of an hour of the busiest one, as it should not be: an evening's outages one soon after the other.
EVENING = (
    Outage(at_s=120, lasts_s=210, replicas=1),
    Outage(at_s=420, lasts_s=120, users=0.2),
    Outage(at_s=660, lasts_s=120, replicas=2),
)
EVENING_S = 900.0
#: The half minute before one replica is lost for good, and two minutes behind it.
LOST = (Outage(at_s=30, lasts_s=math.inf, replicas=1),)
LOST_S = 150.0


@dataclass(frozen=True)
class Moment:
    """A fleet at a time.

    Attributes:
        at_once: answers under way.
        token_ms, first_ms: 95th percentiles of a replica, mean over all answers; infinite where no replica is left.
        up: replicas.
    """

    at_s: float
    at_once: int
    token_ms: float
    first_ms: float
    up: int


@dataclass(frozen=True)
class Evening:
    """What became of a fleet. ``moved``: answers that went on at another replica than they began at."""

    moments: list[Moment]
    asked: int
    moved: int

    def broken_s(self, token_ms: float, first_ms: float) -> float:
        """Seconds in which a promise was not kept."""
        return EVERY_S * sum(moment.token_ms > token_ms or moment.first_ms > first_ms for moment in self.moments)


class _Shared:
    """One replica: a processor that answers share. An answer's work is its tokens."""

    def __init__(self, env: simpy.Environment, service: Service) -> None:
        self.up, self.answers = True, 0
        self._env, self._service = env, service
        self._ends: list[tuple[float, int, simpy.Event]] = []  # by the tokens that each answer will have had by then
        self._numbers = itertools.count()
        self._tokens, self._since = 0.0, 0.0
        self._prompts_until = 0.0
        self._changed = env.event()
        env.process(self._run())

    def first_s(self, column: Sequence[float]) -> float:
        """To a first token that is asked for now."""
        return self._service.at(column, self.answers) + max(0.0, self._prompts_until - self._env.now)

    def token_s(self, column: Sequence[float]) -> float:
        """For a token by now."""
        return self._service.at(column, self.answers)

    def read(self, tokens: int) -> None:
        """A prompt that was not foreseen takes its place behind the others like it."""
        began = max(self._prompts_until, self._env.now)
        self._prompts_until = began + tokens * self._service.prompt_s / _PROMPTS

    def write(self, tokens: float) -> simpy.Event:
        """The event comes with None when so many tokens are written, with what is left if the replica is lost."""
        self._advance()
        done = self._env.event()
        heapq.heappush(self._ends, (self._tokens + tokens, next(self._numbers), done))
        self._wake()
        return done

    def joined(self, count: int) -> None:
        """So many answers came, or left."""
        self._advance()
        self.answers += count
        self._wake()

    def lose(self) -> None:
        """It is gone, and its answers with it."""
        self._advance()
        self.up, lost, self._ends = False, self._ends, []
        for end, _, done in lost:
            done.succeed(max(0.0, end - self._tokens))

    def _wake(self) -> None:
        if not self._changed.triggered:
            self._changed.succeed()

    def _advance(self) -> None:
        """Every answer got as many tokens since as one at this speed."""
        now = self._env.now
        if self._ends:
            self._tokens += (now - self._since) / max(1e-9, self.token_s(self._service.token_s))
        self._since = now

    def _run(self) -> Process:
        while True:
            self._advance()
            while self._ends and self._ends[0][0] <= self._tokens + 1e-9:
                heapq.heappop(self._ends)[2].succeed()
            self._changed = self._env.event()
            if self._ends:
                left_s = (self._ends[0][0] - self._tokens) * self.token_s(self._service.token_s)
                yield self._changed | self._env.timeout(max(left_s, 1e-6))
            else:
                yield self._changed


class _Fleet:
    def __init__(self, service: Service, demand: Demand, replicas: int, rate: float, seed: int) -> None:
        self.env = simpy.Environment()
        self.replicas = [_Shared(self.env, service) for _ in range(replicas)]
        self.moments: list[Moment] = []
        self.asked = self.moved = 0
        self._service, self._demand, self._rate = service, demand, rate
        self._rng = random.Random(seed)
        self._away = 0.0  # share of users without a link
        self.env.process(self._come())
        self.env.process(self._watch())

    def happens(self, outage: Outage) -> Process:
        yield self.env.timeout(outage.at_s)
        lost = [replica for replica in self.replicas if replica.up][: outage.replicas]
        for replica in lost:
            replica.lose()
        self._away += outage.users
        if math.isinf(outage.lasts_s):
            return
        yield self.env.timeout(outage.lasts_s)
        for replica in lost:
            replica.up = True
        self._away -= outage.users
        for _ in range(round(self._rate * outage.users * outage.lasts_s)):
            self.env.process(self._ask(self._rng.uniform(0, outage.rush_s)))

    def _come(self) -> Process:
        while True:
            yield self.env.timeout(self._rng.expovariate(self._rate))
            if self._rng.random() >= self._away:
                self.env.process(self._ask())

    def _ask(self, after_s: float = 0.0) -> Process:
        if after_s:
            yield self.env.timeout(after_s)
        self.asked += 1
        question = self._demand.question(self._rng)
        left, known = float(question.answer), question.prompt
        moved = False
        while left > 0:
            replica = self._chosen()
            if replica is None:  # all are lost: it asks again
                yield self.env.timeout(_RECONNECT_S)
                continue
            if moved:
                replica.read(known)
            replica.joined(1)
            yield self.env.timeout(replica.first_s(self._service.first_s))
            rest = (yield replica.write(left)) if replica.up else left
            replica.joined(-1)
            if rest is None:
                return
            known, left, moved = known + int(left - rest), rest, True
            self.moved += 1
            yield self.env.timeout(_RECONNECT_S)

    def _chosen(self) -> _Shared | None:
        """By a hash of the conversation, whatever it has to do."""
        up = [replica for replica in self.replicas if replica.up]
        return self._rng.choice(up) if up else None

    def _watch(self) -> Process:
        while True:
            yield self.env.timeout(EVERY_S)
            up = [replica for replica in self.replicas if replica.up]
            tokens = _mean([(each.token_s(self._service.token_p95_s), each.answers) for each in up])
            firsts = _mean([(each.first_s(self._service.first_p95_s), 1) for each in up])
            at_once = sum(replica.answers for replica in self.replicas)
            self.moments.append(Moment(self.env.now, at_once, 1000 * tokens, 1000 * firsts, len(up)))


def _mean(figures: Sequence[tuple[float, int]]) -> float:
    """Of figures with weights; infinite where there are none."""
    weights = sum(weight for _, weight in figures)
    return sum(figure * weight for figure, weight in figures) / weights if weights else math.inf


def evening(
    service: Service,
    demand: Demand,
    replicas: int,
    rate: float,
    outages: Sequence[Outage] = EVENING,
    seconds: float = EVENING_S,
    seed: int = 0,
) -> Evening:
    """So many replicas, for which ``rate`` answers a second are asked together."""
    fleet = _Fleet(service, demand, replicas, rate, seed)
    for outage in outages:
        fleet.env.process(fleet.happens(outage))
    fleet.env.run(seconds)
    return Evening(fleet.moments, fleet.asked, fleet.moved)
