"""What goes into a step, with a clock of the test's own and a machine whose steps cost what a formula says."""

from __future__ import annotations

import random

import pytest

from moa_runtime.session.events import Sampling
from moa_server.scheduling.scheduler import ATTENTIVE_S, MOST_SEQUENCES, STRETCH, Scheduler, Waiting
from moa_server.scheduling.step_cost import StepCost
from moa_server.scheduling.verify_job import Job, PricedDraft


def seconds_of(tokens: int, products: int, contexts: int) -> float:
    """A step of the imagined machine: one token takes 21.7 ms, each further one 1.5 ms."""
    return 0.020 + 0.0015 * tokens + 4e-7 * products + 2e-6 * contexts


def taught() -> StepCost:
    cost, rng = StepCost(), random.Random(2)
    for _ in range(300):
        tokens, context = rng.choice([1, 1, 2, 4, 16, 64]), rng.choice([100, 500, 2000])
        took = seconds_of(tokens, tokens * context, context) * rng.uniform(0.95, 1.2)
        cost.observe(tokens, tokens * context, context, 1, took)
    return cost


class NoDrafts:
    def newest(self) -> PricedDraft:
        return PricedDraft()


class Guesses:
    """Offers one token that looks right."""

    def newest(self) -> PricedDraft:
        return PricedDraft((2,), (0,), (0.9,))


class Held:
    """A scheduler, what its engine holds, and the time."""

    def __init__(self, **options) -> None:
        self.scheduler = Scheduler(taught(), **options)
        self.held: dict[int, int] = {}
        self.now = 100.0

    def add(self, sequence: int, prefix: int, draft: int = 0, held: int = 0, right: float = 1.0) -> Job:
        paths = [right**level for level in range(1, draft + 1)]
        job = Job(sequence, [1] * prefix, Sampling(), [2] * draft, range(draft), paths=paths)
        self.held[sequence] = held
        self.scheduler.add(Waiting(job, self.now))
        return job

    def plan(self):
        return self.scheduler.plan(self.now, lambda sequence, prefix: min(self.held[sequence], len(prefix)))

    def look(self, sequence: int, prefix: int) -> None:
        """Add a round, which takes the newest draft if that pays."""
        job = Job(sequence, [1] * prefix, Sampling(), source=Guesses() if self.scheduler.searches else None)
        job.take_newest()
        self.held[sequence] = prefix - 1
        self.scheduler.add(Waiting(job, self.now))

    def step(self, between_s: float = 0.0) -> dict[int, int]:
        """Run one step; tokens by sequence."""
        step = self.plan()
        for piece in step.pieces:
            self.held[piece.waiting.job.sequence] = len(piece.request.prefix)
            if piece.request.sampling is not None:
                piece.waiting.job.token = 3  # all of the draft was wrong, say
        self.now += seconds_of(step.tokens, step.products, step.contexts)
        self.scheduler.stepped(step, self.now, between_s)
        return {piece.waiting.job.sequence: piece.tokens for piece in step.pieces}


def test_a_long_prompt_leaves_the_step_short_for_others():
    held = Held()
    held.add(1, 500, held=499)
    held.add(2, 4000)
    for _ in range(2):  # beside a round, and while that client's next frame is on its way
        began = held.now
        sizes = held.step()
        assert sizes.get(1, 1) == 1 and sizes[2] >= 8
        assert held.now - began <= 1.15 * STRETCH * seconds_of(1, 500, 500)
    held.now += ATTENTIVE_S
    assert held.step()[2] > 100  # the client has not come back


def test_prefill_continues_however_many_rounds_there_are():
    held = Held()
    job = held.add(1000, 3000)
    for _ in range(200):
        for sequence in range(40):
            held.add(sequence, 300, draft=30, held=299)
        before = held.held[1000]
        held.step()
        if job.done:
            return
        assert held.held[1000] > before
    raise AssertionError("the prompt did not end")


def test_prompts_take_turns():
    held = Held()
    held.add(1, 4000)
    held.add(2, 4000)
    held.add(3, 40)
    assert list(held.step())[:2] == [1, 3]  # a short one passes them with the other half
    steps = [held.step() for _ in range(6)]
    assert all(sum(sequence in step for step in steps) >= 3 for sequence in (1, 2))


def test_a_step_has_a_limit_of_rounds_and_no_round_waits_twice():
    held = Held()
    for sequence in range(MOST_SEQUENCES + 10):
        held.add(sequence, 50, held=49)
    first = set(held.step())
    assert len(first) == MOST_SEQUENCES
    for sequence in first:
        held.add(sequence, 50, held=49)
    assert set(range(MOST_SEQUENCES + 10)) - first <= set(held.step())


def test_rounds_take_their_drafts_however_many_prompts_wait():
    held = Held()
    for sequence in range(2 * MOST_SEQUENCES):
        held.add(sequence, 50)
    jobs = [Job(1000 + number, [1], Sampling(), source=NoDrafts()) for number in range(MOST_SEQUENCES + 1)]
    for job in jobs:
        held.scheduler.add(Waiting(job, held.now))
    assert held.scheduler.waiting_rounds() == jobs[:MOST_SEQUENCES]


def test_rounds_get_the_tokens_that_bring_all_of_them_the_most_a_second():
    held = Held()
    held.add(9, 500, draft=62, held=499)
    assert held.step() == {9: 63} and len(held.scheduler) == 0
    for sequence, right in enumerate((0.95, 0.6, 0.6, 0.01)):
        held.add(sequence, 500, draft=62, held=499, right=right)
    held.add(4, 500, draft=1, held=499)
    sizes = held.step()
    assert sizes[4] == 2 and sizes[3] == 1 and sizes[1] == sizes[2] and 2 <= sizes[1] < sizes[0] < 63


