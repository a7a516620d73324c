"""Cost model of a step, learnt from measured steps, and the load that a Welcome reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_runtime.wire.moa.v1 import session_pb2 as wire

#: Weight that a step has lost after one more: some 300 steps are remembered.
_FORGETTING = 1 / 300
#: A guess that the first observation scales: a pass over one token costs as much as 15 more tokens do, attention to
#: 4,000 tokens as much as the rest of a token, to read a context as much as attention of 8 more tokens to it, and
#: another sequence as much as half a token. Of a Llama of 135 million parameters on a CPU.
_GUESS = np.array([15.0, 1.0, 1 / 4000, 8 / 4000, 0.5])
#: Steps after which the coefficients are computed again; the first ones are computed at once.
_EVERY = 16
#: Steps of up to this many tokens have a correction, the mean over the last steps of as many, of similar ones, and of
#: this many that need none.
_CORRECTED, _LAST, _NONE = 64, 32.0, 1.0
#: Weight of a step for the correction of twice as many tokens.
_SIMILAR = 0.01

_LOG2 = np.log2(np.maximum(np.arange(_CORRECTED + 1), 1))
_KERNEL = _SIMILAR ** np.abs(_LOG2[:, None] - _LOG2)

Float64 = NDArray[np.float64]
#: Seconds of a step by the number of its drafted tokens, ``[n]`` -> ``[n]``.
StepSeconds = Callable[[NDArray[np.int64]], Float64]
#: Drafted tokens that show what one costs: few of them may be free, for engines round their number up.
_SHOWING = 8


def showing_price(rounds: int) -> int:
    """Return a number of drafted tokens that shows what one costs in a step of ``rounds`` rounds."""
    return max(_SHOWING, rounds)


class StepCost:
    """Seconds of a step: ``a + b * tokens + c * products + d * contexts + e * sequences``, least squares over the last
    steps, times a measured correction for few tokens: engines round them up, and a second one may be free or not.

    ``products`` counts pairs of a token and a token that it attends to, ``contexts`` the tokens that the sequences of
    the step hold, each read once however few of a sequence's tokens attend to it. The coefficients are scaled by their
    initial guesses, so that a few steps of one kind change the scale of all and not their proportions; none becomes
    negative.

    Attributes:
        memory_s: seconds that a step with memory rows takes longer, and seconds of each row; no part of the cost.
    """

    def __init__(self) -> None:
        self.memory_s = (0.0, 0.0)
        self._guess = _GUESS
        self._weights = _GUESS * 1e-4
        # Ridge towards the guess at the present scale.
        self._square = np.zeros((5, 5))
        self._cross = np.zeros(5)
        self._scale: float | None = None
        self._steps = 0
        self._ratios = np.ones(_CORRECTED + 1)  # of measured seconds by exact ones; by tokens
        self._seen = np.zeros(_CORRECTED + 1)
        self._corrections = np.ones(_CORRECTED + 1)

    def observe(
        self, tokens: int, products: int, contexts: int, sequences: int, seconds: float, memory_rows: int = 0
    ) -> None:
        """Learn from one measured step, which also made ``memory_rows``."""
        seconds = max(seconds - self.memory_seconds(memory_rows), 1e-6)
        sizes = np.array([1.0, tokens, products, contexts, sequences]) * self._guess
        ratio = seconds / float(sizes.sum())
        self._scale = ratio if self._scale is None else self._scale + (ratio - self._scale) * 0.05
        sizes /= seconds  # relative errors: long steps do not outweigh short ones
        self._square *= 1 - _FORGETTING
        self._square += sizes[:, None] * sizes
        self._cross *= 1 - _FORGETTING
        self._cross += sizes
        self._steps += 1
        often = self._steps <= _EVERY or self._steps % _EVERY == 0
        if often:
            self._solve(self._scale)
        if tokens <= _CORRECTED:
            exact = float(self._weights @ (1.0, tokens, products, contexts, sequences))
            self._seen[tokens] = min(self._seen[tokens] + 1, _LAST)
            self._ratios[tokens] += (min(2.0, max(0.5, seconds / exact)) - self._ratios[tokens]) / self._seen[tokens]
        if often:
            self._correct()

    def _correct(self) -> None:
        weights = _KERNEL @ self._seen + _NONE
        self._corrections = (_KERNEL @ (self._seen * self._ratios) + _NONE) / weights

    def _solve(self, scale: float) -> None:
        ridge = np.eye(5) * 0.02 * max(float(np.trace(self._square)), 1e-12)
        solution = np.linalg.solve(self._square + ridge, self._cross + ridge @ np.full(5, scale))
        self._weights = np.maximum(solution, 0.02 * scale) * self._guess

    def memory_seconds(self, rows: int) -> float:
        """Predict the seconds that memory rows add to a step."""
        some, each = self.memory_s
        return some + each * rows if rows else 0.0

    def settle(self) -> None:
        """Make what is known the guess for later steps: those of a crowd are all alike, and keep its proportions."""
        self._guess, self._scale, self._steps = self._weights, 1.0, 0
        self._square, self._cross = np.zeros((5, 5)), np.zeros(5)

    def state(self) -> dict[str, Any]:
        """Return what :meth:`restore` takes up, in plain values; to be called after :meth:`settle`."""
        learnt = {"weights": self._weights, "ratios": self._ratios, "seen": self._seen}
        return {name: array.tolist() for name, array in learnt.items()} | {"memory_s": list(self.memory_s)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what another process has learnt. Raises KeyError, TypeError or ValueError if it is no state."""
        weights, ratios, seen = (np.array(state[name], np.float64) for name in ("weights", "ratios", "seen"))
        some, each = map(float, state["memory_s"])
        known = np.concatenate((weights, ratios, seen, [some, each]))
        if (weights.shape, ratios.shape, seen.shape) != ((5,), (_CORRECTED + 1,), (_CORRECTED + 1,)):
            raise ValueError("it has other sizes")
        if not (np.isfinite(known).all() and (known >= 0).all() and weights.sum() > 0):
            raise ValueError("it has numbers that are no durations")
        self._weights, self._ratios, self._seen, self.memory_s = weights, ratios, seen, (some, each)
        self._correct()
        self.settle()

    def curve(
        self,
        tokens: NDArray[np.int64],
        products: NDArray[Any],
        contexts: NDArray[Any],
        sequences: NDArray[np.int64] | int,
    ) -> Float64:
        """Predict the seconds of several steps, from and to ``[n]``."""
        level, token, product, context, sequence = self._weights
        exact = level + token * tokens + product * products + context * contexts + sequence * sequences
        few = np.minimum(tokens, _CORRECTED)
        corrected: Float64 = exact * np.where(tokens <= _CORRECTED, self._corrections[few], 1.0)
        return corrected

    def seconds(self, tokens: int, products: int, contexts: int, sequences: int) -> float:
        """Predict the seconds of a step."""
        return float(self.curve(np.array(tokens), np.array(float(products)), np.array(float(contexts)), sequences))

    def fitting(self, seconds: float, context: int) -> int:
        """Return the number of tokens after ``context`` others that add at most ``seconds`` to a step; at least 0."""
        _, token, product, _, _ = self._weights
        return max(0, int(seconds / (token + product * context)))


#: Weight of the newest step.
_NEWEST = 0.1
_MOST_S = 4000.0


class Load:
    """Running means of the queueing time of work and of the duration of steps."""

    def __init__(self) -> None:
        self._queue_s = self._step_s = 0.0
        self._newest = 1.0  # weight of the next step

    def stepped(self, queue_s: float, step_s: float) -> None:
        """Record one step: how long its oldest piece had waited, and how long the step took."""
        self._queue_s += self._newest * (max(0.0, queue_s) - self._queue_s)
        self._step_s += self._newest * (max(0.0, step_s) - self._step_s)
        self._newest = _NEWEST

    def message(self, answers: int) -> wire.Load:
        """Build the wire message; ``answers`` is the number of conversations that are being served."""
        queue_s, step_s = (min(seconds, _MOST_S) for seconds in (self._queue_s, self._step_s))
        return wire.Load(answers=answers, queue_us=int(1e6 * queue_s), step_us=int(1e6 * step_s))
