"""Answers that the verifier drafts for itself, for several conversations at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import depths
from moa_server.drafting.own_draft import OwnDraft
from moa_server.drafting.server_drafting import Round, ServerDrafting
from moa_server.engine.base import new_sequence
from moa_server.metrics import Metrics
from moa_server.scheduling.verify_job import Job
from moa_server.scheduling.worker import Worker

GREEDY = Sampling()
# Hot ones: of a target and a drafter that are both random, the luck is what they have in common.
SAMPLINGS = [GREEDY, Sampling(2.0, 0.98, 5), Sampling(3.0, 1.0, 6)]


def cheap(rows):
    """Seconds of a step whose drafted tokens cost little: what is drafted shall not depend on the machine."""
    return 10.0 + 0.01 * rows


async def drafted(
    drafts: ServerDrafting, number: int, text: Sequence[int], sampling=GREEDY, room=None, seconds=cheap, row_s=0.0
):
    known = drafts.offered(number, text, sampling, room)
    if await drafts.prepare([Round(number, text, sampling, room, known.paths)], seconds, row_s):
        return drafts.offered(number, text, sampling, room)
    return known


def depth(draft: OwnDraft) -> int:
    return max(depths(draft.parents), default=0)


def answers(engine, drafts: ServerDrafting, prompts: Sequence[Sequence[int]], sampling: Sampling, count: int):
    """Answers to all prompts at once, and how many of their tokens were drafted."""

    async def scenario():
        worker = Worker(engine, Metrics())
        found = await asyncio.gather(*(decode(worker, drafts, prompt, sampling, count) for prompt in prompts))
        await worker.close()
        return found

    return asyncio.run(scenario())


def prompts(count: int) -> list[list[int]]:
    return [[(31 * index + 7 * number) % 509 + 3 for index in range(20 + 9 * number)] for number in range(count)]


async def decode(worker: Worker, drafts: ServerDrafting, prompt: Sequence[int], sampling: Sampling, count: int):
    """An answer of ``count`` tokens, and how many of them were drafted."""
    sequence, text, end, accepted = new_sequence(), list(prompt), len(prompt) + count, 0
    while len(text) < end:
        start = drafts.rows_from(sequence, text)
        own = await drafted(drafts, sequence, text, sampling, end - len(text))
        assert depth(own) < end - len(text)
        job = Job(sequence, text, sampling, own.tokens, own.parents, start)
        await worker.run(job, 600)
        drafts.learn(sequence, own, range(len(own.tokens)), job.path)
        text += [own.tokens[index] for index in job.path]
        if start is not None:
            drafts.add_rows(sequence, text, job.rows)
        text.append(job.token)
        accepted += len(job.path)
    worker.release(sequence)
    drafts.release(sequence)
    return text[len(prompt) :], accepted
