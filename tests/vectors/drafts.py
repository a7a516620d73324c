"""Cases of the drafter with a backend: rows arrive, are dropped and refused; texts grow and are truncated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from moa_runtime.backends.base import Backend, Float32, StepInputs, StepResult
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import NgramMixture
from moa_runtime.session.events import Sampling
from vectors.fixtures_draws import Draws, copying, some_budget, tree_of

KV = (1, 2)
_TOP_K, _VOCABULARY = 4, 12


class CountingBackend(Backend):
    """Replaces a model: the next token is an integer sum over the positions and tokens that a query may see.

    A token ``t`` at position ``p`` has the entries ``[t, p]`` and ``[t + p, 1]``. Of what a query sees, an entry counts
    ``7 * keys[0] + 3 * keys[1] + values[0]``, a memory row ``5 * keys[0] + 11 * values[1]``, its position 13 times; the
    sum modulo 1009 is ``x``. The candidates are ``(x + 5 * k) % 12`` for ``k`` from 0 to 3, with log-probabilities of
    ``-0.5 - x * 31 % 128 / 64`` and 1, 1.75 and 2.5 less.
    """

    top_k = _TOP_K
    kv_shape = KV
    max_positions = None

    def __init__(self, *, needs_a_row: bool) -> None:
        self._needs_a_row = needs_a_row
        #: Of each step: new tokens, cached ones, memory rows.
        self.steps: list[list[int]] = []

    @property
    def needs_a_row(self) -> bool:
        return self._needs_a_row

    def step(self, inputs: StepInputs) -> StepResult:
        tokens, positions = inputs.tokens, inputs.positions
        self.steps.append([len(tokens), len(inputs.self_keys), len(inputs.memory_keys)])
        keys = np.stack((tokens, positions), axis=1).astype(np.float32)[:, None]
        values = np.stack((tokens + positions, np.ones_like(tokens)), axis=1).astype(np.float32)[:, None]
        all_keys, all_values = np.concatenate((inputs.self_keys, keys)), np.concatenate((inputs.self_values, values))
        entries = (7 * all_keys[:, 0, 0] + 3 * all_keys[:, 0, 1] + all_values[:, 0, 0]).astype(np.int64)
        rows = int((5 * inputs.memory_keys[:, 0, 0] + 11 * inputs.memory_values[:, 0, 1]).sum())
        seen = inputs.self_mask[inputs.queries].astype(np.int64) @ entries + 13 * positions[inputs.queries] + rows
        x = (seen % 1009)[:, None]
        best = (x + 5 * np.arange(_TOP_K)) % _VOCABULARY
        logprobs = -0.5 - (x * 31 % 128) / 64 - np.array([0, 1, 1.75, 2.5])
        return StepResult(best, logprobs.astype(np.float32), keys, values)


def moa_drafts(draws: Draws) -> Iterator[dict[str, Any]]:
    """A drafter, or a writer, from a conversation's first token on."""
    for number in range(60):
        needs_a_row, ngrams = number % 4 != 3, number % 3 != 2
        backend = CountingBackend(needs_a_row=needs_a_row)
        most = draws.one_of([60, 10_000])
        drafter = MoaDrafter(backend, max_context=most, stop_tokens=[0], mixture=NgramMixture([0]) if ngrams else None)
        text = copying(draws, [], draws.one_of([1, 5, 40, 1200]))
        told = []
        for _ in range(14):
            one = _rows(draws, drafter, len(text)) if needs_a_row and draws.share() < 0.5 else None
            if one is None:
                text, one = _proposed(draws, drafter, text)
            told.append(one | {"steps": backend.steps, "rows": drafter.rows})
            backend.steps = []
        yield {"needs_a_row": needs_a_row, "ngrams": ngrams, "max_context": most, "told": told}


def _rows(draws: Draws, drafter: MoaDrafter, length: int) -> dict[str, Any]:
    """Tell it of rows: most often those of tokens that have none yet."""
    if draws.share() < 0.2:
        kept = draws.whole(0, drafter.rows + 1)
        drafter.truncate_rows(kept)
        return {"call": "truncate_rows", "length": kept}
    start = draws.one_of([drafter.rows, drafter.rows, draws.whole(0, drafter.rows), drafter.rows + 1])
    keys = _numbers(draws, draws.whole(1, 6) if draws.flag() else max(1, length - 1 - start))
    wrong = draws.share() < 0.1
    values = keys[:-1] if wrong else keys + 1
    said: dict[str, Any] = {
        "call": "add_rows",
        "start": start,
        "keys": keys[:, 0].tolist(),
        "values": values[:, 0].tolist(),
    }
    try:
        drafter.add_rows(start, keys, values)
    except ValueError as error:
        said["raises"] = str(error)
    return said


def _proposed(draws: Draws, drafter: MoaDrafter, text: list[int]) -> tuple[list[int], dict[str, Any]]:
    """Have it draft; the text as it is when some of that was taken, or the end of the text was dropped."""
    budget = some_budget(draws)
    tentative = draws.one_of([0, 0, draws.whole(0, min(3, len(text) - 1))])
    budget = replace(budget, branches=draws.flag(), tentative=tentative)
    if draws.share() < 0.2:
        budget = Budget.chain(draws.whole(0, 8))
    sampling = Sampling(draws.one_of([0.0, 0.0, 0.8]), 1.0, draws.whole(0, 1000))
    tree = drafter.propose(text, budget, sampling)
    said = {"call": "propose", "prefix": text, "budget": asdict(budget), "sampling": sampling.to_json()}
    path = [tree.tokens[index] for index in tree.likeliest_path()]
    kept = text[: max(1, len(text) - draws.whole(0, 4))] if draws.share() < 0.2 else text
    following = [*kept, *path[: draws.whole(0, len(path))], draws.whole(1, 11)]
    return following, said | {"tree": tree_of(tree)}


def _numbers(draws: Draws, count: int) -> Float32:
    return np.array([[[draws.whole(0, 30), draws.whole(0, 30)]] for _ in range(count)], np.float32)
