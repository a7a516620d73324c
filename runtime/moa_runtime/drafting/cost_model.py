"""A controller with an online cost model: it chooses the shapes that maximise tokens per second."""

from __future__ import annotations

from moa_runtime.drafters.base import Budget, Prices
from moa_runtime.drafting.events import Pushed, RoundEnded

_DECAY = 0.95  # of the averages, per round
_SLOW_DECAY = 0.99  # of the fitted times, which vary by more than a token costs
#: First guess: a pass over one token takes as long as 15 further tokens. Measured with a Llama of 135 million
#: parameters on a CPU; little is lost if more tokens cost less.
_TOKENS_OF_A_PASS = 15.0
_MOST_OF_A_GUESS = 3.0  # largest multiple of that guess that a prompt may suggest as the cost of a drafted token
_FIRST_STEP_S = 0.005
_GUESS_WEIGHT = 0.1  # of the first guess, beside points of weight 1
_MOST_AHEAD = 8
#: A round counts as at most this multiple of the expected one: a stall does not predict later rounds, and a lasting
#: change soon becomes the expectation.
_STALL = 10.0
_LEAST_S = 0.001  # shortest expectation, because multiples of 0 s are 0 s
#: Share of the time for trying a model whose steps do not pay.
_TRIES = 0.02


class CostModel:
    """Take each part of a draft that brings more tokens per second than the rounds so far.

    With ``rate`` the tokens per second of the rounds so far, a part that takes ``t`` seconds costs ``rate * t`` tokens.
    It pays if it is expected to bring more: this rule maximises tokens per second after ``rate`` has converged
    (Dinkelbach 1967, "On nonlinear fractional programming"). The parts are the steps of the device's model, the nodes
    that each step continues, and the tokens of the target's pass. The costs of the first two are learned from the times
    of drafts, those of the last from the target's times in verdicts. So a slow link makes drafts larger, a slow device
    makes them flatter, and a slow target makes them narrower.

    If the model's steps do not pay, only copies are sent, and a step is tried now and then. Other sessions that share
    the target need no price: the server verifies as much of a draft as pays for all.

    Args:
        nodes, levels, width: largest draft.
    """

    def __init__(self, nodes: int = 62, levels: int = 16, width: int = 10) -> None:
        self._nodes, self._levels, self._width = nodes, levels, width
        self._tokens = self._seconds = self._rounds = 0.0
        # Prior: a few judged tokens, because one round says little.
        self._right, self._judged = 3.0, 6.0
        self._first_right, self._firsts = 3.0, 5.0
        self._step = Line(_FIRST_STEP_S, 0.1 * _FIRST_STEP_S, doubt=0.1)  # seconds of a step, by the nodes it continues
        self._pass: Line | None = None  # the target's seconds, by tokens
        self._idle_s = 0.0  # seconds since the model took a step
        self._prompt: tuple[int, float] | None = None  # tokens, seconds of the first prompt, until a draft
        self._timed = False  # whether a step was timed
        self._reads = False  # whether the next draft's first step also reads the prompt

    @property
    def prices(self) -> Prices:
        """Present costs of the parts of a draft, in tokens."""
        rate, step = self._tokens / self._seconds if self._seconds else 0.0, self._step
        return Prices(rate * step.level, rate * step.slope, rate * self.token_s, self._right / self._judged)

    @property
    def token_s(self) -> float:
        """Seconds that each drafted token adds to the target's pass."""
        return self._pass.slope if self._pass else 0.0

    def budget(self) -> Budget:
        """Return the budget of the next draft; it has no levels if the model's steps do not pay."""
        prices = self.prices
        pays = not self._timed or self._first_right / self._firsts >= prices.token
        tries = _TRIES * self._idle_s >= self._step.level + self._step.slope
        return Budget(self._nodes, self._levels if pays or tries else 0, self._width, branches=True, prices=prices)

    def ahead(self, drafted: int, probability: float) -> bool:
        """Return whether one more token pays while a verdict is in flight."""
        prices = self.prices
        return drafted < _MOST_AHEAD and probability * prices.follows >= prices.token

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        """Learn the times and tokens of a round or of a pushed verdict."""
        if isinstance(outcome, Pushed):
            if outcome.compute_s:  # 0 s if verdicts have arrived together
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
        """Learn from the verdict on a draft."""
        seconds = outcome.draft_s + outcome.waited_s
        if self._rounds:
            seconds = min(seconds, _STALL * max(_LEAST_S, self._seconds / self._rounds))
        self._rounds = _DECAY * self._rounds + 1
        self._tokens = _DECAY * self._tokens + outcome.accepted + 1
        self._seconds = _DECAY * self._seconds + seconds
        self._idle_s = 0.0 if outcome.steps else self._idle_s + outcome.waited_s
        if not outcome.steps:
            self._step.fade()  # so that the next try weighs more
        else:
            step_s = outcome.draft_s / len(outcome.steps)
            # A step that also reads a prompt takes longer, so it counts only if it was faster than expected.
            if not self._reads or step_s < self._step.level:
                self._step.add(sum(outcome.steps) / len(outcome.steps), step_s)
                self._timed = True
            self._reads = False
            self._right = _DECAY * self._right + outcome.accepted
            self._judged = _DECAY * self._judged + min(outcome.accepted + 1, outcome.depth)
            self._first_right = _DECAY * self._first_right + (outcome.accepted > 0)
            self._firsts = _DECAY * self._firsts + 1

    def _passed(self, drafted: int, target_s: float) -> None:
        """Learn from a pass of the target over ``drafted`` tokens that took ``target_s``."""
        if self._prompt is not None or self._pass is None:
            self._pass, self._prompt = _pass_of(target_s, drafted, self._prompt), None
        else:
            target_s = min(target_s, _STALL * max(_LEAST_S, self._pass.at(drafted)))
        self._pass.add(drafted, target_s)

    def _asked(self, supplied: int, target_s: float, link_s: float) -> None:
        """Learn from a prompt's verdict, which has the first times of target and link."""
        if self._pass is not None:
            return
        self._prompt = (supplied, target_s)
        self._pass = _pass_of(target_s, supplied)
        self._tokens, self._seconds = 2.0, max(0.0, link_s) + self._pass.level + 2 * _FIRST_STEP_S


