"""Server-side drafting: the text is the target's, whatever happens to a conversation's drafter."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

import pytest
import torch

from moa_runtime.session.handshake import Limits
from moa_runtime.session.tree import chain
from moa_server.drafting.batched_backend import BatchedBackend
from moa_server.drafting.batched_model import PackedDeviceModule
from moa_server.drafting.own_draft import NOTHING, OwnDraft
from moa_server.drafting.server_drafting import Round, ServerDrafting
from moa_server.engine.base import Rows, StepRequest, new_sequence
from support.server.drafted_answers import GREEDY, SAMPLINGS, answers, cheap, depth, drafted, prompts
from support.server.stepping import plain, step

PROMPT = [(37 * index + 11) % 509 + 3 for index in range(40)]
LIMITS = Limits(max_context=512)


def dear(rows):
    """Seconds of a step in which a drafted token costs as much as all else."""
    return 10.0 + 10.0 * rows


class Running(BatchedBackend):
    """The drafter's device half, run by a test."""

    def __init__(self, half: BatchedBackend, run) -> None:
        self.top_k, self.kv_shape, self._run = half.top_k, half.kv_shape, run

    def steps(self, inputs):
        return self._run(inputs)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def half(drafter, target) -> PackedDeviceModule:
    return PackedDeviceModule(drafter, target, torch.float32, top_k=16)


@pytest.fixture
def new_drafts(half, engine):
    """Makes ServerDrafts, each with a backend of its own; all are closed in the end."""
    made: list[ServerDrafting] = []

    def new(limits: Limits = LIMITS, *, backend: bool = True, run=None, **settings) -> ServerDrafting:
        own = (half if run is None else Running(half, run)) if backend else None
        made.append(ServerDrafting(own, limits, engine.stop_tokens, **settings))
        return made[-1]

    yield new
    for drafts in made:
        drafts.close()


def rows_of(engine, text: Sequence[int], start: int = 0) -> Rows:
    number = new_sequence()
    rows = step(engine, StepRequest(number, text, rows_from=start)).rows
    engine.release(number)
    return rows


def give_rows(engine, drafts: ServerDrafting, number: int, text: Sequence[int] = PROMPT) -> None:
    """Give a conversation the rows of all tokens but the last."""
    start = drafts.rows_from(number, text)
    drafts.add_rows(number, text, rows_of(engine, text[:-1], start))


def draft(drafts: ServerDrafting, text: Sequence[int] = PROMPT, number: int = 1, **about) -> OwnDraft:
    return asyncio.run(drafted(drafts, number, text, **about))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_text_is_the_targets_and_some_of_it_was_drafted(engine, new_drafts, sampling):
    drafts = new_drafts(clock=Clock())
    found = answers(engine, drafts, prompts(4), sampling, 40)
    assert [text for text, _ in found] == [plain(engine, prompt, sampling, 40) for prompt in prompts(4)]
    assert sum(accepted for _, accepted in found) > 0 and not len(drafts)


def test_without_a_drafter_earlier_text_is_copied_and_without_rows_the_model_takes_no_step(engine, new_drafts):
    assert not draft(new_drafts()).modelled
    drafts = new_drafts(backend=False)
    assert drafts.rows_from(1, PROMPT) is None
    prompt = [5, 6, 7, 8, 9, 10, 5, 6, 7]
    copied = draft(drafts, prompt)
    assert copied.tokens[:3] == (8, 9, 10) and not copied.modelled
    assert answers(engine, drafts, [prompt], GREEDY, 30)[0][0] == plain(engine, prompt, GREEDY, 30)


def test_drafts_keep_to_the_limits(engine, new_drafts):
    def limited(drafts: ServerDrafting, **room):
        give_rows(engine, drafts, 1)
        return draft(drafts, **room)

    assert depth(limited(new_drafts())) > 3
    assert list(limited(new_drafts(Limits(512, 3, trees=False))).parents) == chain(3)
    assert depth(limited(new_drafts(), room=3)) == depth(limited(new_drafts(Limits(len(PROMPT) + 3)))) == 2
    assert limited(new_drafts(), room=1) == limited(new_drafts(Limits(len(PROMPT) + 1))) == NOTHING


