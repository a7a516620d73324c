"""A target that is a hash, and a drafter that knows it: outcomes can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moa_runtime.bundle import Fingerprints
from moa_runtime.drafters.base import DraftToken

VOCAB, STOP = 50, 0
PRINTS = Fingerprints("target", "tokenizer", "drafter")


class ToyEngine:
    """A target whose choice is a hash of the whole prefix; it ends its turn at the positions ``stops``."""

    fingerprints, vocab_size, stop_tokens = PRINTS, VOCAB, (STOP,)

    def __init__(self, stops: Sequence[int] = (), max_context: int = 1000) -> None:
        self.stops, self.max_context, self.forwards = stops, max_context, 0
        self.sequences_open = 0

    def choice(self, prefix: Sequence[int]) -> int:
        if len(prefix) in self.stops:
            return STOP
        state = 17
        for token in prefix:
            state = (state * 31 + token + 7) % 100_003
        return 1 + state % (VOCAB - 1)

    def open(self) -> ToySequence:
        self.sequences_open += 1
        return ToySequence(self)


class ToySequence:
    def __init__(self, engine: ToyEngine) -> None:
        self._engine = engine
        self._processed = 0

    def verify(self, prefix, draft, parents, sampling) -> list[int]:
        self._engine.forwards += 1
        self._processed = len(prefix)
        paths = [list(prefix)]
        for token, parent in zip(draft, parents, strict=True):
            paths.append([*paths[parent], token])
        return [self._engine.choice(path) for path in paths]

    def keep(self, path) -> None:
        self._processed += len(path)

    def rows(self, positions: range):
        assert positions.stop <= self._processed
        keys = np.array([1.0 + p for p in positions], np.float32).reshape(-1, 1, 1)
        return keys, -keys

    def close(self) -> None:
        self._engine.sequences_open -= 1


class ToyDrafter:
    """Knows the target: right for the first ``right`` tokens after the last committed one, then wrong."""

    def __init__(self, engine: ToyEngine, right: int) -> None:
        self._engine, self._right = engine, right
        self.rows = 0

    def add_rows(self, start, keys, values) -> None:
        assert 0 <= start <= self.rows
        expected = 1.0 + start + np.arange(len(keys))
        np.testing.assert_allclose(keys[:, 0, 0], expected, rtol=0.01)  # int8 on the wire
        np.testing.assert_allclose(values[:, 0, 0], -expected, rtol=0.01)
        self.rows = start + len(keys)

    def truncate_rows(self, length: int) -> None:
        self.rows = min(self.rows, length)

    def draft(self, prefix, count) -> list[DraftToken]:
        tokens = list(prefix)
        for _ in range(count):
            # All committed tokens but the last, the target's own, have a memory row.
            depth = len(tokens) - self.rows
            token = self._engine.choice(tokens)
            tokens.append(token if depth <= self._right else 1 + token % (VOCAB - 1))
        return [DraftToken(token, 0.0) for token in tokens[len(prefix) :]]

    def lengthen(self, prefix, logprob) -> list[DraftToken]:
        return []


def plain(engine: ToyEngine, prefix: Sequence[int], count: int) -> list[int]:
    """What the target alone writes."""
    tokens = list(prefix)
    while len(tokens) < len(prefix) + count and (len(tokens) == len(prefix) or tokens[-1] != STOP):
        tokens.append(engine.choice(tokens))
    return tokens[len(prefix) :]