def _pass_of(seconds: float, tokens: int, prompt: tuple[int, float] | None = None) -> Line:
    """Return a first guess of the target's seconds by tokens, from one pass over ``tokens`` and one over a ``prompt``.

    A token of a prompt may take more or less than one of a draft, so the slope is bounded until drafts replace it.
    """
    pass_s = seconds / (1 + tokens / _TOKENS_OF_A_PASS)
    slope = pass_s / _TOKENS_OF_A_PASS
    if prompt is not None and prompt[0] > tokens + _TOKENS_OF_A_PASS:
        slope = min(max(0.0, (prompt[1] - seconds) / (prompt[0] - tokens)), _MOST_OF_A_GUESS * slope)
        pass_s = max(0.0, seconds - slope * tokens)
    return Line(pass_s, slope, doubt=10.0)


class Line:
    """Fit ``level + slope * x``, both at least 0, by least squares with decaying weights.

    Args:
        level, slope: the first guess.
        doubt: weight of the guessed slope, in squared units of ``x``.
    """

    def __init__(self, level: float, slope: float, *, doubt: float) -> None:
        self._guess, self._doubt = slope, doubt
        self._weight, self._x, self._y = _GUESS_WEIGHT, 1.0, level + slope
        self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a point."""
        self._weight = _SLOW_DECAY * self._weight + 1
        dx, dy = x - self._x, y - self._y
        self._x += dx / self._weight
        self._y += dy / self._weight
        self._xx = _SLOW_DECAY * self._xx + dx * (x - self._x)
        self._xy = _SLOW_DECAY * self._xy + dx * (y - self._y)

    def fade(self) -> None:
        """Reduce the weight of the points so far."""
        self._weight *= _DECAY
        self._xx *= _DECAY
        self._xy *= _DECAY

    def at(self, x: float) -> float:
        """Return the line's value."""
        return self.level + self.slope * x

    @property
    def slope(self) -> float:
        """Rise per unit of ``x``."""
        return max(0.0, (self._xy + self._doubt * self._guess) / (self._xx + self._doubt))

    @property
    def level(self) -> float:
        """Value at ``x = 0``."""
        return max(0.0, self._y - self.slope * self._x)
