"""Devices and a verifier on simulated time: the real drafting loops, sessions, drafts, prices and scheduler, with a
drafter and a target that are replayed from a recording and take the time that they are given."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from math import exp, log
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import simpy
from numpy.typing import NDArray

from moa_bench.harness import Conversation, LoopbackVerifier, Round
from moa_bench.recording import RecordedAnswer, RecordedBackend, Recording, replayed_drafter, replayed_target
from moa_bench.result import Burst, rounded
from moa_bench.serving import Answer
from moa_bench.simulated_clock import Clock, Pace, Times
from moa_runtime.drafters.base import Budget, Drafter
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.draft_controllers import Controller, FixedShape
from moa_runtime.drafting.draft_policy import clip_budget
from moa_runtime.drafting.events import Draft, LoopEvent, Pushed, RoundEnded
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.options import DRAFTINGS, Conditions, Drafting, LoopSettings
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Sampling
from moa_runtime.session.handshake import Limits
from moa_runtime.session.server import RowsWork, ServerSession, Verify, parse_client_message
from moa_runtime.session.tree import DraftTree
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine.base import new_sequence
from moa_server.scheduling.scheduler import Scheduler, Step, Waiting
from moa_server.scheduling.step_cost import StepCost
from moa_server.scheduling.verify_job import Job
from moa_server.sessions import asked_to_draft, job_of, take_rows, verdict_of
from moa_server.settings import Settings

#: Nothing is late here: a device that writes on alone is not simulated.
_PATIENCE_S = 1e6
_LEAST_S = 1e-9  # a token that costs nothing would let the scheduler divide by zero

Process = Generator[simpy.Event, Any, Any]
T = TypeVar("T")


class _KnownCost(StepCost):
    """The cost of steps, known to the scheduler from the start."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self._weights = np.array([times.pass_s, max(times.token_s, _LEAST_S), 0.0, 0.0])

    def observe(self, tokens: int, products: int, contexts: int, seconds: float) -> None:
        """Learn nothing."""


class Target:
    """The target of all conversations: its real scheduler over real jobs, and steps that take their simulated time. It
    does one thing at a time: a step, or the drafts that the server wants at that moment. ``times`` returns the current
    times, ``active`` holds the round trips of the answers under way, by sequence."""

    def __init__(self, env: simpy.Environment, recording: Recording, times: Callable[[], Times]) -> None:
        self.engine = replayed_target(recording)
        self.active: dict[int, float] = {}
        self.passes = 0
        self.env, self.recording, self.times = env, recording, times
        self.scheduler = Scheduler(_KnownCost(times()))
        self._waiting: dict[int, simpy.Event] = {}  # by identity of the job
        self._drafts: list[tuple[DraftTree, simpy.Event]] = []
        self._more = env.event()
        env.process(self._run())

    def run(self, job: Job) -> simpy.Event:
        """Hand in a job; the event occurs when it is done."""
        done = self._waiting[id(job)] = self.env.event()
        self.scheduler.add(Waiting(job, self.env.now))
        self._wake()
        return done

    def draft(self, tree: DraftTree) -> simpy.Event:
        """Let the server's drafter make ``tree``; the event's value is the time that this took, seconds."""
        done = self.env.event()
        self._drafts.append((tree, done))
        self._wake()
        return done

    def rest(self, sequence: int) -> None:
        """End an answer."""
        self.scheduler.rest(sequence)
        self.active.pop(sequence, None)

    def _wake(self) -> None:
        if not self._more.triggered:
            self._more.succeed()

    def _run(self) -> Process:
        while True:
            yield self.env.timeout(0)  # conversations that were answered hand in their next work
            if self._drafts:
                yield from self._make_drafts()
            elif (step := self.scheduler.plan(self.env.now, self.engine.held)).pieces:
                yield from self._take(step)
            else:
                self._more = self.env.event()
                yield self._more

    def _make_drafts(self) -> Process:
        """Make all waiting drafts, their steps in parallel."""
        (drafts, self._drafts), times = (self._drafts, []), self.times()
        steps, queries = max(len(tree.steps) for tree, _ in drafts), sum(sum(tree.steps) for tree, _ in drafts)
        seconds = steps * (times.server_step_s or 0.0) + queries * times.server_query_s
        yield self.env.timeout(seconds)
        for _, done in drafts:
            done.succeed(seconds)

    def _take(self, step: Step) -> Process:
        times, outcomes = self.times(), finish(self.engine.step([piece.request for piece in step.pieces]))
        seconds = times.compute_s(step.tokens)
        yield self.env.timeout(times.queue_s + seconds)
        for piece, outcome in zip(step.pieces, outcomes, strict=True):
            piece.waiting.job.seconds += seconds
            piece.waiting.job.take(piece.request, outcome)
        self.passes += 1
        self.scheduler.stepped(step, self.env.now)
        for piece in step.pieces:
            if piece.waiting.job.done:
                self._waiting.pop(id(piece.waiting.job)).succeed()


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a replayed engine waits for nothing")


