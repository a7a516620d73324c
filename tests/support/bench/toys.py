"""Drafters that know the toy engine in part: outcomes can be worked out by hand, and recorded."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np

from moa_bench.recording import RecordedAnswer, Recording, record
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.drafters.base import GREEDY
from moa_runtime.offline_stopping import StoppingRule
from moa_runtime.session.tree import DraftTree
from support.toy_engine import PRINTS, STOP, VOCAB, ToyEngine, plain

MANIFEST = SimpleNamespace(
    architecture="moa", fingerprints=PRINTS, stop_tokens=(STOP,), max_context=1000, stopping_rule=StoppingRule()
)
SHARES = (0.62, 0.2, 0.1, 0.04)


class KnowingBackend(Backend):
    """The target's choice is its first candidate with a probability of 0.62, and so on. Cache entries are tokens."""

    top_k, kv_shape, max_positions = len(SHARES), (1, 1), None

    def step(self, inputs: StepInputs) -> StepResult:
        entries = np.repeat(inputs.tokens.astype(np.float32), 1).reshape(-1, 1, 1)
        every = np.concatenate((inputs.self_keys, entries)).astype(np.int64)[:, 0, 0]
        tokens = [self._candidates(every[inputs.self_mask[query]].tolist()) for query in inputs.queries]
        logprobs = np.tile(np.log(np.array(SHARES, np.float32)), (len(tokens), 1))
        return StepResult(np.array(tokens), logprobs, entries, entries)

    @staticmethod
    def _candidates(text: list[int]) -> list[int]:
        rng = random.Random(str(text))
        right = ToyEngine().choice(text)
        wrong = rng.sample([token for token in range(1, VOCAB) if token != right], len(SHARES))
        rank = rng.choices(range(len(SHARES) + 1), [*SHARES, 1 - sum(SHARES)])[0]
        return [*wrong[:rank], right, *wrong[rank:]][: len(SHARES)]


def recorded(prompt: list[int], tokens: int) -> RecordedAnswer:
    engine = ToyEngine()
    answer = plain(engine, prompt, tokens)
    return record(MANIFEST, KnowingBackend(), engine, prompt, answer, ngrams=True, on_position=lambda: None)


def toy_recording(tokens: int) -> Recording:
    """Two answers of this number of tokens."""
    answers = [recorded([3, 1, 4, seed], tokens) for seed in (1, 5)]
    return Recording("knowing", PRINTS, VOCAB, (STOP,), True, answers)


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
