"""Any schedule of steps on vLLM gives what the transformers engine gives, and no block is lost."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence

import numpy as np
import pytest

from compare_texts import ROUNDING, nearness
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import chain
from moa_server.engine.base import Outcome, StepRequest, new_sequence
from moa_server.engine.baseline import next_logits
from support.server.stepping import plain, step

pytestmark = pytest.mark.slow

#: Random schedules; a thousand are played before a release.
SCHEDULES = int(os.environ.get("MOA_EXAMPLES", "40"))


SAMPLINGS = (Sampling(), Sampling(0.9, 0.95, 3), Sampling(1.0, 1.0, 4, top_k=20))
_MOVES = ("go on", "go on", "go on", "grow", "cut", "change", "again", "release")
#: Of rows after the drafter's server half, whose sums are as large as the target's.
_ROW_TOLERANCE = 2e-4


class Schedule:
    """Several conversations at random. Greedy or sampled, drafted or not, in one request or in pieces; they grow, are
    cut, changed and cancelled; there is no room for all of them, and at times vLLM preempts some.

    Attributes:
        near: choices that differ and lie within rounding.
        preempted: requests that were to be asked again.
    """

    def __init__(self, vllm, reference, seed: int, conversations: int = 5) -> None:
        self.near = self.preempted = 0
        self._vllm, self._reference, self._rng = vllm, reference, random.Random(seed)
        self._sampling = self._rng.choice(SAMPLINGS)
        self._texts = {new_sequence(): self._tokens(1, 60) for _ in range(conversations)}

    def play(self, steps: int, moves: Sequence[str] = _MOVES, *, preempting: bool = True) -> None:
        """Raises AssertionError: an outcome is another one, or blocks went astray."""
        for _ in range(steps):
            numbers = self._rng.sample(list(self._texts), self._rng.randint(1, len(self._texts)))
            requests = [self._request(number, self._rng.choice(moves)) for number in numbers]
            self._step(requests, preempting=preempting and self._rng.random() < 0.2)
            assert_blocks(self._vllm)
        for number in self._texts:
            self._vllm.release(number)
            self._reference.release(number)
        assert_blocks(self._vllm)
        assert self._vllm.cache_use[0] == 0

    def _tokens(self, least: int, most: int) -> list[int]:
        return [self._rng.randrange(3, 512) for _ in range(self._rng.randint(least, most))]

    def _request(self, number: int, move: str) -> StepRequest:
        rng, text = self._rng, self._texts[number]
        if move == "grow":
            text = [*text, *self._tokens(1, 50)]
        elif move == "cut":
            text = text[: rng.randint(1, len(text))]
        elif move == "change":
            text = [*text[: rng.randint(0, len(text) - 1)], *self._tokens(1, 5)]
        elif move == "release":
            self._vllm.release(number)
        room = self._reference.max_context - 40
        self._texts[number] = text = text if len(text) <= room else text[: rng.randint(1, room)]
        rows_from = rng.choice((None, 0, rng.randrange(len(text))))
        if rng.random() < 0.2:
            piece = text[: rng.randint((rows_from or 0) + 1, len(text))]
            return StepRequest(number, piece, rows_from=rows_from, expected=len(text))
        draft = self._draft(text)
        return StepRequest(number, text, draft, chain(len(draft)), self._sampling, rows_from)

    def _draft(self, text: list[int]) -> list[int]:
        right = plain(self._reference, text, self._sampling, self._rng.choice((0, 0, 1, 3, 8)))
        return [token if self._rng.random() < 0.8 else 3 for token in right] + self._tokens(0, 3)

    def _step(self, requests: list[StepRequest], *, preempting: bool) -> None:
        expected = asyncio.run(self._reference.step(requests))
        make_room = self._vllm._make_room
        if preempting:  # vLLM finds no room, and takes it from those who are in the step
            self._vllm._make_room = lambda missing, staying: None
        try:
            found = asyncio.run(self._vllm.step(requests))
        finally:
            self._vllm._make_room = make_room
        for request, own, other in zip(requests, expected, found, strict=True):
            if not other.done:
                assert preempting, "no request was preempted"
                assert other == Outcome(done=False) and self._vllm.held(request.sequence, request.prefix) == 0
                self.preempted += 1
                continue
            self._compare(request, own, other)
            if own.token is not None:
                committed = [*request.prefix, *(request.draft[index] for index in own.path)]
                if (own.path, own.token) == (other.path, other.token):
                    # None of it where the step did not fit together, and it gave way to the next forward.
                    assert self._vllm.held(request.sequence, committed) in (0, len(committed))
                self._texts[request.sequence] = [*committed, own.token]

    def _compare(self, request: StepRequest, own: Outcome, other: Outcome) -> None:
        if (own.path, own.token) == (other.path, other.token):
            assert (own.rows is None) == (other.rows is None)
            if own.rows is not None:
                assert (own.rows.start, own.rows.stop) == (other.rows.start, other.rows.stop)
                for ours, theirs in ((own.rows.keys, other.rows.keys), (own.rows.values, other.rows.values)):
                    np.testing.assert_allclose(theirs, ours, atol=_ROW_TOLERANCE, rtol=1e-3)
            return
        ours, theirs = ([*(request.draft[at] for at in each.path), each.token] for each in (own, other))
        at = next(index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
        text = [*request.prefix, *ours[:at]]
        near = nearness(next_logits(self._reference, text), request.sampling, len(text), theirs[at], self._rng)
        assert near is not None and near <= ROUNDING, f"{theirs[at]} in place of {ours[at]} after {len(text)} tokens"
        self.near += 1


def assert_blocks(vllm) -> None:
    """What vLLM holds is what the sequences say that they hold, and every other block is free."""
    scheduler, held = vllm._core._scheduler, vllm._held.values()
    assert set(scheduler.requests) == {each.name for each in held}
    for each in held:
        assert scheduler.requests[each.name].num_computed_tokens == len(each.tokens)
    blocks = {block for each in held for block in vllm._core.table(each.name)}
    assert len(blocks) == vllm._core.blocks - vllm._core.free_blocks


def test_two_hundred_rewinds_in_a_tiny_pool(vllm, reference):
    for seed in range(10):
        Schedule(vllm, reference, seed, conversations=3).play(20, ("cut", "change", "again", "go on"), preempting=False)


def test_schedules_of_all_kinds(vllm, reference):
    near = preempted = 0
    for seed in range(SCHEDULES):
        schedule = Schedule(vllm, reference, 1000 + seed)
        schedule.play(20)
        near, preempted = near + schedule.near, preempted + schedule.preempted
    print(f"{SCHEDULES} schedules: {preempted} requests preempted, {near} choices within rounding differ")
    assert preempted > 0


def test_a_draft_of_128_tokens_is_one_forward_and_one_of_more_is_refused(vllm, reference):
    text, sampling = [7, 8, 9], Sampling(0.9, 1.0, 2)
    right = plain(reference, text, sampling, 120)
    number = new_sequence()
    first = step(vllm, StepRequest(number, text, sampling=sampling))
    assert first.token == right[0]
    before = vllm.forwards
    outcome = step(vllm, StepRequest(number, [*text, right[0]], right[1:119], (), sampling))
    assert (outcome.path, outcome.token, vllm.forwards - before) == (tuple(range(118)), right[119], 1)
    for prefix, draft, parents in (([5] * 72, [5] * 128, ()), ([5], [5] * 129, ()), ([5], [5, 6], (0, 0))):
        with pytest.raises(ValueError):
            step(vllm, StepRequest(number, prefix, draft, parents, sampling))
    vllm.release(number)


def test_several_sequences_share_a_forward(vllm, reference):
    prefixes = [[seed, 40, seed + 1] for seed in range(3, 11)]
    requests = [StepRequest(new_sequence(), prefix, sampling=Sampling()) for prefix in prefixes]
    before = vllm.forwards
    outcomes = asyncio.run(vllm.step(requests))
    assert vllm.forwards == before + 1
    assert [each.token for each in outcomes] == [plain(reference, prefix, Sampling(), 1)[0] for prefix in prefixes]
    for request in requests:
        vllm.release(request.sequence)


def test_a_step_that_fails_leaves_usable_sequences(vllm, reference, monkeypatch):
    number, text = new_sequence(), [3, 4, 5]
    expected = plain(reference, text, Sampling(), 2)
    step(vllm, StepRequest(number, text, sampling=Sampling()))
    with monkeypatch.context() as broken:
        broken.setattr("moa_server.engine.vllm.sampler.Chooser.choose", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            step(vllm, StepRequest(number, [*text, expected[0]], sampling=Sampling()))
    assert vllm.held(number, text) == 0
    assert_blocks(vllm)
    assert step(vllm, StepRequest(number, [*text, expected[0]], sampling=Sampling())).token == expected[1]
    vllm.release(number)


def test_a_context_can_be_filled_to_its_end(vllm, reference):
    number, text = new_sequence(), [9] * (vllm.max_context - 1)
    token = step(vllm, StepRequest(number, text, sampling=Sampling())).token
    assert token == plain(reference, text, Sampling(), 1)[0]
    whole = [*text, token]
    assert step(vllm, StepRequest(number, whole, sampling=Sampling())).token is not None
    assert vllm.held(number, whole) == len(whole) == vllm.max_context
    vllm.release(number)