def test_rows_that_were_cut_changed_or_lie_after_a_gap_are_requested_again(engine, new_drafts):
    drafts = new_drafts()
    drafts.add_rows(1, PROMPT, rows_of(engine, PROMPT))  # before any draft was requested
    assert len(drafts) == 0 and drafts.rows_from(1, PROMPT) == 0
    drafts.add_rows(1, PROMPT, rows_of(engine, PROMPT, 10))
    assert drafts.rows_from(1, PROMPT) == 0
    drafts.add_rows(1, PROMPT, None)
    drafts.add_rows(1, PROMPT, rows_of(engine, PROMPT[:10]))
    assert drafts.rows_from(1, PROMPT) == 10
    drafts.add_rows(1, PROMPT, rows_of(engine, PROMPT))
    assert drafts.rows_from(1, [*PROMPT, 4]) == len(PROMPT)
    changed = [*PROMPT[:25], 400, 401, 402]
    assert drafts.rows_from(1, changed) == 25 and drafts.rows_from(1, PROMPT) == 25
    drafts.add_rows(1, changed, rows_of(engine, changed[:-1], 20))  # known ones are skipped
    fresh = new_drafts()
    give_rows(engine, fresh, 1, changed)
    assert draft(drafts, changed, room=4) == draft(fresh, changed, room=4)


def test_an_idle_conversation_is_evicted_and_comes_back(engine, new_drafts):
    clock = Clock()
    drafts = new_drafts(most=2, clock=clock)
    rows = rows_of(engine, PROMPT)
    for number in (1, 2):
        drafts.rows_from(number, PROMPT)
        drafts.add_rows(number, PROMPT, rows)
    assert drafts.rows_from(3, PROMPT) is None and draft(drafts, number=3) == NOTHING  # both draft now
    clock.now = 60.0
    assert drafts.rows_from(1, PROMPT) == len(PROMPT)  # so 2 is the idle one
    assert drafts.rows_from(3, PROMPT) == 0 and len(drafts) == 2
    drafts.learn(2, NOTHING, (), ())
    clock.now = 120.0
    assert drafts.rows_from(2, PROMPT) == 0 and len(drafts) == 2
    drafts.release(2)
    drafts.release(2)
    assert len(drafts) == 1


def test_a_drafter_that_fails_is_logged_once_and_the_text_continues(engine, new_drafts, caplog):
    def run(inputs):
        raise RuntimeError("the drafter is broken")

    with caplog.at_level(logging.ERROR, "moa_server"):
        [(text, _)] = answers(engine, new_drafts(run=run), [PROMPT], GREEDY, 20)
    assert text == plain(engine, PROMPT, GREEDY, 20)
    assert len(caplog.records) == 1 and "the drafter is broken" in caplog.text


def test_rows_of_another_shape_fail_the_drafter_alone(new_drafts, engine):
    drafts, rows = new_drafts(), rows_of(engine, PROMPT)
    drafts.rows_from(1, PROMPT)
    drafts.add_rows(1, PROMPT, Rows(0, rows.keys[:, :1], rows.values[:, :1]))
    assert draft(drafts).tokens == () and drafts.rows_from(1, PROMPT) is None


def test_a_cancelled_draft_harms_no_later_one(engine, half, new_drafts):
    may_go, reached = threading.Event(), threading.Event()

    def run(inputs):
        reached.set()
        assert may_go.wait(60)
        return half.steps(inputs)

    drafts, fresh = new_drafts(run=run), new_drafts()
    for each in (drafts, fresh):
        give_rows(engine, each, 1)

    async def scenario():
        leaving = asyncio.create_task(drafted(drafts, 1, PROMPT, room=4))
        await asyncio.to_thread(reached.wait, 60)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        again = asyncio.create_task(drafted(drafts, 1, PROMPT, room=4))
        may_go.set()
        return await again, await drafted(fresh, 1, PROMPT, room=4)

    again, expected = asyncio.run(scenario())
    assert again == expected and again.modelled


