"""Devices and a verifier on simulated time: the real drafting loops, sessions, drafts, prices and scheduler, with a
drafter and a target that are replayed from a recording and take the time that they are given."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import exp, log
from typing import Any, NamedTuple, TypeVar

import numpy as np
import simpy
from numpy.typing import NDArray

from moa_bench.harness import Conversation, LoopbackVerifier, Round
from moa_bench.recording import RecordedAnswer, RecordedBackend, Recording, replayed_drafter, replayed_target
from moa_bench.result import rounded
from moa_bench.simulated_clock import Clock, Pace
from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.draft_controllers import Controller, FixedShape
from moa_runtime.drafting.events import Draft, LoopEvent
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.options import LoopSettings
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Sampling
from moa_runtime.session.handshake import Limits
from moa_runtime.session.server import RowsWork, ServerSession, Verify, parse_client_message
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.drafting.server_drafting import ServerDrafting
from moa_server.engine.base import new_sequence
from moa_server.scheduling.scheduler import MOST_SEQUENCES, Scheduler, Step, Waiting
from moa_server.scheduling.step_cost import StepCost
from moa_server.scheduling.step_drafts import Calibrations, StepDrafts, take_rows
from moa_server.scheduling.verify_job import Job

#: Nothing is late here: a device that writes on alone is not simulated.
_PATIENCE_S = 1e6

Process = Generator[simpy.Event, Any, Any]
_Take = Callable[[bytes], bool]
T = TypeVar("T")


@dataclass(frozen=True)
class StepCurve:
    """Seconds of a target's steps.

    Attributes:
        rows, ms: milliseconds of a step of one session without context by its tokens; beyond the last two a line.
        sequence_ms: milliseconds of each further session.
        context_us: microseconds of each token that the sessions hold.
    """

    rows: tuple[int, ...]
    ms: tuple[float, ...]
    sequence_ms: float
    context_us: float

    def seconds(self, tokens: int, sequences: int, contexts: int) -> float:
        """Return the seconds of a step."""
        beyond = max(0, tokens - self.rows[-1]) * (self.ms[-1] - self.ms[-2]) / (self.rows[-1] - self.rows[-2])
        ms = float(np.interp(tokens, self.rows, self.ms)) + beyond + self.sequence_ms * max(0, sequences - 1)
        return ms / 1e3 + self.context_us * contexts / 1e6


#: The default target on one core of an EPYC with VNNI, and a target of 8 billion parameters in 16 bits on an H100, for
#: which a step of up to some 150 tokens takes as long as to read the weights (6 ms).
CURVES = {
    "cpu int4": StepCurve((1, 2, 4, 8, 16), (9.2, 10.9, 12.8, 19.9, 29.7), 0.7, 2.8),
    "cpu float32": StepCurve((1, 2), (82.7, 87.2), 5.2, 5.6),
    "gpu": StepCurve((1, 64, 128, 256, 512), (6.0, 6.2, 6.8, 9.6, 17.5), 0.01, 0.04),
}


class Fleet(NamedTuple):
    """A scenario: sessions at once on a verifier, each on a device with the same times and link.

    Attributes:
        curve: of :data:`CURVES`.
        slower: factor of its times.
        step_s, query_s: a step of the device's drafter, and each node that it continues.
        round_trip_s, jitter: each way of the link takes half of it, and up to this part longer.
        first: number of the answer with which the first session begins.
    """

    seed: int
    sessions: int
    curve: str
    slower: float
    step_s: float
    query_s: float
    round_trip_s: float
    jitter: float
    first: int

    def in_ms(self) -> dict[str, float]:
        """Return the times in milliseconds, for JSON; the jitter is a share."""
        one, full = (self.step_seconds(n, n, 0) for n in (1, min(self.sessions, MOST_SEQUENCES)))
        times = {"step": self.step_s, "query": self.query_s, "pass": one, "full pass": full, "trip": self.round_trip_s}
        return {**{name: round(1000 * each, 4) for name, each in times.items()}, "jitter": round(self.jitter, 4)}

    def step_seconds(self, tokens: int, sequences: int, contexts: int) -> float:
        """Return the seconds of a step of the target."""
        return self.slower * CURVES[self.curve].seconds(tokens, sequences, contexts)


class Target:
    """The target of all conversations: its real scheduler over real jobs, and steps that take their simulated time.

    Attributes:
        own: drafts of the verifier's own, copies; None if it makes none.
        passes, rounds: steps so far, and the sessions in them.
        scheduler: of these steps.
    """

    def __init__(self, env: simpy.Environment, recording: Recording, fleet: Fleet, *, copies: bool) -> None:
        self.engine = replayed_target(recording)
        self.passes = self.rounds = 0
        self.env, self.recording, self.fleet = env, recording, fleet
        self.limits = Limits(max_context=self.engine.max_context, trees=True)
        sessions, stops = max(1, fleet.sessions), recording.stop_tokens
        self.own = ServerDrafting(None, self.limits, stops, most=sessions, clock=lambda: env.now) if copies else None
        self._cost = StepCost()
        self.scheduler = Scheduler(self._cost)
        self._waiting: dict[int, simpy.Event] = {}  # by identity of the job
        self._more = env.event()
        env.process(self._run())

    def run(self, job: Job) -> simpy.Event:
        """Hand in a job; the event occurs when it is done."""
        done = self._waiting[id(job)] = self.env.event()
        self.scheduler.add(Waiting(job, self.env.now))
        if not self._more.triggered:
            self._more.succeed()
        return done

    def _run(self) -> Process:
        while True:
            yield self.env.timeout(0)  # conversations that were answered hand in their next work
            for job in self.scheduler.waiting_rounds():
                job.take_newest()
            if (step := self.scheduler.plan(self.env.now, self.engine.held)).pieces:
                yield from self._take(step)
            else:
                self._more = self.env.event()
                yield self._more

    def _take(self, step: Step) -> Process:
        outcomes = finish(self.engine.step([piece.request for piece in step.pieces]))
        seconds = self.fleet.step_seconds(step.tokens, len(step.pieces), step.contexts) if step.tokens else 0.0
        yield self.env.timeout(seconds)
        for piece, outcome in zip(step.pieces, outcomes, strict=True):
            piece.waiting.job.seconds += seconds
            piece.waiting.job.take(piece.request, outcome)
        if step.tokens:
            self._cost.observe(step.tokens, step.products, step.contexts, len(step.pieces), seconds)
            self.passes += 1
            self.rounds += len(step.pieces)
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

    Args:
        take: handles a frame on its arrival; says whether it needs no further handling.

    Attributes:
        frames: arrived ones, with the time of their arrival.
        arrival: the event of the next one.
    """

    def __init__(self, target: Target, draws: random.Random, take: _Take = lambda frame: False) -> None:
        self.frames: deque[tuple[float, bytes]] = deque()
        self._env, self._fleet, self._draws, self._take = target.env, target.fleet, draws, take
        self._last = 0.0
        self.arrival = self._env.event()

    def send(self, frame: bytes) -> None:
        fleet, now = self._fleet, self._env.now
        self._last = max(self._last, now + fleet.round_trip_s / 2 * (1 + fleet.jitter * self._draws.random()))
        self._env.process(self._deliver(frame, self._last - now))

    def _deliver(self, frame: bytes, after: float) -> Process:
        yield self._env.timeout(after)
        if self._take(frame):
            return
        self.frames.append((self._env.now, frame))
        arrival, self.arrival = self.arrival, self._env.event()
        arrival.succeed()


