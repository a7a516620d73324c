"""A drafter that knows the toy engine: outcomes can be worked out by hand."""

from __future__ import annotations

import numpy as np

from moa_runtime.drafters.base import GREEDY
from moa_runtime.session.tree import DraftTree
from support.toy_engine import STOP, VOCAB, ToyEngine


class ToyDrafter:
    """Knows the target: right for the first ``right`` tokens after the last committed one, then wrong."""

    needs_rows = True
    stopping_rule = None

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

    def propose(self, prefix, budget, sampling=GREEDY) -> DraftTree:
        tokens = list(prefix)
        for _ in range(min(budget.nodes, budget.levels, budget.depth)):
            # All committed tokens but the last, the target's own, have a memory row.
            depth = len(tokens) - self.rows
            token = self._engine.choice(tokens)
            tokens.append(token if depth <= self._right else 1 + token % (VOCAB - 1))
            if token == STOP:
                break
        drafted = tokens[len(prefix) :]
        return DraftTree.chain(drafted, [0.0] * len(drafted))
