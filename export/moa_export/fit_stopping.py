"""Fit the stopping rule of a drafter that writes offline to the target's own answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moa_export.progress import Advance
from moa_export.recordings import Recording
from moa_runtime.backends.base import Backend
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.offline_stopping import StoppingRule, repeats
from moa_runtime.tokens import common_length

_ONE = Budget.chain(1, nodes=1)
#: Tokens of an answer from one outage to the next.
_EVERY = 6
_PROBABILITIES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9)
_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_REPEATED = (4, 6, 8, 12, 16, 24)
#: Share of the target's own answers that may repeat themselves, because some do.
_OWN_REPEATS = 0.1


@dataclass(frozen=True)
class Stretch:
    """The text of one outage: log-probability of all up to each token (nats), and the number that the target keeps."""

    logprobs: list[float]
    kept: int

    def written(self, least: float, longest: int) -> int:
        """Return the tokens until the rule stops it: it continues while all so far has at least ``least`` (nats)."""
        before = [0.0, *self.logprobs[:-1]]
        return min(longest, sum(1 for _ in itertools.takewhile(lambda one: one >= least, before)))


def fit_stopping_rule(
    backend: Backend, recordings: Sequence[Recording], stop_tokens: Sequence[int], advance: Advance
) -> StoppingRule:
    """Return the rule that writes most in outages of recorded answers while the target keeps half of it.

    Args:
        backend: the device half.
        advance: called after each recording.
    """
    stretches: list[Stretch] = []
    for recording in recordings:
        stretches += outages(backend, recording, stop_tokens)
        advance()
    return choose_stopping_rule(stretches, _fit_repeated(recordings))


def choose_stopping_rule(stretches: Sequence[Stretch], repeated: int) -> StoppingRule:
    """Return the rule that writes most while the target keeps half of it; it writes nothing if the target never does.

    Args:
        repeated: see :class:`moa_runtime.offline_stopping.StoppingRule`.
    """
    best, most = StoppingRule(1.0, repeated, 0), 0
    for least, longest in itertools.product(_PROBABILITIES, _LENGTHS):
        written = [stretch.written(math.log(least), longest) for stretch in stretches]
        kept = sum(min(stretch.kept, length) for stretch, length in zip(stretches, written, strict=True))
        if 2 * kept >= sum(written) > most:
            best, most = StoppingRule(least, repeated, longest), sum(written)
    return best


def outages(backend: Backend, recording: Recording, stop_tokens: Sequence[int]) -> Iterator[Stretch]:
    """Yield what the drafter writes after every sixth token of an answer, until hardly any of it will be kept."""
    tokens, most = recording.tokens, max(_LENGTHS)
    drafter = MoaDrafter(backend, max_context=len(tokens) + most, stop_tokens=stop_tokens)
    for cut in range(recording.prompt + _EVERY, len(tokens) - _EVERY, _EVERY):
        held = drafter.rows
        # The newest token has no row yet.
        drafter.add_rows(held, recording.keys[held : cut - 1], recording.values[held : cut - 1])
        text, logprobs = tokens[:cut], list[float]()
        logprob = 0.0
        while len(text) < min(cut + most, len(tokens)) and logprob >= math.log(_PROBABILITIES[0]):
            tree = drafter.propose(text, _ONE)
            text += tree.tokens
            logprob += sum(tree.scores)
            logprobs.append(logprob)
            if not tree.tokens or text[-1] in stop_tokens:
                break
        yield Stretch(logprobs, common_length(text, tokens) - cut)


def _fit_repeated(recordings: Sequence[Recording]) -> int:
    """Return the length of the shortest repetition that hardly any answer of the target has."""

    def repeat(recording: Recording, length: int) -> bool:
        ends = range(recording.prompt + 1, len(recording.tokens) + 1)
        return any(repeats(recording.tokens[:end], length, end - recording.prompt) for end in ends)

    few = _OWN_REPEATS * len(recordings)
    found = (length for length in _REPEATED if sum(repeat(each, length) for each in recordings) <= few)
    return next(found, _REPEATED[-1])