class _ServerEnd:
    """The verifier's end of one conversation: frames that have arrived, then pushed verdicts, then memory rows."""

    def __init__(self, target: Target, draws: random.Random, down: _Way) -> None:
        engine = target.engine
        self.session = ServerSession(target.limits, engine.vocab_size, engine.stop_tokens)
        self.sequence = new_sequence()
        self.up = _Way(target, draws, self._keep_draft)
        self._env, self._target, self._down = target.env, target, down
        self._calibrations = Calibrations()
        self._stamped: tuple[int, float] | None = None
        self._env.process(self._run())

    def _run(self) -> Process:
        while True:
            if frames := self.up.frames:
                if (work := self._receive(*frames.popleft())) is not None:
                    yield from self._do(work)
            elif (work := self.session.next_work()) is not None:
                yield from self._do(work)
            elif (rows := self.session.take_rows()) is not None:
                self._send(rows)
            else:
                yield self.up.arrival

    def _keep_draft(self, frame: bytes) -> bool:
        """Keep an unsolicited draft, also while a step runs; return whether it is one."""
        message = parse_client_message(frame)
        if not isinstance(message, wire.ClientMessage) or not message.draft.unsolicited:
            return False
        self.session.keep_draft(message.draft)
        self._stamped = message.draft.stamp, self._env.now
        return True

    def _receive(self, arrived: float, frame: bytes) -> Verify | None:
        message = parse_client_message(frame)
        assert isinstance(message, wire.ClientMessage)
        event = message.WhichOneof("event")
        if event == "hello":
            own = [] if self._target.own is None else [wire.CAPABILITY_DRAFTS]
            takes = [wire.CAPABILITY_UNSOLICITED_DRAFTS, *own]
            answers = self.session.greet(message.hello, "simulated", capabilities=takes)
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
            job = Job(self.sequence, work.prefix, None, rows_from=work.start)
            while not job.done:
                request = job.request(self._target.engine.held(self.sequence, job.prefix), len(job.prefix))
                job.take(request, finish(self._target.engine.step([request]))[0])
            take_rows(self.session, job)
        else:
            drafts = StepDrafts(self.session, self.sequence, self._calibrations, work)
            job = drafts.job(self._target.own, unasked=self._target.scheduler.searches)
            yield self._target.run(job)
            self._send(drafts.verdict(job)[0])
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
        mode: a value of ``--drafting``, or ``"stream"``: neither end drafts.
        seed: of the link's jitter.

    Attributes:
        text: tokens of all answers.
    """

    def __init__(self, target: Target, mode: str, seed: int) -> None:
        self.text: list[int] = []
        self._env, self._target = target.env, target
        recording, draws = target.recording, random.Random(seed)
        self._down = _Way(target, draws)
        self._backend = RecordedBackend(recording.answers[0])
        drafts = mode in ("auto", "device")
        drafter = replayed_drafter(recording, self._backend) if drafts else None
        self._server = _ServerEnd(target, draws, self._down)
        rows = wire.ROW_ENCODING_INT8 if drafts else wire.ROW_ENCODING_UNSPECIFIED
        session = ClientSession(recording.fingerprints, stop_tokens=recording.stop_tokens, row_encoding=rows)
        drafting = mode if drafts else "server"
        settings = LoopSettings(late_after_s=_PATIENCE_S, prefill_late_after_s=_PATIENCE_S, drafting=drafting)
        self._loop = DraftingLoop(session, drafter, CostModel(), settings)
        self._loop.listen(self._hear)
        self._loop.opened()

    def answer(self, answers: Iterable[RecordedAnswer]) -> Process:
        """Have the answers written one after the other, each in a new conversation over one connection."""
        for answer in answers:
            self._backend.replay(answer)
            self._loop.ask(0, answer.prompt, Sampling(), len(answer.answer))
            while self._loop.answering:
                yield from self._act()
            self._target.scheduler.rest(self._server.sequence)

    def take_arrived(self) -> None:
        """Take the frames that have arrived, maybe during a draft."""
        while self._down.frames:
            arrived, frame = self._down.frames.popleft()
            self._loop.received(frame, arrived)

    def _act(self) -> Process:
        """Take frames that have arrived, then draft and send, or wait."""
        loop, env, fleet = self._loop, self._env, self._target.fleet
        self.take_arrived()
        todo = loop.next(env.now) if loop.answering else None
        if isinstance(todo, Draft):
            tree = todo.by.propose(todo.prefix, todo.budget, todo.sampling)
            seconds = len(tree.steps) * fleet.step_s + sum(tree.steps) * fleet.query_s
            yield env.timeout(seconds)
            loop.drafted(todo, tree, seconds, env.now)
        for frame in loop.frames_to_send(env.now):
            self._server.up.send(frame)
        if todo is None or isinstance(todo, Draft) or self._down.frames:
            return
        alarm = [] if todo.until is None else [env.timeout(max(0.0, todo.until - env.now))]
        yield simpy.AnyOf(env, [self._down.arrival, *alarm])

    def _hear(self, event: LoopEvent) -> None:
        if isinstance(event, Committed):
            self.text.extend(event.tokens)


#: Tokens of the answers of a scenario of shapes.
TOKENS = 400
#: Tokens of all sessions of a fleet by streaming, at least and at most for each.
FLEET_TOKENS, _LEAST_TOKENS, _MOST_TOKENS = 4000, 60, 600
#: Ways in which a fleet is served.
MODES = ("auto", "device", "server", "stream")


def _log_uniform(rng: random.Random, least: float, most: float) -> float:
    return exp(rng.uniform(log(least), log(most)))


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


def _some_answers(rng: random.Random, lengths: Sequence[int]) -> tuple[int, ...]:
    """Draw numbers of answers until they have :data:`TOKENS` tokens together, or all of them."""
    order = rng.sample(range(len(lengths)), len(lengths))
    taken = next((n for n in range(len(order)) if sum(lengths[at] for at in order[:n]) >= TOKENS), len(order))
    return tuple(order[:taken])


def draw_shapes(count: int, seed: int, lengths: Sequence[int]) -> Iterator[tuple[Pace, tuple[int, ...]]]:
    """Draw paces and answers: a device's step takes 1 to 40 ms and each node that it continues 0.03 to 0.5 of that, a
    pass of the target 5 to 300 ms and each token 0.0002 to 0.15 of that, a round trip up to 400 ms. All are
    log-uniform, the round trip from 1 ms on, less that millisecond."""
    rng = random.Random(seed)
    for _ in range(count):
        step_s, pass_s = _log_uniform(rng, 0.001, 0.04), _log_uniform(rng, 0.005, 0.3)
        query_s, token_s = step_s * _log_uniform(rng, 0.03, 0.5), pass_s * _log_uniform(rng, 0.0002, 0.15)
        pace = Pace(step_s, query_s, pass_s, token_s, _log_uniform(rng, 0.001, 0.401) - 0.001)
        yield pace, _some_answers(rng, lengths)


# -- a fleet ---------------------------------------------------------------------------------------------


def draw_fleets(count: int, seed: int, lengths: Sequence[int]) -> Iterator[Fleet]:
    """Draw scenarios; times are log-uniform. 1 to 256 sessions; the target is that of a curve, or up to 3 times as
    slow; a device's step takes 0.5 to 20 ms and each node that it continues 0.03 to 0.3 of that; a round trip 1 to 300
    ms."""
    rng = random.Random(seed)
    for number in range(count):
        step_s = _log_uniform(rng, 0.0005, 0.02)
        sessions, curve, slower = 2 ** rng.randrange(9), rng.choice(list(CURVES)), _log_uniform(rng, 1, 3)
        query_s, round_trip_s = step_s * _log_uniform(rng, 0.03, 0.3), _log_uniform(rng, 0.001, 0.3)
        times = slower, step_s, query_s, round_trip_s, rng.uniform(0, 0.5)
        yield Fleet(seed + number, sessions, curve, *times, rng.randrange(len(lengths)))


def hold_fleet(recording: Recording, fleet: Fleet, mode: str, seconds: float) -> tuple[list[list[int]], Target]:
    """Let all sessions ask without a pause for ``seconds`` of simulated time, each beginning with another answer;
    returns their texts, and the target."""
    env = simpy.Environment()
    target = Target(env, recording, fleet, copies=mode in ("auto", "server"))
    clients = [Client(target, mode, fleet.seed + number) for number in range(fleet.sessions)]
    for number, client in enumerate(clients):
        first = (fleet.first + number) % len(recording.answers)
        env.process(client.answer(itertools.cycle([*recording.answers[first:], *recording.answers[:first]])))
    env.run(seconds)
    for client in clients:
        client.take_arrived()  # drafts that are under way delay text, which is there
    return [client.text for client in clients], target


def window_of(recording: Recording, fleet: Fleet) -> float:
    """Return the seconds in which streaming reads the prompts and writes the tokens of a scenario."""
    count, together = fleet.sessions, min(fleet.sessions, MOST_SEQUENCES)
    tokens = min(_MOST_TOKENS, max(_LEAST_TOKENS, FLEET_TOKENS // count))
    prompt = sum(len(answer.prompt) for answer in recording.answers) / len(recording.answers)
    length = sum(recording.lengths) / len(recording.answers)
    pass_s = fleet.step_seconds(together, together, int((prompt + length / 2) * together))
    prompt_s = fleet.step_seconds(int(prompt), 1, int(prompt))
    return 2 * fleet.round_trip_s + count * tokens * (prompt_s / length + pass_s / together)


def compare_fleets(recording: Recording, fleet: Fleet) -> dict[str, Any]:
    """Hold a scenario in all modes; plain figures for JSON. Raises AssertionError: they wrote different texts."""
    seconds = window_of(recording, fleet)
    texts, targets = zip(*(hold_fleet(recording, fleet, mode, seconds) for mode in MODES), strict=True)
    for written in zip(*texts, strict=True):
        longest = max(written, key=len)
        assert all(text == longest[: len(text)] for text in written), "the text is the target's, whatever drafts"
    rates = {mode: sum(map(len, each)) / seconds for mode, each in zip(MODES, texts, strict=True)}
    best, auto = max(MODES[1:], key=rates.__getitem__), targets[0]
    by_stream = rates["auto"] / max(rates["stream"], 1e-9)
    return {
        "kind": fleet.curve,
        "sessions": fleet.sessions,
        "ms": fleet.in_ms(),
        "tokens_per_s": {mode: rounded(each) for mode, each in rates.items()},
        "best": best,
        "ratio": rounded(rates["auto"] / max(rates[best], 1e-9)),
        "means": {"by stream": rounded(by_stream), "sessions/pass": rounded(auto.rounds / max(1, auto.passes))},
    }
