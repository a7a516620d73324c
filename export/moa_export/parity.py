"""How far an exported device half is from PyTorch, measured on real activations.

Both device halves replay the same rounds of recorded conversations: catch up with several committed tokens
at once, draft some tokens one by one, roll back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moa_export.recipe import Tolerance
from moa_export.recordings import Recording
from moa_runtime.backends.base import Backend, StepResult
from moa_runtime.drafters.base import Float32
from moa_runtime.drafters.moa import GrowingRows

ROUND_TOKENS, DRAFT_STEPS = 8, 4


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


def compare(reference: Backend, exported: Backend, recordings: Sequence[Recording]) -> Parity:
    """Replay rounds of every recording on both sides; the drafted path is the reference's own."""
    errors: list[float] = []
    relative: list[float] = []
    overlaps: list[float] = []
    same_best = 0
    for recording in recordings:
        for ours, theirs in _rounds(reference, exported, recording):
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


def _rounds(reference: Backend, exported: Backend, recording: Recording) -> list[tuple[StepResult, StepResult]]:
    """Both sides' results of every step, queried at every new token of the answer."""
    sides = (_Replay(reference), _Replay(exported))
    results = []
    done = 0
    for base in range(recording.prompt, len(recording.tokens), ROUND_TOKENS):
        # The last committed token is the target's bonus: it has no memory row yet.
        memory = recording.keys[: base - 1], recording.values[: base - 1]
        fresh = recording.tokens[done:base]
        asked = min(len(fresh), ROUND_TOKENS)
        for _ in range(1 + DRAFT_STEPS):
            pair = tuple(side.feed(fresh, asked, memory) for side in sides)
            results.append(pair)
            fresh, asked = [int(pair[0].top_tokens[-1, 0])], 1
        done = base
        for side in sides:
            side.cache.truncate(base)
    return results


class _Replay:
    """A backend with a self-attention cache of its own."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.cache = GrowingRows(backend.kv_shape)

    def feed(self, tokens: Sequence[int], asked: int, memory: tuple[Float32, Float32]) -> StepResult:
        """Append ``tokens`` and query the last ``asked`` of them."""
        held, new = self.cache.length, len(tokens)
        result = self.backend.step(
            np.array(tokens, np.int64),
            np.arange(held, held + new, dtype=np.int64),
            np.arange(new - asked, new, dtype=np.int64),
            *self.cache.first(held),
            np.tri(new, held + new, held, dtype=np.bool_),
            *memory,
        )
        self.cache.write(held, result.keys, result.values)
        return result