def test_a_long_draft_leaves_the_step_short_for_others():
    """However right it is: it would bring all together more tokens a second, but the others fewer."""
    held = Held()
    for sequence in range(4):
        held.add(sequence, 500, draft=1000 if sequence == 0 else 0, held=499)
    began = held.now
    sizes = held.step()
    assert 10 < sizes[0] < 200
    assert held.now - began <= 1.15 * STRETCH * seconds_of(4, 4 * 500, 4 * 500)


def test_a_device_that_lets_the_target_wait_gets_more_of_its_draft_verified():
    sizes = []
    for away in (0.0, 0.2):
        held = Held()
        held.add(1, 500, held=499)
        held.step()
        held.now += away
        held.add(1, 501, draft=30, held=500, right=0.8)
        sizes += held.step().values()
    assert 2 < sizes[0] < sizes[1]


@pytest.mark.parametrize("draft", [0, 30])
def test_a_fixed_budget_is_kept(draft):
    held = Held(step_tokens=32)
    for sequence in range(3):
        held.add(sequence, 500, draft=draft, held=499)
    held.add(9, 4000)
    sizes = held.step()
    assert sum(sizes.values()) <= 32 + 32 // 4
    assert sizes[9] >= 32 // 4


def test_the_cost_of_steps_is_learnt():
    cost = taught()
    for tokens, context in ((1, 500), (16, 500), (64, 2000)):
        expected = seconds_of(tokens, tokens * context, context)
        assert cost.seconds(tokens, tokens * context, context, 1) == pytest.approx(expected * 1.07, rel=0.15)
    assert cost.fitting(0.05, 500) == pytest.approx(0.05 / 0.0017, rel=0.25)
    cost = StepCost()
    cost.observe(1, 100, 100, 1, 0.016)  # one observation gives a scale and keeps the proportions
    assert cost.seconds(1, 100, 100, 1) == pytest.approx(0.016, rel=0.1)
    assert cost.seconds(16, 1600, 100, 1) == pytest.approx(0.031, rel=0.3)


def test_prompts_that_do_not_fit_together_are_read_one_after_the_other():
    """In turns they would evict each other for ever."""
    held = Held(cache_tokens=5000)
    jobs = [held.add(sequence, 4000) for sequence in range(3)]
    held.add(9, 300, held=299)
    order = []
    for _ in range(3000):
        served = [sequence for sequence in held.step() if sequence < 3]
        order += [sequence for sequence in served if not order or order[-1] != sequence]
        if all(job.done for job in jobs):
            break
    assert order == [0, 1, 2]


def test_stairs_of_few_tokens_are_learnt_one_by_one():
    """An engine that computes two rows at once, for which a second stair is dearer than the line through all says."""
    cost, took = StepCost(), {1: 0.010, 2: 0.010, 3: 0.016, 4: 0.016, 8: 0.020, 16: 0.028}
    for _ in range(100):
        for tokens, seconds in took.items():
            cost.observe(tokens, 100 * tokens, 100, 1, seconds)
    for tokens, seconds in took.items():
        assert cost.seconds(tokens, 100 * tokens, 100, 1) == pytest.approx(seconds, rel=0.05)


def test_steps_of_a_crowd_alone_change_no_proportions() -> None:
    def seconds(tokens: int, sequences: int) -> float:
        return 0.008 + 0.0014 * tokens + 0.0003 * sequences

    cost, rng = StepCost(), random.Random(3)
    for tokens in (2, 16, 32, 2, 2, 16):
        cost.observe(tokens, 64 * tokens, 64, 1, seconds(tokens, 1))
    cost.settle()
    for _ in range(400):
        cost.observe(8, 8 * 100, 8 * 100, 8, 1.1 * seconds(8, 8) * rng.uniform(0.97, 1.03))
    for tokens in (10, 12, 16):
        grows = cost.seconds(tokens, tokens * 100, 800, 8) / cost.seconds(8, 800, 800, 8)
        assert grows == pytest.approx(seconds(tokens, 8) / seconds(8, 8), rel=0.06)


def useless_looks(held: Held, steps: int, *, asked: int | None = None) -> list[bool]:
    """Say for each step whether four sessions looked for drafts, which are never right; ``asked``: the sequence of a
    device that is asked for its drafts."""
    searched = []
    for _ in range(steps):
        for sequence in range(4):
            held.look(sequence, 100)
        searched.append(held.scheduler.waiting_rounds() != [])
        if asked is not None:
            held.add(asked, 100, draft=2, held=99)
        held.step(0.004 if searched[-1] else 0.001)
    return searched


def test_a_crowd_stops_to_look_for_drafts_that_are_never_right():
    held = Held()
    searched = useless_looks(held, 320)
    assert all(searched[:30]) and sum(searched[-64:]) == 8
    for _ in range(64):  # rounds of devices, with drafts of their own, tell nothing of it
        for sequence in range(4):
            held.add(sequence, 100, draft=2, held=99)
        held.step(1.0)
    held.scheduler.search.steps = 32  # no trial
    assert not held.scheduler.search.pays(4)


def test_a_crowd_beside_a_device_that_is_asked_for_its_drafts_still_learns_whether_to_look_for_some():
    assert sum(useless_looks(Held(), 640, asked=4)[-64:]) == 8
