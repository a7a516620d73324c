"""A conversation of the real loop with a simulated verifier, over a simulated link, on a simulated device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moa_bench.accept.replay import ReplayEngine
from moa_bench.placement.scenarios import Scenario, Times
from moa_bench.placement.simulated_server import SimulatedServer
from moa_bench.shapes.replay import RecordedBackend, Replay
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafting.cost_model import Throughput
from moa_runtime.drafting.events import Draft, LoopEvent, Pushed
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.drafting.settings import LoopSettings
from moa_runtime.options import Drafting
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Sampling

_PATIENCE_S = 1e6  # nothing is late here: a device that writes on alone is another benchmark's


@dataclass(frozen=True)
class Held:
    """A conversation that was held.

    Attributes:
        seconds: from each answer's first token to its last, all together.
        tokens: of the answers, those first ones left out.
        text: of all answers.
        pushed: share of the tokens that the server wrote by itself.
    """

    seconds: float
    tokens: int
    text: tuple[int, ...]
    pushed: float


def hold(replays: Sequence[Replay], scenario: Scenario, drafting: Drafting) -> Held:
    """Have the answers written, one conversation after the other over one connection."""
    conversation = _Conversation([replays[at] for at in scenario.answers], scenario, drafting)
    try:
        return conversation.hold()
    finally:
        conversation.server.close()


class _Conversation:
    def __init__(self, replays: Sequence[Replay], scenario: Scenario, drafting: Drafting) -> None:
        self._replays, self._scenario = replays, scenario
        self._backends: list[RecordedBackend] = []
        first = replays[0]
        answers = {tuple(each.answer.prompt): each.answer.answer for each in replays}
        engine = ReplayEngine(first.target, answers)
        drafts = scenario.before.server_step_s is not None
        self.server = SimulatedServer(engine, self._times, self._drafter() if drafts else None, scenario.seed)
        self._mine = self._drafter()
        session = ClientSession(first.fingerprints, stop_tokens=first.stop_tokens)
        settings = LoopSettings(late_after_s=_PATIENCE_S, prefill_late_after_s=_PATIENCE_S, drafting=drafting)
        self._loop = DraftingLoop(session, self._mine, Throughput(), settings)
        self._loop.listen(self._hear)
        self._now = 0.0
        self._text: list[int] = []
        self._first_at: float | None = None
        self._pushed = 0
        self._half = sum(len(each.answer.answer) for each in replays) // 2

    def _drafter(self) -> MoaDrafter:
        """One for all answers."""
        self._backends.append(RecordedBackend(self._replays[0].answer))
        return self._replays[0].drafter(self._backends[-1])

    def _times(self) -> Times:
        return self._scenario.before if len(self._text) < self._half else self._scenario.after

    def hold(self) -> Held:
        self._loop.opened()
        seconds, firsts = 0.0, 0
        for replay in self._replays:
            self._first_at = None
            for backend in self._backends:
                backend.turn_to(replay.answer)
            self._loop.ask(0, replay.answer.prompt, Sampling(), len(replay.answer.answer))
            while self._loop.answering:
                self._go_on()
            assert self._first_at is not None
            seconds += self._now - self._first_at
            firsts += 1
        tokens = len(self._text) - firsts
        return Held(seconds, tokens, tuple(self._text), self._pushed / max(1, tokens))

    def _go_on(self) -> None:
        """What the device does next, or the next frame that it gets."""
        loop, sent = self._loop, self.server.sent
        while self.server.act(self._now):
            pass
        while sent and sent[0][0] <= self._now:
            loop.received(sent.popleft()[1], self._now)
        todo = loop.next(self._now) if loop.answering else None
        if isinstance(todo, Draft):
            tree, times = todo.by.propose(todo.prefix, todo.budget, todo.sampling), self._times()
            seconds = len(tree.steps) * times.step_s + sum(tree.steps) * times.query_s
            self._now += seconds
            loop.drafted(todo, tree, seconds, self._now)
        for frame in loop.frames_to_send(self._now):
            self.server.send(frame, self._now)
        if todo is None or isinstance(todo, Draft):
            return
        until = float("inf") if todo.until is None else todo.until
        # The server's next frame may come of something that it begins before then.
        while (not sent or sent[0][0] > self._now) and self.server.act(min(until, sent[0][0]) if sent else until):
            pass
        assert sent or todo.until is not None, "both ends wait for the other"
        self._now = max(self._now, min(until, sent[0][0]) if sent else until)

    def _hear(self, event: LoopEvent) -> None:
        if isinstance(event, Committed):
            self._text.extend(event.tokens)
            self._first_at = self._now if self._first_at is None else self._first_at
        elif isinstance(event, Pushed):
            self._pushed += event.accepted + 1
