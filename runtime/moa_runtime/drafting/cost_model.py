"""Drafts in the shape that pays: tokens a second, made largest."""

from __future__ import annotations

import copy

from moa_runtime.drafters.base import Budget, Prices
from moa_runtime.drafting.events import Pushed, RoundEnded

_MEMORY = 0.95  # averages forget: a round counts so many times the one after it
_LONG_MEMORY = 0.99  # times vary by more than a token costs
#: A guess, until rounds show it: a pass over one token takes as long as 15 more tokens do. Of a Llama of 135 million
#: parameters on a CPU; where more tokens cost less, little is lost.
_TOKENS_OF_A_PASS = 15.0
_MOST_OF_A_GUESS = 3.0  # times that, which a prompt may make a token of a draft seem to cost
_FIRST_STEP_S = 0.005
_GUESS = 0.1  # of a point: what a guess counts beside points
_MOST_AHEAD = 8
#: What takes more times as long as expected counts as so many times: a stall says nothing of the rounds to come, and
#: what is slower from now on is soon expected.
_STALL = 10.0
_LEAST_S = 0.001  # as if nothing took less, which would forbid all that takes longer
#: Part of the time that may go into tries of a model whose steps do not pay.
_TRIES = 0.02


class Throughput:
    """Takes each part of a draft that brings more tokens a second than the rounds so far.

    With ``rate`` the tokens a second of the rounds so far, a part that takes ``t`` seconds costs ``rate * t`` tokens,
    and pays where it is expected to bring more: the rule that makes tokens a second largest once ``rate`` is what it
    brings (Dinkelbach 1967, "On nonlinear fractional programming"). The parts are steps of the device's model, the
    nodes that each continues, and the tokens that the target's pass is over; the first two are learnt from how long
    drafts took, the last from what verdicts say of the target's time. So a slow link makes drafts larger, a slow device
    flatter, a target that feels every token narrower. Where the model's steps do not pay, only what is copied is sent,
    and a step is tried now and then, to see whether that has changed. What takes the target's time takes it from all
    conversations that share the target, and costs what all of them would have got.

    Args:
        nodes, levels, width: of a draft at most.
        shared_steps: the model runs on the target's machine, so its steps cost all who share that, too.
    """

    def __init__(self, nodes: int = 62, levels: int = 16, width: int = 10, *, shared_steps: bool = False) -> None:
        self._shared_steps, self._sharing = shared_steps, 1
        self._nodes, self._levels, self._width = nodes, levels, width
        self._tokens = self._seconds = self._rounds = 0.0
        # As if a few tokens had been judged before: one round says little.
        self._right, self._judged = 3.0, 6.0
        self._first_right, self._firsts = 3.0, 5.0
        self._step = Line(_FIRST_STEP_S, 0.1 * _FIRST_STEP_S, doubt=0.1)  # seconds of a step by nodes continued
        self._pass: Line | None = None  # the target's seconds by tokens
        self._idle_s = 0.0  # since the model took a step
        self._prompt: tuple[int, float] | None = None  # tokens and seconds of the first, until a draft followed
        self._timed = False  # whether it is known what a step takes
        self._reads = False  # the next draft's first step is over the prompt too

    @property
    def prices(self) -> Prices:
        """What the parts of a draft cost by now."""
        own = self._tokens / self._seconds if self._seconds else 0.0
        shared = self._sharing * own
        step, rate = self._step, shared if self._shared_steps else own
        return Prices(rate * step.level, rate * step.slope, shared * self.token_s, self._right / self._judged)

    @property
    def token_s(self) -> float:
        return self._pass.slope if self._pass else 0.0

    def budget(self) -> Budget:
        prices = self.prices
        pays = not self._timed or self._first_right / self._firsts >= prices.token
        tries = _TRIES * self._idle_s >= self._step.level + self._step.slope
        return Budget(self._nodes, self._levels if pays or tries else 0, self._width, branches=True, prices=prices)

    def ahead(self, drafted: int, probability: float) -> bool:
        prices = self.prices
        return drafted < _MOST_AHEAD and probability * prices.follows >= prices.token

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        self._sharing = outcome.sharing
        if isinstance(outcome, Pushed):
            if outcome.compute_s:  # else nothing is known: verdicts may have come together
                self._passed(outcome.drafted, outcome.compute_s)
            return
        target_s = min(outcome.compute_s or outcome.waited_s, outcome.waited_s)
        if outcome.supplied:
            self._reads = True
            self._asked(outcome.supplied, target_s, outcome.waited_s - (outcome.compute_s or 0.0))
        else:
            if outcome.compute_s is not None:
                self._passed(outcome.drafted, target_s)
            self._drafted(outcome)

    def _drafted(self, outcome: RoundEnded) -> None:
        """What a draft took and brought."""
        seconds = outcome.draft_s + outcome.waited_s
        if self._rounds:
            seconds = min(seconds, _STALL * max(_LEAST_S, self._seconds / self._rounds))
        self._rounds = _MEMORY * self._rounds + 1
        self._tokens = _MEMORY * self._tokens + outcome.accepted + 1
        self._seconds = _MEMORY * self._seconds + seconds
        self._idle_s = 0.0 if outcome.steps else self._idle_s + outcome.waited_s
        if not outcome.steps:
            self._step.fade()  # the fewer tries there are, the more each says
        else:
            step_s = outcome.draft_s / len(outcome.steps)
            # What a step takes that also reads a prompt is more than others take, which says something where it is less
            # than was thought.
            if not self._reads or step_s < self._step.level:
                self._step.add(sum(outcome.steps) / len(outcome.steps), step_s)
                self._timed = True
            self._reads = False
            self._right = _MEMORY * self._right + outcome.accepted
            self._judged = _MEMORY * self._judged + min(outcome.accepted + 1, outcome.depth)
            self._first_right = _MEMORY * self._first_right + (outcome.accepted > 0)
            self._firsts = _MEMORY * self._firsts + 1

    def sibling(self) -> Throughput:
        """For another conversation with the same model and target: what they take is known, the rest is learnt."""
        other = Throughput(self._nodes, self._levels, self._width, shared_steps=self._shared_steps)
        other._step, other._timed = copy.copy(self._step), self._timed
        if self._pass is not None:
            other._pass = copy.copy(self._pass)
            rounds = max(1.0, self._rounds)
            other._tokens, other._seconds = self._tokens / rounds, self._seconds / rounds
        return other

    def _passed(self, drafted: int, target_s: float) -> None:
        """The target took so long for a pass over a draft."""
        if self._prompt is not None or self._pass is None:
            self._pass, self._prompt = _pass_of(target_s, drafted, self._prompt), None
        else:
            target_s = min(target_s, _STALL * max(_LEAST_S, self._pass.at(drafted)))
        self._pass.add(drafted, target_s)

    def _asked(self, supplied: int, target_s: float, link_s: float) -> None:
        """A prompt's verdict: the first that is known of target and link."""
        if self._pass is not None:
            return
        self._prompt = (supplied, target_s)
        self._pass = _pass_of(target_s, supplied)
        self._tokens, self._seconds = 2.0, max(0.0, link_s) + self._pass.level + 2 * _FIRST_STEP_S


