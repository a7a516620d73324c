"""A target that is a hash of the whole prefix, behind the engine's contract, with the limits of engines to come."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np

from moa_runtime.manifest import Fingerprints
from moa_runtime.session.tree import accepted_path
from moa_server.engine.base import Capabilities, EngineFacts, Outcome, Rows, StepRequest

VOCAB, STOP = 50, 0
PRINTS = Fingerprints("target", "tokenizer", "drafter")


class ToyEngine:
    """Chooses by a hash of the prefix (sampled or not, the seed enters it); ends its turn at the positions ``stops``.

    A memory row at position p is ``p + 1``, its value the negative.

    Args:
        capabilities: what it says it can do, and what it checks.
        vocab_size: of its tokens.
        preempts: the share of requests that are not done, their caches lost.
        delay_s: what a step takes, and what each of its tokens takes.

    Attributes:
        forwards: steps that processed tokens; those for memory rows of tokens that are held are not counted.
        steps: what all of them were asked.
    """

    fingerprints, stop_tokens = PRINTS, (STOP,)
    facts = EngineFacts("float32", "cpu", "toy", True, 0)
    tokenizer_file = None

    def __init__(
        self,
        stops: Sequence[int] = (),
        max_context: int = 1000,
        *,
        capabilities: Capabilities = Capabilities(),  # noqa: B008 (frozen)
        vocab_size: int = VOCAB,
        preempts: float = 0.0,
        delay_s: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.stops, self.max_context, self.capabilities, self.vocab_size = stops, max_context, capabilities, vocab_size
        self.forwards = self.tokens_reused = 0
        self.steps: list[list[StepRequest]] = []
        self.broken: set[int] = set()  # sequences on which a step fails
        self._preempts, self._delay_s = preempts, delay_s
        self._caches: dict[int, list[int]] = {}
        self._random = random.Random(1)
        self._stepping: set[int] = set()

    @property
    def sequences_open(self) -> int:
        return len(self._caches)

    @property
    def cache_use(self) -> tuple[int, int]:
        return sum(map(len, self._caches.values())), 1 << 20

    def choice(self, prefix: Sequence[int], seed: int = 0) -> int:
        if len(prefix) in self.stops:
            return STOP
        state = 17 + seed
        for token in prefix:
            state = (state * 31 + token + 7) % 100_003
        return 1 + state % (self.vocab_size - 1)

    def share(self, sequence: int, owner: str) -> None:
        """Each sequence is on its own."""

    def held(self, sequence: int, prefix: Sequence[int]) -> int:
        assert sequence not in self._stepping
        return self._agreed(sequence, prefix)

    def _agreed(self, sequence: int, prefix: Sequence[int]) -> int:
        own, agreed = self._caches.get(sequence, []), 0
        while agreed < min(len(own), len(prefix)) and own[agreed] == prefix[agreed]:
            agreed += 1
        return agreed

    async def step(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        names = {request.sequence for request in requests}
        assert len(names) == len(requests) and not names & self._stepping
        self._stepping |= names
        try:
            self.steps.append(list(requests))
            self.forwards += any(map(self._computes, requests))
            tokens = sum(len(request.draft) + 1 for request in requests)
            if self.capabilities.schedules_itself:
                await asyncio.sleep(self._random.random() * 0.002)
            await asyncio.sleep(self._delay_s[0] + self._delay_s[1] * tokens)
            if names & self.broken:
                raise RuntimeError("the toy is broken")
            return [self._answer(request) for request in requests]
        finally:
            self._stepping -= names

    def _computes(self, request: StepRequest) -> bool:
        return request.sampling is not None or self._agreed(request.sequence, request.prefix) < len(request.prefix)

    def release(self, sequence: int) -> None:
        assert sequence not in self._stepping
        self._caches.pop(sequence, None)

    def close(self) -> None:
        assert not self._stepping

    def _answer(self, request: StepRequest) -> Outcome:
        assert len(request.prefix) and len(request.draft) <= self.capabilities.max_draft_tokens
        assert self.capabilities.trees or list(request.parents) == list(range(len(request.draft)))
        if self._random.random() < self._preempts:
            self._caches.pop(request.sequence, None)
            return Outcome(done=False)
        prefix, cache = list(request.prefix), self._caches.get(request.sequence, [])
        if request.sampling is None:
            if cache[: len(prefix)] != prefix:
                self._caches[request.sequence] = prefix
            return Outcome(rows=_rows(request.rows_from, len(prefix)))
        paths = [prefix]
        for token, parent in zip(request.draft, request.parents, strict=True):
            paths.append([*paths[parent], token])
        seed = request.sampling.seed if request.sampling.temperature else 0
        choices = [self.choice(path, seed) for path in paths]
        path = accepted_path(request.draft, request.parents, choices)
        self._caches[request.sequence] = [*prefix, *(request.draft[index] for index in path)]
        token = choices[path[-1] + 1] if path else choices[0]
        return Outcome(tuple(path), token, _rows(request.rows_from, len(prefix) + len(path)))


def _rows(start: int | None, stop: int) -> Rows | None:
    if start is None:
        return None
    assert start <= stop
    keys = np.array([1.0 + position for position in range(start, stop)], np.float32).reshape(-1, 1, 1)
    return Rows(start, keys, -keys)


def plain(engine: ToyEngine, prefix: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """What the toy writes alone: at most ``count`` tokens, a stop token included."""
    tokens = list(prefix)
    for _ in range(count):
        tokens.append(engine.choice(tokens, seed))
        if tokens[-1] == STOP:
            break
    return tokens[len(prefix) :]
