"""Any schedule of steps on vLLM gives what the transformers engine gives, and no block is lost."""

from __future__ import annotations

import asyncio
import os

import pytest

from moa_runtime.session.events import Sampling
from moa_server.engine.base import StepRequest, new_sequence
from support.server.stepping import plain, step
from support.vllm_engine.paged import Schedule, assert_blocks

pytestmark = pytest.mark.slow

#: Random schedules; a thousand are played before a release.
SCHEDULES = int(os.environ.get("MOA_EXAMPLES", "40"))


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
        broken.setattr("moa_server.engine.vllm.sampler.choose", lambda *_: 1 // 0)
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