def _pass_of(seconds: float, tokens: int, prompt: tuple[int, float] | None = None) -> Line:
    """A guess of the target's, after a pass over so many tokens, and one over a prompt.

    Two passes tell more than the guess of all targets. But a token of a prompt may take less than one of a draft, or
    more, so this is a guess too, and bounded; drafts, which are of several sizes, replace it.
    """
    pass_s = seconds / (1 + tokens / _TOKENS_OF_A_PASS)
    slope = pass_s / _TOKENS_OF_A_PASS
    if prompt is not None and prompt[0] > tokens + _TOKENS_OF_A_PASS:
        slope = min(max(0.0, (prompt[1] - seconds) / (prompt[0] - tokens)), _MOST_OF_A_GUESS * slope)
        pass_s = max(0.0, seconds - slope * tokens)
    return Line(pass_s, slope, doubt=10.0)


class Line:
    """``level + slope * x`` by least squares, of which neither is negative. What was added counts less and less, and a
    few points move the first guess little.

    Args:
        level, slope: the guess.
        doubt: how many squared units of ``x`` speak for the guess's slope.
    """

    def __init__(self, level: float, slope: float, *, doubt: float) -> None:
        self._guess, self._doubt = slope, doubt
        self._weight, self._x, self._y = _GUESS, 1.0, level + slope
        self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """A point."""
        self._weight = _LONG_MEMORY * self._weight + 1
        dx, dy = x - self._x, y - self._y
        self._x += dx / self._weight
        self._y += dy / self._weight
        self._xx = _LONG_MEMORY * self._xx + dx * (x - self._x)
        self._xy = _LONG_MEMORY * self._xy + dx * (y - self._y)

    def fade(self) -> None:
        """What was added counts less."""
        self._weight *= _MEMORY
        self._xx *= _MEMORY
        self._xy *= _MEMORY

    def at(self, x: float) -> float:
        """The line's value."""
        return self.level + self.slope * x

    @property
    def slope(self) -> float:
        return max(0.0, (self._xy + self._doubt * self._guess) / (self._xx + self._doubt))

    @property
    def level(self) -> float:
        return max(0.0, self._y - self.slope * self._x)