class _Way:
    """One direction of a link, which keeps the order of frames.

    Attributes:
        frames: arrived ones, with the time of their arrival.
        arrival: the event of the next one.
    """

    def __init__(self, target: Target, draws: random.Random) -> None:
        self.frames: deque[tuple[float, bytes]] = deque()
        self._env, self._times, self._draws, self._last = target.env, target.times, draws, 0.0
        self.arrival = self._env.event()

    def send(self, frame: bytes) -> None:
        times, now = self._times(), self._env.now
        self._last = max(self._last, now + times.round_trip_s / 2 * (1 + times.jitter * self._draws.random()))
        self._env.process(self._deliver(frame, self._last - now))

    def _deliver(self, frame: bytes, after: float) -> Process:
        yield self._env.timeout(after)
        self.frames.append((self._env.now, frame))
        arrival, self.arrival = self.arrival, self._env.event()
        arrival.succeed()


class _ServerEnd:
    """The verifier's end of one conversation: frames that have arrived, then pushed verdicts, then memory rows."""

    def __init__(self, target: Target, up: _Way, down: _Way, drafter: Drafter | None) -> None:
        engine = target.engine
        limits = Limits(max_context=engine.max_context, trees=True)
        self.session = ServerSession(limits, engine.vocab_size, engine.stop_tokens)
        self.sequence = new_sequence()
        self._env, self._target, self._up, self._down = target.env, target, up, down
        self._drafter, self._controller = drafter, CostModel()
        self._stamped: tuple[int, float] | None = None
        self._env.process(self._run())

    def _run(self) -> Process:
        while True:
            if frames := self._up.frames:
                if (work := self._receive(*frames.popleft())) is not None:
                    yield from self._do(work)
            elif (work := self.session.next_work()) is not None:
                yield from self._do(work)
            elif (rows := self.session.take_rows()) is not None:
                self._send(rows)
            else:
                yield self._up.arrival

    def _receive(self, arrived: float, frame: bytes) -> Verify | None:
        message = parse_client_message(frame)
        assert isinstance(message, wire.ClientMessage)
        event = message.WhichOneof("event")
        if event == "hello":
            capabilities = [] if self._drafter is None else [wire.CAPABILITY_DRAFTS]
            answers = self.session.greet(message.hello, "simulated", capabilities=capabilities)
        else:
            stamp = getattr(getattr(message, event), "stamp", 0)
            self._stamped = (stamp, arrived) if stamp else self._stamped
            work = self.session.receive(message)
            if not isinstance(work, wire.ServerMessage):
                return work
            answers = [work]
        for answer in answers:
            self._send(answer)
        return None

    def _do(self, work: Verify | RowsWork) -> Process:
        if isinstance(work, RowsWork):  # takes no time of the target
            job = job_of(work, self.sequence)
            while not job.done:
                request = job.request(self._target.engine.held(self.sequence, job.prefix), len(job.prefix))
                job.take(request, finish(self._target.engine.step([request]))[0])
            take_rows(self.session, job)
            self._send_rows()
            return
        tree, draft_s = DraftTree(), 0.0
        if work.pushed and self._drafter is not None and (room := self.session.room) is not None and room > 1:
            budget = clip_budget(self._controller.budget(), self.session.limits, room - 1, Conditions())
            tree = self._drafter.propose(work.prefix, budget, work.sampling)
            if tree.steps:
                draft_s = yield self._target.draft(tree)
            work = replace(work, draft=tree.tokens, parents=tree.parents)
        began, job = self._env.now, job_of(work, self.sequence)
        yield self._target.run(job)
        sharing = self._target.scheduler.serving
        if work.pushed and self._drafter is not None:
            counts = (len(tree.tokens), tree.depth, len(job.path), tree.steps)
            waited_s = self._env.now - began
            self._controller.observe(RoundEnded(0, *counts, draft_s, waited_s, job.seconds))
        verdict = verdict_of(self.session, work, job, job.seconds, draft_s, sharing)
        active = self._target.active
        verdict.verdict.drafts_wanted = self.sequence in asked_to_draft(active, len(active), Settings().ask_from)
        self._send(verdict)
        self._send_rows()

    def _send_rows(self) -> None:
        while (rows := self.session.take_rows()) is not None:
            self._send(rows)
            if self.session.pushes:
                break

    def _send(self, message: wire.ServerMessage) -> None:
        event = message.WhichOneof("event")
        if self._stamped is not None and event in ("verdict", "standing"):
            (stamp, arrived), self._stamped = self._stamped, None
            held_us = int(1e6 * (self._env.now - arrived))
            getattr(message, event).echo.CopyFrom(wire.Echo(stamp=stamp, held_us=held_us))
        self._down.send(message.SerializeToString())


