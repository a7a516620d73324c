"""Cost model of a step, learnt from measured steps, and the load that a Welcome reports."""

from __future__ import annotations

import numpy as np

from moa_runtime.wire.moa.v1 import session_pb2 as wire

#: Weight that a step has lost after one more: some 300 steps are remembered.
_FORGETTING = 1 / 300
#: A guess that the first observation scales: a pass over one token costs as much as 15 more tokens do, attention to
#: 4,000 tokens as much as the rest of a token, and to read a context as much as attention of 8 more tokens to it. Of a
#: Llama of 135 million parameters on a CPU.
_GUESS = np.array([15.0, 1.0, 1 / 4000, 8 / 4000])


class StepCost:
    """Seconds of a step: ``a + b * tokens + c * products + d * contexts``, least squares over the last steps.

    ``products`` counts pairs of a token and a token that it attends to, ``contexts`` the tokens that the sequences of
    the step hold, each read once however few of a sequence's tokens attend to it. The four coefficients are scaled
    by their initial guesses, so that a few steps of one kind change the scale of all and not their proportions; none
    becomes negative.
    """

    def __init__(self) -> None:
        self._weights = _GUESS * 1e-4
        # Ridge towards the guess at the present scale.
        self._square = np.zeros((4, 4))
        self._cross = np.zeros(4)
        self._scale: float | None = None

    def observe(self, tokens: int, products: int, contexts: int, seconds: float) -> None:
        """Learn from one measured step."""
        sizes = np.array([1.0, tokens, products, contexts]) * _GUESS
        guess = float(sizes.sum())
        ratio = seconds / guess
        self._scale = ratio if self._scale is None else self._scale + (ratio - self._scale) * 0.05
        sizes /= seconds  # relative errors: long steps do not outweigh short ones
        self._square = self._square * (1 - _FORGETTING) + np.outer(sizes, sizes)
        self._cross = self._cross * (1 - _FORGETTING) + sizes
        ridge = np.eye(4) * 0.02 * max(float(np.trace(self._square)), 1e-12)
        solution = np.linalg.solve(self._square + ridge, self._cross + ridge @ np.full(4, self._scale))
        self._weights = np.maximum(solution, 0.02 * self._scale) * _GUESS

    def seconds(self, tokens: int, products: int, contexts: int) -> float:
        """Predict the seconds of a step."""
        return float(self._weights @ (1.0, tokens, products, contexts))

    def fitting(self, seconds: float, context: int) -> int:
        """Return the number of tokens after ``context`` others that add at most ``seconds`` to a step; at least 0."""
        _, token, product, _ = self._weights
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
