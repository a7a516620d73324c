"""How far an exported device half is from PyTorch, measured on real activations.

Both device halves replay the same rounds of recorded conversations: catch up with several committed tokens
at once, draft some tokens one by one, roll back. PyTorch's goes first, and its results are kept: both at once
would not fit in memory with a large vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moa_export.recipe import Tolerance
from moa_export.recordings import Recording
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.drafters.moa import GrowingRows

ROUND_TOKENS, DRAFT_STEPS = 8, 4


@dataclass(frozen=True)
class Step:
    """One step of the reference.

    Attributes:
        tokens: what is appended behind ``held`` cached tokens.
        asked: how many of them are queried, the last ones.
        rows: how many memory rows are there.
        result: what the reference made of it.
    """

    tokens: list[int]
    held: int
    asked: int
    rows: int
    result: StepResult


@dataclass(frozen=True)
class Rehearsal:
    """A recorded conversation, and every step of the reference in it."""

    recording: Recording
    steps: Sequence[Step]


@dataclass(frozen=True)
class Parity:
    """The comparison over all queries; errors are of the log-probabilities (nats) of the reference's
    top-k tokens, where both sides list them. The relative one is a share of the reference's own."""

    queries: int
    max_logprob_error: float
    mean_logprob_error: float
    mean_relative_error: float
    top1_agreement: float
    top_k_overlap: float

    def to_dict(self) -> dict[str, Any]:
        return {k: round(v, 5) if isinstance(v, float) else v for k, v in dataclasses.asdict(self).items()}

    def failures(self, tolerance: Tolerance) -> list[str]:
        """What lies beyond ``tolerance``, one phrase each; empty when all is well."""
        # Written so that a figure that is not a number fails too.
        found = []
        if not self.mean_logprob_error <= tolerance.mean_logprob_error:
            found.append(f"mean log-prob error {self.mean_logprob_error:.4f} > {tolerance.mean_logprob_error}")
        if not self.top1_agreement >= tolerance.top1_agreement:
            found.append(f"top-1 agreement {self.top1_agreement:.4f} < {tolerance.top1_agreement}")
        if not self.top_k_overlap >= tolerance.top_k_overlap:
            found.append(f"top-k overlap {self.top_k_overlap:.4f} < {tolerance.top_k_overlap}")
        return found


def rehearse(reference: Backend, recording: Recording) -> Rehearsal:
    """Replay rounds of a recording, queried at every new token of the answer; what is drafted is its own best token."""
    replay = _Replay(reference, recording)
    steps: list[Step] = []
    done = 0
    for base in range(recording.prompt, len(recording.tokens), ROUND_TOKENS):
        fresh, held = recording.tokens[done:base], done
        asked = min(len(fresh), ROUND_TOKENS)
        for _ in range(1 + DRAFT_STEPS):
            # The last committed token is the target's bonus: it has no memory row yet.
            result = replay.feed(fresh, held=held, asked=asked, rows=base - 1)
            steps.append(Step(fresh, held, asked, base - 1, result))
            held += len(fresh)
            fresh, asked = [int(result.top_tokens[-1, 0])], 1
        done = base
    return Rehearsal(recording, steps)


def compare(rehearsals: Sequence[Rehearsal], exported: Backend) -> Parity:
    """Take an exported device half through every step of the reference."""
    errors: list[float] = []
    relative: list[float] = []
    overlaps: list[float] = []
    same_best = 0
    for rehearsal in rehearsals:
        replay = _Replay(exported, rehearsal.recording)
        for step in rehearsal.steps:
            ours, theirs = step.result, replay.feed(step.tokens, held=step.held, asked=step.asked, rows=step.rows)
            for row in range(len(ours.top_tokens)):
                expected = dict(zip(ours.top_tokens[row].tolist(), ours.top_logprobs[row].tolist(), strict=True))
                got = dict(zip(theirs.top_tokens[row].tolist(), theirs.top_logprobs[row].tolist(), strict=True))
                shared = expected.keys() & got.keys()
                errors += [abs(expected[token] - got[token]) for token in shared]
                relative += [abs(1 - got[token] / expected[token]) for token in shared if expected[token]]
                overlaps.append(len(shared) / len(expected))
                same_best += bool(ours.top_tokens[row, 0] == theirs.top_tokens[row, 0])
    return Parity(
        queries=len(overlaps),
        # No shared token at all leaves no error to average: worse than any tolerance.
        max_logprob_error=float(np.max(errors)) if errors else float("inf"),
        mean_logprob_error=float(np.mean(errors)) if errors else float("inf"),
        mean_relative_error=float(np.mean(relative)) if relative else float("inf"),
        top1_agreement=same_best / len(overlaps),
        top_k_overlap=float(np.mean(overlaps)),
    )


class _Replay:
    """A backend with a self-attention cache of its own, in one conversation."""

    def __init__(self, backend: Backend, recording: Recording) -> None:
        self._backend = backend
        self._memory = recording.keys, recording.values
        self._cache = GrowingRows(backend.kv_shape)

    def feed(self, tokens: Sequence[int], *, held: int, asked: int, rows: int) -> StepResult:
        """Cut the cache to ``held`` tokens, append ``tokens``, query the last ``asked`` of them."""
        self._cache.truncate(held)
        keys, values = self._memory
        memory = keys[:rows], values[:rows]
        result = self._backend.step(StepInputs.chain(tokens, self._cache.first(held), memory, asked=asked))
        self._cache.write(held, result.keys, result.values)
        return result