class Client:
    """A device, its link, and the verifier's end of its conversation.

    Args:
        mode: a value of ``--drafting``, or ``"stream"``: the server writes token by token.
        seed: of the link's jitter.

    Attributes:
        records: of the answers so far, in seconds of simulated time.
        text: tokens of all answers.
        pushed: tokens that the server wrote without being asked.
    """

    def __init__(self, target: Target, mode: str, seed: int) -> None:
        self.records: list[Answer] = []
        self.text: list[int] = []
        self.pushed = 0
        self._env, self._target, self._times = target.env, target, target.times
        recording, draws = target.recording, random.Random(seed)
        self._up, self._down = _Way(target, draws), _Way(target, draws)
        self._backends = [RecordedBackend(recording.answers[0]) for _ in range(2)]
        mine, servers = (replayed_drafter(recording, backend) for backend in self._backends)
        self._drafts = drafts = mode != "stream"
        server_drafts = drafts and self._times().server_step_s is not None
        self._server = _ServerEnd(target, self._up, self._down, servers if server_drafts else None)
        session = ClientSession(recording.fingerprints, stop_tokens=recording.stop_tokens)
        drafting = mode if drafts else "server"
        settings = LoopSettings(late_after_s=_PATIENCE_S, prefill_late_after_s=_PATIENCE_S, drafting=drafting)
        self._loop = DraftingLoop(session, mine if drafts else None, CostModel(), settings)
        self._loop.listen(self._hear)
        self._loop.opened()

    @property
    def seconds(self) -> float:
        """Sum of the times from an answer's first token to its last."""
        return sum(record.bursts[-1].at - record.bursts[0].at for record in self.records)

    def answer(self, answers: Iterable[RecordedAnswer]) -> Process:
        """Have the answers written one after the other, each in a new conversation over one connection."""
        for answer in answers:
            self.records.append(Answer(self._env.now))
            for backend in self._backends:
                backend.replay(answer)
            if self._drafts:
                self._target.active[self._server.sequence] = self._times().round_trip_s
            self._loop.ask(0, answer.prompt, Sampling(), len(answer.answer))
            while self._loop.answering:
                yield from self._act()
            self._target.rest(self._server.sequence)

    def _act(self) -> Process:
        """Take frames that have arrived, then draft and send, or wait."""
        loop, env = self._loop, self._env
        while self._down.frames:
            loop.received(self._down.frames.popleft()[1], env.now)
        todo = loop.next(env.now) if loop.answering else None
        if isinstance(todo, Draft):
            tree = todo.by.propose(todo.prefix, todo.budget, todo.sampling)
            seconds = self._times().draft_s(tree)
            yield env.timeout(seconds)
            loop.drafted(todo, tree, seconds, env.now)
        for frame in loop.frames_to_send(env.now):
            self._up.send(frame)
        if todo is None or isinstance(todo, Draft) or self._down.frames:
            return
        alarm = [] if todo.until is None else [env.timeout(max(0.0, todo.until - env.now))]
        yield simpy.AnyOf(env, [self._down.arrival, *alarm])

    def _hear(self, event: LoopEvent) -> None:
        if isinstance(event, Committed):
            self.text.extend(event.tokens)
            self.records[-1].bursts.append(Burst(self._env.now, len(event.tokens)))
        elif isinstance(event, Pushed):
            self.pushed += event.accepted + 1


