"""Sampling: the target's token as a function of its logits, the sampling settings and the absolute position.

There is no history of earlier draws: however often a position is drafted, lost, resent or decided again, it gets the
same noise, and so the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moa_runtime.drafters.gumbel import MOST, gumbel
from moa_runtime.session.events import AnswerSampling, Sampling, TokenLogprobs
from moa_runtime.session.tree import path_to

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Number of the largest weights among which the nucleus is searched first.
_FEW = 1024
#: Tokens within this distance (nats) of the best one are tried first; usually no other can win.
_NEAR = 6.0
_LARGEST = float(np.finfo(np.float32).max)


class Chooser:
    """The target's choices after a prefix and along the draft that follows it.

    A choice depends on logits, sampling, tokens and positions alone. In vLLM's order: tokens that the grammar does not
    allow are masked, and those that end the answer before ``min_tokens``, unless the grammar allows no others; then
    come ``logit_bias``, repetition, frequency and presence penalty, temperature, ``min_p``, ``top_k`` and ``top_p``.
    Each works on what those before it leave.

    Args:
        sampling: the penalties of an :class:`~moa_runtime.session.events.AnswerSampling` count from its
            ``answer_from`` on, those of another from the end of the prefix on.
        prefix: all tokens before the first choice.
        stop_tokens: those that end an answer.

    Attributes:
        logprobs: of each choice so far, by the logits as they are given; none if the sampling asks for none.
    """

    def __init__(self, sampling: Sampling, prefix: Sequence[int], stop_tokens: Sequence[int]) -> None:
        self._sampling, self._prefix, self._stop_tokens = sampling, prefix, stop_tokens
        self._answer_from = sampling.answer_from if isinstance(sampling, AnswerSampling) else len(prefix)
        self._counts: Int64 | None = None  # of each token in the answer before the draft; [vocab_size]
        self._known: Mask | None = None  # whether a token is in the conversation before the draft; [vocab_size]
        self._state = sampling.state if isinstance(sampling, AnswerSampling) else None
        self.logprobs: list[TokenLogprobs] = []
        self._masks: dict[tuple[int, ...], Mask] = {}  # what the grammar allows after a path, as far as it is known

    def prepare(self, draft: Sequence[int], parents: Sequence[int]) -> None:
        """Compute the masks of the grammar for a draft, while the target computes its logits."""
        for node in range(1 + len(draft) if self._state is not None else 0):
            path = path_to(node, draft, parents)
            before = self._masks.get(tuple(path[:-1]))
            if not path or (before is not None and before[path[-1]]):
                self._mask(path)

    def _mask(self, path: Sequence[int]) -> Mask:
        """Return the tokens that the grammar allows after the prefix and ``path``: ``[vocab_size]``."""
        assert self._state is not None
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._state.mask([*self._prefix[self._answer_from :], *path])
        return self._masks[key]

    def choose(self, logits: Float32, path: Sequence[int] = ()) -> int:
        """Choose the token after the prefix and the drafted tokens ``path``; logits as in :func:`choose`."""
        position, sampling = len(self._prefix) + len(path), self._sampling
        adjusts = sampling.penalised or sampling.biased or self._state is not None
        token = choose(self._adjusted(logits, path, position) if adjusts else logits, sampling, position)
        if sampling.logprobs is not None:
            self.logprobs.append(logprobs_of(logits, token, sampling.logprobs))
        return token

    def _adjusted(self, logits: Float32, path: Sequence[int], position: int) -> Float64:
        """Return the logits that the temperature divides: ``[vocab_size]``."""
        sampling, adjusted = self._sampling, logits.astype(np.float64)
        able = None if self._state is None else self._mask(path).copy()
        if able is not None:
            adjusted[~able] = -np.inf
            able[list(self._stop_tokens)] = False
        if position - self._answer_from < sampling.min_tokens and (able is None or able.any()):
            adjusted[list(self._stop_tokens)] = -np.inf
        for token, bias in sampling.logit_bias:
            adjusted[token] += float(np.float32(bias))
        if not sampling.penalised:
            return adjusted
        counts, known = self._counted(len(logits))
        np.add.at(counts, list(path), 1)
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        repetition, frequency, presence = (float(np.float32(getattr(sampling, name))) for name in names)
        if repetition != 1:
            seen = np.flatnonzero(known | (counts > 0))
            own = adjusted[seen]
            adjusted[seen] = np.where(own > 0, own / repetition, own * repetition)
        if frequency or presence:
            written = np.flatnonzero(counts)
            adjusted[written] -= frequency * counts[written] + presence
        np.subtract.at(counts, list(path), 1)
        return adjusted

    def _counted(self, vocab_size: int) -> tuple[Int64, Mask]:
        if self._counts is None or self._known is None:
            answer = np.asarray(self._prefix[self._answer_from :], np.int64)
            self._counts = np.bincount(answer, minlength=vocab_size)
            self._known = np.zeros(vocab_size, np.bool_)
            self._known[np.asarray(self._prefix, np.int64)] = True
        return self._counts, self._known


def logprobs_of(logits: Float32, token: int, count: int) -> TokenLogprobs:
    """Return the log probability of a token, and the ``count`` largest ones; of equal ones those of lower ids.

    Args:
        logits: ``[vocab_size]``; NaN counts as minus infinity.
    """
    best = logits.max()
    if np.isnan(best):
        logits = np.where(np.isnan(logits), -np.float32(np.inf), logits)
        best = logits.max()
    if not np.isfinite(best):  # all of the probability is that of the infinite ones
        logits, best = np.where(logits == best, np.float32(0), -np.float32(np.inf)), np.float32(0)
    shift = float(best) + float(np.log(np.exp(logits - best).sum(dtype=np.float64)))
    tokens = np.flatnonzero(largest(logits, min(count, len(logits)))) if count else np.empty(0, np.int64)
    tokens = tokens[np.argsort(-logits[tokens], kind="stable")]
    own, *top = (min(0.0, float(logits[each]) - shift) for each in (token, *tokens))
    return TokenLogprobs(own, tuple(tokens.tolist()), tuple(top))


def choose(logits: Float32 | Float64, sampling: Sampling, position: int) -> int:
    """Choose the target's token for the absolute ``position``.

    Greedy (the lowest id among equals) if the temperature is not above 0. Otherwise, of the tokens that the masks
    leave, the one with the largest ``logit / temperature + noise`` (of equals the lowest id), with the noise of
    :func:`moa_runtime.drafters.gumbel.gumbel`: so each is chosen with its probability in the softmax, and a drafter
    with the same noise guesses well. In float64, so rounding decides about once in 10**12 choices.

    ``min_p``, ``top_k`` and ``top_p`` mask one after the other, each by the probabilities that the temperature and the
    masks before leave: vLLM's order.

    Args:
        logits: ``[vocab_size]``; NaN counts as minus infinity.
    """
    # The wire carries float32, so a temperature given as float64 must mean the same here.
    temperature = float(np.float32(sampling.temperature))
    best = int(logits.argmax())  # the first NaN, if there is one
    if np.isnan(logits[best]):
        logits = np.where(np.isnan(logits), -np.inf, logits)
        best = int(logits.argmax())
    if not temperature > 0 or not np.isfinite(logits[best]):
        return best
    scaled = (logits.astype(np.float64) - float(logits[best])) / min(temperature, _LARGEST)
    tokens = _unmasked(scaled, sampling)
    if tokens is not None:
        scaled = scaled[tokens]
    near = np.flatnonzero(scaled > -_NEAR)
    score = (scaled[near] + gumbel(sampling.seed, position, near if tokens is None else tokens[near])).max()
    able = np.flatnonzero(scaled + MOST >= score)
    ids = able if tokens is None else tokens[able]
    return int(ids[(scaled[able] + gumbel(sampling.seed, position, ids)).argmax()])


def _unmasked(scaled: Float64, sampling: Sampling) -> Int64 | None:
    """The tokens that the masks leave, ascending; None for all.

    Args:
        scaled: logits by temperature, the largest of them 0.
    """
    top_p, min_p = float(np.float32(sampling.top_p)), float(np.float32(sampling.min_p))
    counted = 0 < sampling.top_k < len(scaled)
    if not counted and not 0 < top_p < 1 and not min_p > 0:
        return None
    weights = np.exp(scaled)
    if min_p > 0:
        weights = np.where(weights >= min(min_p, 1.0), weights, 0.0)
    if counted:
        weights = np.where(largest(weights, sampling.top_k), weights, 0.0)
    if 0 < top_p < 1:
        weights = np.where(nucleus(weights, top_p), weights, 0.0)
    return np.flatnonzero(weights)


def largest(weights: Float32 | Float64, count: int) -> Mask:
    """Return a mask of the ``count`` largest weights; of equal ones at the edge, those of lower ids."""
    return _down_to(weights, np.partition(weights, -count)[-count], count)


def nucleus(weights: Float64, top_p: float) -> Mask:
    """Return a mask of the smallest set of largest weights that holds a share of ``top_p``.

    Of equal weights at its edge it has the lower ids. ``nucleus([1, 5, 3, 1], 0.85)`` ->
    ``[True, True, True, False]``.
    """
    share = top_p * float(weights.sum())
    descending = np.sort(np.partition(weights, -_FEW)[-_FEW:] if len(weights) > _FEW else weights)[::-1]
    cumulative = np.cumsum(descending)
    if cumulative[-1] < share:  # seldom: sorting them all takes most of the time
        descending = np.sort(weights)[::-1]
        cumulative = np.cumsum(descending)
    count = min(int(np.searchsorted(cumulative, share, side="left")) + 1, len(descending))
    return _down_to(weights, descending[count - 1], count)


def _down_to(weights: Float32 | Float64, edge: float, count: int) -> Mask:
    kept = weights > edge
    kept[np.flatnonzero(weights == edge)[: count - int(kept.sum())]] = True
    return kept