def test_the_rest_of_a_draft_that_was_right_so_far_is_offered(engine, new_drafts):
    drafts = new_drafts()
    give_rows(engine, drafts, 1)
    made = draft(drafts)
    assert made.modelled and made.parents[0] == 0
    later = [*PROMPT, made.tokens[0]]
    assert drafts.offered(1, later, GREEDY) == made.after(made.tokens[:1])
    assert not drafts.offered(1, [*later, 1], GREEDY).modelled
    assert not drafts.offered(1, later, GREEDY).modelled  # it is forgotten then


def test_rows_are_requested_when_drafts_pay_or_are_tried(engine, new_drafts):
    clock, text = Clock(), list(PROMPT)
    drafts = new_drafts(clock=clock)

    def modelled(wanted: int | None, seconds=dear) -> bool:
        """A round; the rows that it requested, as many as ``wanted``, come after it."""
        start = drafts.rows_from(1, text)
        own = draft(drafts, text, seconds=seconds, row_s=0.1)
        assert wanted == (None if start is None else len(text) - start)
        drafts.add_rows(1, text, None if start is None else rows_of(engine, text, start))
        text.append(100 + len(text))
        return own.modelled

    assert not modelled(len(PROMPT), cheap)  # there are none yet
    assert modelled(1, cheap)
    assert not any(modelled(1) for _ in range(8)) and not any(modelled(None) for _ in range(2))
    clock.now += 500.0  # 1 % of the time is for trials: a draft, and the rows that it needs
    assert not any(modelled(None) for _ in range(7)) and not modelled(10) and modelled(1)
    assert not any(modelled(None) for _ in range(20))
    assert not any(modelled(None, cheap) for _ in range(2)) and not modelled(23, cheap) and modelled(1, cheap)


def test_a_draft_that_also_reads_a_prompt_says_nothing_of_the_cost_of_later_ones(engine, half, new_drafts):
    clock = Clock()

    def run(inputs):
        clock.now += 9.0 if len(inputs[0].tokens) > 16 else 0.1
        return half.steps(inputs)

    drafts = new_drafts(run=run, clock=clock)
    first = float(drafts.cost.seconds(1, 1))
    give_rows(engine, drafts, 1)
    assert draft(drafts).modelled and drafts.cost.seconds(1, 1) == first
    give_rows(engine, drafts, 1, [*PROMPT, 4])
    assert draft(drafts, [*PROMPT, 4]).modelled and first < drafts.cost.seconds(1, 1) < 0.2


@pytest.mark.parametrize(("row_s", "pays"), [(1e-4, True), (10.0, False)])
def test_rows_of_a_long_prompt_are_requested_once_they_pay(new_drafts, row_s, pays):
    drafts, prompt = new_drafts(), prompts(16)[-1]  # 155 tokens
    assert drafts.rows_from(1, prompt) is None
    assert not draft(drafts, prompt, row_s=row_s).modelled
    assert drafts.rows_from(1, prompt) == (0 if pays else None)


def test_claims_that_do_not_come_true_count_less_and_are_handed_on(engine, new_drafts):
    drafts = new_drafts(clock=Clock())
    give_rows(engine, drafts, 1)
    own = draft(drafts, row_s=2.0)
    assert own.modelled
    for _ in range(60):
        drafts.learn(1, own, range(len(own.tokens)), ())
    give_rows(engine, drafts, 2)
    assert not draft(drafts, number=2, row_s=2.0).modelled


def test_conversations_draft_together(engine, half, new_drafts):
    batches = []

    def run(inputs):
        batches.append(len(inputs))
        return half.steps(inputs)

    drafts = new_drafts(run=run)
    for number in (1, 2, 3):
        give_rows(engine, drafts, number)
    rounds = [Round(number, PROMPT, GREEDY, 4) for number in (1, 2, 3)]
    for number in (1, 2, 3):
        drafts.offered(number, PROMPT, GREEDY, 4)
    assert asyncio.run(drafts.prepare(rounds, cheap))
    assert set(batches) == {3}
    one, *others = [drafts.offered(number, PROMPT, GREEDY, 4) for number in (1, 2, 3)]
    assert one.modelled and [each.tokens for each in others] == [one.tokens] * 2