def simulate_window(
    recording: Recording, times: Times, mode: str, sessions: int, seconds: float
) -> tuple[list[Answer], int]:
    """Let clients ask without a pause for ``seconds`` of simulated time, each beginning with another answer.

    Returns:
        the answers, with the tokens that arrived in time, and the passes of the target.
    """
    env = simpy.Environment()
    target = Target(env, recording, lambda: times)
    clients = [Client(target, mode, number) for number in range(sessions)]
    for number, client in enumerate(clients):
        first = number % len(recording.answers)
        order = [*recording.answers[first:], *recording.answers[:first]]
        env.process(client.answer(itertools.cycle(order)))
    env.run(seconds)
    return [record.until(seconds) for client in clients for record in client.records], target.passes


#: Tokens of the answers of a scenario.
TOKENS = {"shapes": 400, "placement": 600}
#: Changes that may happen to a scenario half-way.
CHANGES = ("none", "link slower", "link faster", "verifier busy", "verifier free")


def _log_uniform(rng: random.Random, least: float, most: float) -> float:
    return exp(rng.uniform(log(least), log(most)))


def _some_answers(rng: random.Random, lengths: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Draw numbers of answers until they have ``tokens`` tokens together, or all of them."""
    order = rng.sample(range(len(lengths)), len(lengths))
    taken = next((n for n in range(len(order)) if sum(lengths[at] for at in order[:n]) >= tokens), len(order))
    return tuple(order[:taken])


# -- shapes ----------------------------------------------------------------------------------------------

SHAPES = (
    Budget.chain(0, nodes=0),
    *(Budget.chain(levels) for levels in range(17)),
    *(Budget.tree(nodes, 1) for nodes in (2, 4, 8)),
    *(
        Budget.tree(nodes, levels, width)
        for width, sizes in ((2, (4, 8, 16, 32)), (4, (8, 16, 32, 62)), (10, (16, 32, 62)))
        for levels in (2, 3, 4, 6, 8, 12, 16)
        for nodes in sizes
        if levels <= nodes
    ),
)


def name_of(shape: Budget) -> str:
    """Name a shape for people; the first word is its kind: nothing, copies, chain or tree."""
    if not shape.nodes:
        return "nothing"
    if shape.branches:
        return f"tree of {shape.nodes} in {shape.levels} levels, {shape.width} wide"
    return f"chain of {shape.levels}" if shape.levels else "copies"


#: The work of rounds as a vector: tokens committed, steps of the drafter and the nodes that they continued (queries),
#: passes of the target and drafted tokens in them (nodes), and drafts with branches.
WORK = ("tokens", "steps", "queries", "passes", "nodes", "branched")
Work = NDArray[np.float64]


def rate(work: Work, pace: Pace) -> float:
    """Return tokens a second."""
    costs = (pace.step_s, pace.query_s, pace.round_trip_s + pace.compute_s(1), pace.token_s)
    return float(work[0] / (work[1:5] @ costs))


def work_in(outcome: Round) -> Work:
    """Return the work of one round."""
    branched = outcome.drafted > outcome.depth
    return np.array([outcome.accepted + 1, outcome.steps, outcome.queries, 1, outcome.drafted, branched], np.float64)


def hold(recording: Recording, number: int, controller: Controller, pace: Pace) -> tuple[float, Work]:
    """Let the device write an answer; returns the seconds from its first token on, at that pace, and the work."""
    clock, answer, rounds = Clock(pace), recording.answers[number], list[Round]()
    verifier = LoopbackVerifier(replayed_target(recording), pace=pace)
    drafter = replayed_drafter(recording, RecordedBackend(answer))
    with closing(verifier):
        conversation = Conversation(verifier, drafter, recording.fingerprints, recording.stop_tokens, controller, clock)
        conversation.ask(answer.prompt, Sampling(), len(answer.answer), rounds.append)
        began = clock.now()
        while conversation.answering:
            conversation.next_round()
    return clock.now() - began, sum(map(work_in, rounds), np.zeros(len(WORK)))


def work_of(recording: Recording, number: int, shape: Budget) -> Work:
    """Return the work for an answer with drafts of one shape, whose rounds do not depend on time."""
    return hold(recording, number, FixedShape(shape), Pace(0.0, 0.0, 0.0, 0.0, 0.0))[1]


class Field:
    """The fixed shapes, with their work for every answer."""

    def __init__(self, recording: Recording, shapes: Sequence[Budget] = SHAPES) -> None:
        self._recording, numbers = recording, range(len(recording.answers))
        self._works = {shape: [work_of(recording, number, shape) for number in numbers] for shape in shapes}

    def run(self, scenario: tuple[Pace, tuple[int, ...]]) -> dict[str, Any]:
        """Compare a new controller with all fixed shapes on the answers of a scenario; plain figures for JSON."""
        pace, answers = scenario
        rates = {shape: rate(sum(works[at] for at in answers), pace) for shape, works in self._works.items()}
        best = max(rates, key=rates.__getitem__)
        controller = CostModel()
        seconds, works = zip(*(hold(self._recording, at, controller, pace) for at in answers), strict=True)
        work = dict(zip(WORK, sum(works).tolist(), strict=True))
        ms, chosen, name = pace.in_ms(), work["tokens"] / sum(seconds), name_of(best)
        means = {name: rounded(work[name] / work["passes"]) for name in ("tokens", "steps", "nodes", "branched")}
        found = {"ms": {**ms, "trip": ms.pop("round_trip")}, "answers": answers, "best": name, "kind": name.split()[0]}
        found |= {"best_rate": rounded(rates[best]), "rate": rounded(chosen), "share": rounded(chosen / rates[best])}
        return {**found, "means": {"tau": means.pop("tokens"), **means}}


def draw_shapes(count: int, seed: int, lengths: Sequence[int]) -> Iterator[tuple[Pace, tuple[int, ...]]]:
    """Draw paces and answers: a device's step takes 1 to 40 ms and each node that it continues 0.03 to 0.5 of that, a
    pass of the target 5 to 300 ms and each token 0.0002 to 0.15 of that, a round trip up to 400 ms. All are
    log-uniform, the round trip from 1 ms on, less that millisecond."""
    rng = random.Random(seed)
    for _ in range(count):
        step_s, pass_s = _log_uniform(rng, 0.001, 0.04), _log_uniform(rng, 0.005, 0.3)
        query_s, token_s = step_s * _log_uniform(rng, 0.03, 0.5), pass_s * _log_uniform(rng, 0.0002, 0.15)
        pace = Pace(step_s, query_s, pass_s, token_s, _log_uniform(rng, 0.001, 0.401) - 0.001)
        yield pace, _some_answers(rng, lengths, TOKENS["shapes"])


# -- placement -------------------------------------------------------------------------------------------


class Placement(NamedTuple):
    """A scenario: times before and after ``change``, which happens half-way, and numbers of answers."""

    seed: int
    before: Times
    after: Times
    change: str
    answers: tuple[int, ...]


def draw_placements(count: int, seed: int, lengths: Sequence[int]) -> Iterator[Placement]:
    """Draw scenarios; all times are log-uniform. A device's step takes 0.5 to 20 ms and each node that it continues
    0.03 to 0.3 of that; a pass of the target 3 to 60 ms, each token 0.0002 to 0.1 of that; the server's own step 0.03
    to 0.4 of a pass, in two of three scenarios; a round trip 1 to 300 ms. One of three verifiers is busy, and lets
    every pass wait for one to four others; in two of five scenarios link or verifier change."""
    rng = random.Random(seed)
    for number in range(count):
        step_s, pass_s = _log_uniform(rng, 0.0005, 0.02), _log_uniform(rng, 0.003, 0.06)
        server_step_s = pass_s * _log_uniform(rng, 0.03, 0.4) if rng.random() < 2 / 3 else None
        times = Times(
            step_s=step_s,
            query_s=step_s * _log_uniform(rng, 0.03, 0.3),
            server_step_s=server_step_s,
            server_query_s=(server_step_s or 0.0) * _log_uniform(rng, 0.03, 0.3),
            pass_s=pass_s,
            token_s=pass_s * _log_uniform(rng, 0.0002, 0.1),
            queue_s=pass_s * rng.uniform(1, 4) if rng.random() < 1 / 3 else 0.0,
            round_trip_s=_log_uniform(rng, 0.001, 0.3),
            jitter=rng.uniform(0, 0.5),
        )
        change = rng.choice(CHANGES[1:]) if rng.random() < 0.4 else CHANGES[0]
        factor = _log_uniform(rng, 2, 20)
        after = {
            "none": times,
            "link slower": replace(times, round_trip_s=min(0.3, times.round_trip_s * factor)),
            "link faster": replace(times, round_trip_s=max(0.001, times.round_trip_s / factor)),
            "verifier busy": replace(times, queue_s=times.queue_s + pass_s * rng.uniform(1, 4)),
            "verifier free": replace(times, queue_s=0.0),
        }[change]
        yield Placement(number + seed, times, after, change, _some_answers(rng, lengths, TOKENS["placement"]))


def hold_placement(recording: Recording, scenario: Placement, drafting: Drafting) -> Client:
    """Have a scenario's answers written, one conversation after the other over one connection."""
    answers = [recording.answers[at] for at in scenario.answers]
    half = sum(len(answer.answer) for answer in answers) // 2
    env = simpy.Environment()

    def times() -> Times:
        return scenario.before if len(client.text) < half else scenario.after

    client: Any = SimpleNamespace(text=[])  # until there is one
    client = Client(Target(env, recording, times), drafting, scenario.seed)
    env.run(env.process(client.answer(answers)))
    return client


def compare_placements(recording: Recording, scenario: Placement) -> dict[str, Any]:
    """Hold a scenario with auto, the device alone and the server alone; plain figures for JSON. Raises AssertionError:
    they wrote different texts."""
    clients = {drafting: hold_placement(recording, scenario, drafting) for drafting in DRAFTINGS}
    auto, tokens = clients["auto"], len(clients["auto"].text) - len(scenario.answers)
    assert all(each.text == auto.text for each in clients.values()), "the text is the target's, whatever drafts"
    seconds = {drafting: each.seconds for drafting, each in clients.items()}
    best = min(("device", "server"), key=seconds.__getitem__)
    return {
        "change": scenario.change,
        "answers": scenario.answers,
        "ms": scenario.before.in_ms(),
        "later_ms": scenario.after.in_ms(),
        "ms_per_token": {drafting: rounded(1000 * each / tokens) for drafting, each in seconds.items()},
        "best": best,
        "kind": best if scenario.change == "none" else f"{best}, {scenario.change}",
        "ratio": rounded(seconds["auto"] / seconds[best]),
        "means": {"by the server": rounded(auto.pushed / max(1, tokens))},
    }
