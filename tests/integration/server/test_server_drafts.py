"""The verifier drafts for itself: the text is the target's, whatever becomes of a conversation's drafter."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

import pytest
import torch

from moa_runtime.session.events import Sampling
from moa_runtime.session.handshake import Limits
from moa_runtime.session.tree import chain
from moa_server.drafting.batched_model import PackedDeviceModule
from moa_server.drafting.batcher import BatchedBackend
from moa_server.drafting.server_drafting import NOTHING, Proposal, ServerDrafting
from moa_server.engine.base import Rows, StepRequest, new_sequence
from moa_server.metrics import Metrics
from moa_server.scheduling.verify_job import Job
from moa_server.scheduling.worker import Worker
from support.server.stepping import plain, step

PROMPT = [(37 * index + 11) % 509 + 3 for index in range(40)]
GREEDY = Sampling()
LIMITS = Limits(max_context=512)
# Hot ones: of a target and a drafter that are both random, the luck is what they have in common.
SAMPLINGS = [GREEDY, Sampling(2.0, 0.98, 5), Sampling(3.0, 1.0, 6)]
STEP_S = 0.01  # as if each took so long: what is drafted shall not depend on the machine


class Clock:
    """Shows what it is set to."""

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
        own = BatchedBackend(run or half.steps, top_k=half.top_k, kv_shape=half.kv_shape) if backend else None
        made.append(ServerDrafting(own, limits, engine.stop_tokens, **settings))
        return made[-1]

    yield new
    for drafts in made:
        drafts.close()


def rows_of(engine, text: Sequence[int], start: int = 0) -> Rows:
    number = new_sequence()
    rows = step(engine, StepRequest(number, text, rows_from=start)).rows
    engine.release(number)
    assert rows is not None
    return rows


def prompts(count: int) -> list[list[int]]:
    return [[(31 * index + 7 * number) % 509 + 3 for index in range(20 + 9 * number)] for number in range(count)]


async def decode(worker: Worker, drafts: ServerDrafting, prompt: Sequence[int], sampling: Sampling, count: int):
    """An answer of ``count`` tokens, and how many of them were drafted."""
    sequence, text, end, accepted = new_sequence(), list(prompt), len(prompt) + count, 0
    supplied = len(prompt)
    while len(text) < end:
        start = drafts.rows_from(sequence, text)
        proposal = await drafts.propose(sequence, text, sampling, room=end - len(text))
        assert proposal.tree.depth < end - len(text)
        job = Job(sequence, text, sampling, proposal.tree.tokens, proposal.tree.parents, start)
        await worker.run(job, 60)
        drafts.observe(sequence, proposal, len(job.path), waited_s=STEP_S, compute_s=STEP_S, supplied=supplied)
        text += [proposal.tree.tokens[index] for index in job.path]
        if start is not None:
            drafts.add_rows(sequence, text, job.rows)
        text.append(job.token)
        accepted, supplied = accepted + len(job.path), 0
    worker.release(sequence)
    drafts.release(sequence)
    return text[len(prompt) :], accepted


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_text_is_the_target_s_and_some_of_it_was_drafted(engine, new_drafts, sampling):
    drafts = new_drafts(clock=Clock())

    async def scenario():
        worker = Worker(engine, Metrics())
        answers = await asyncio.gather(*(decode(worker, drafts, prompt, sampling, 40) for prompt in prompts(4)))
        await worker.close()
        return answers

    answers = asyncio.run(scenario())
    assert [text for text, _ in answers] == [plain(engine, prompt, sampling, 40) for prompt in prompts(4)]
    assert sum(accepted for _, accepted in answers) > 0
    assert not len(drafts)


def test_without_a_drafter_what_was_said_before_is_copied(engine, new_drafts):
    drafts = new_drafts(backend=False)
    assert drafts.rows_from(1, PROMPT) is None
    prompt = [5, 6, 7, 8, 9, 10, 5, 6, 7]

    async def scenario():
        worker = Worker(engine, Metrics())
        proposal = await drafts.propose(1, prompt, GREEDY)
        answer = await decode(worker, drafts, prompt, GREEDY, 30)
        await worker.close()
        return proposal, answer

    proposal, (text, _) = asyncio.run(scenario())
    assert proposal.tree.tokens[:3] == (8, 9, 10) and not proposal.tree.steps
    assert text == plain(engine, prompt, GREEDY, 30)


def test_drafts_at_the_same_time_are_what_each_is_alone(engine, half, new_drafts):
    sizes = []

    def run(inputs):
        sizes.append(len(inputs))
        return half.steps(inputs)

    texts = prompts(5)
    rows = [rows_of(engine, text[:-1]) for text in texts]

    async def drafted(drafts: ServerDrafting, number: int):
        assert drafts.rows_from(number, texts[number]) == 0
        drafts.add_rows(number, texts[number], rows[number])
        assert drafts.rows_from(number, texts[number]) == len(texts[number]) - 1
        return (await drafts.propose(number, texts[number], SAMPLINGS[number % 3], room=5)).tree

    async def all_of(drafts: ServerDrafting):
        return await asyncio.gather(*(drafted(drafts, number) for number in range(len(texts))))

    alone = [asyncio.run(drafted(new_drafts(), number)) for number in range(len(texts))]
    together = asyncio.run(all_of(new_drafts(run=run)))
    for one, other in zip(alone, together, strict=True):
        assert (one.tokens, one.parents, one.steps) == (other.tokens, other.parents, other.steps)
        assert one.scores == pytest.approx(other.scores, abs=1e-3)
        assert len(one.steps) == 4
    assert sum(sizes) == sum(len(tree.steps) for tree in together)


def test_without_rows_the_model_takes_no_step(new_drafts):
    proposal = asyncio.run(new_drafts().propose(1, PROMPT, GREEDY))
    assert proposal.tree.steps == ()


def test_drafts_keep_to_the_limits(engine, new_drafts):
    rows = rows_of(engine, PROMPT[:-1])

    def drafted(drafts: ServerDrafting, prefix: list[int] = PROMPT, room: int | None = None):
        drafts.rows_from(1, prefix)
        drafts.add_rows(1, prefix, rows)
        return asyncio.run(drafts.propose(1, prefix, GREEDY, room=room)).tree

    assert drafted(new_drafts()).depth > 3
    chained = drafted(new_drafts(Limits(512, 3, trees=False)))
    assert list(chained.parents) == chain(3)
    assert drafted(new_drafts(), room=3).depth == 2
    assert drafted(new_drafts(), room=1) == drafted(new_drafts(Limits(len(PROMPT) + 1))) == NOTHING.tree
    assert drafted(new_drafts(Limits(len(PROMPT) + 3))).depth == 2


def test_rows_of_what_was_cut_or_changed_are_asked_for_again(engine, new_drafts):
    drafts = new_drafts()
    rows = rows_of(engine, PROMPT)
    assert drafts.rows_from(1, PROMPT) == 0
    drafts.add_rows(1, PROMPT, rows)
    assert drafts.rows_from(1, [*PROMPT, 4]) == len(PROMPT)
    changed = [*PROMPT[:25], 400, 401, 402]
    assert drafts.rows_from(1, changed) == 25
    assert drafts.rows_from(1, PROMPT) == 25

    def drafted(drafts: ServerDrafting, start: int):
        drafts.add_rows(1, changed, rows_of(engine, changed[:-1], start))
        return asyncio.run(drafts.propose(1, changed, GREEDY, room=4)).tree

    fresh = new_drafts()
    fresh.rows_from(1, changed)
    assert drafted(drafts, 20) == drafted(fresh, 0)  # some that it has are passed over


def test_rows_behind_a_gap_are_asked_for_again(engine, new_drafts):
    drafts = new_drafts()
    drafts.add_rows(1, PROMPT, rows_of(engine, PROMPT))  # nobody asked for a draft yet
    assert len(drafts) == 0 and drafts.rows_from(1, PROMPT) == 0
    drafts.add_rows(1, PROMPT, rows_of(engine, PROMPT, 10))
    assert drafts.rows_from(1, PROMPT) == 0
    drafts.add_rows(1, PROMPT, None)
    drafts.add_rows(1, PROMPT, rows_of(engine, PROMPT[:10]))
    assert drafts.rows_from(1, PROMPT) == 10


def test_who_rests_makes_room_and_comes_back(engine, new_drafts):
    clock = Clock()
    drafts = new_drafts(most=2, clock=clock)
    rows = rows_of(engine, PROMPT)
    for number in (1, 2):
        drafts.rows_from(number, PROMPT)
        drafts.add_rows(number, PROMPT, rows)
    assert drafts.rows_from(3, PROMPT) is None  # both draft now
    assert asyncio.run(drafts.propose(3, PROMPT, GREEDY)) == NOTHING
    clock.now = 60.0
    assert drafts.rows_from(1, PROMPT) == len(PROMPT)  # it goes on, so 2 is the one that rests
    assert drafts.rows_from(3, PROMPT) == 0 and len(drafts) == 2
    drafts.observe(2, NOTHING, 0, waited_s=0.1)
    clock.now = 120.0
    assert drafts.rows_from(2, PROMPT) == 0 and len(drafts) == 2
    drafts.release(2)
    drafts.release(2)
    assert len(drafts) == 1


def test_a_drafter_that_fails_is_logged_once_and_the_text_goes_on(engine, new_drafts, caplog):
    def run(inputs):
        raise RuntimeError("the drafter is broken")

    drafts = new_drafts(run=run)

    async def scenario():
        worker = Worker(engine, Metrics())
        answer = await decode(worker, drafts, PROMPT, GREEDY, 20)
        await worker.close()
        return answer

    with caplog.at_level(logging.ERROR, "moa_server"):
        text, _ = asyncio.run(scenario())
    assert text == plain(engine, PROMPT, GREEDY, 20)
    assert len(caplog.records) == 1 and "the drafter is broken" in caplog.text


def test_rows_of_another_shape_fail_the_drafter_alone(new_drafts, engine, caplog):
    drafts = new_drafts()
    rows = rows_of(engine, PROMPT)
    drafts.rows_from(1, PROMPT)
    drafts.add_rows(1, PROMPT, Rows(0, rows.keys[:, :1], rows.values[:, :1]))
    assert asyncio.run(drafts.propose(1, PROMPT, GREEDY)).tree.tokens == ()
    assert drafts.rows_from(1, PROMPT) is None and "rows have shapes" in caplog.text


def test_who_leaves_harms_nobody(engine, half, new_drafts):
    may_go, reached = threading.Event(), threading.Event()

    def run(inputs):
        reached.set()
        assert may_go.wait(60)
        return half.steps(inputs)

    drafts, fresh = new_drafts(run=run), new_drafts()
    rows = rows_of(engine, PROMPT[:-1])
    for each in (drafts, fresh):
        each.rows_from(1, PROMPT)
        each.add_rows(1, PROMPT, rows)

    async def scenario():
        leaving = asyncio.create_task(drafts.propose(1, PROMPT, GREEDY, room=4))
        await asyncio.to_thread(reached.wait, 60)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        # The same conversation waits for the drafter, which is still busy.
        again = asyncio.create_task(drafts.propose(1, PROMPT, GREEDY, room=4))
        await asyncio.sleep(0)
        assert not again.done()
        may_go.set()
        return (await again).tree, (await fresh.propose(1, PROMPT, GREEDY, room=4)).tree

    again, expected = asyncio.run(scenario())
    assert again == expected and again.steps


def test_what_drafts_take_is_learnt_by_conversation_and_handed_on(engine, new_drafts):
    drafts = new_drafts()
    rows = rows_of(engine, PROMPT[:-1])

    def size(number: int) -> int:
        drafts.rows_from(number, PROMPT)
        drafts.add_rows(number, PROMPT, rows)
        tree = asyncio.run(drafts.propose(number, PROMPT, GREEDY)).tree
        # As if each token of a draft took the target a second, and none were right.
        for _ in range(20):
            drafts.observe(number, Proposal(tree, 0.001), 0, waited_s=0.01 + len(tree.tokens))
        return len(tree.tokens)

    first, handed_on = size(1), size(2)
    assert first > 8 and handed_on < first


def test_rows_are_asked_for_when_a_step_pays_or_is_tried(engine, new_drafts):
    drafts = new_drafts(clock=Clock())
    text = list(PROMPT)

    def propose(wanted: int | None):
        """A round; the rows that it asked for, as many as ``wanted``, come behind it."""
        start = drafts.rows_from(1, text)
        proposal = asyncio.run(drafts.propose(1, text, GREEDY))
        assert wanted == (None if start is None else len(text) - start)
        drafts.add_rows(1, text, None if start is None else rows_of(engine, text, start))
        text.append(4)
        return proposal

    assert not propose(len(PROMPT)).tree.steps  # there are none yet
    proposal = propose(1)
    assert proposal.tree.steps
    # As if each token of a draft took the target, which nine share, a second, and none were right.
    for _ in range(20):
        drafts.observe(1, Proposal(proposal.tree, 0.5), 0, waited_s=0.01 + len(proposal.tree.tokens), sharing=9)
    assert not propose(None).tree.steps and not propose(None).tree.steps
    drafts.observe(1, NOTHING, 0, waited_s=1000, sharing=9)
    assert not propose(3).tree.steps  # a try needs all of them
    assert propose(1).tree.steps
