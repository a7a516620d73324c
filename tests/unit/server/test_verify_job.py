"""The result of a job does not depend on how it is split."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import accepted_path
from moa_server.engine.base import StepRequest, new_sequence
from moa_server.scheduling.verify_job import FEW, MOST_ROWS, Job
from support.server.stepping import step
from support.toy_engine import VOCAB, ToyEngine

PREFIX = tuple(random.Random(4).choices(range(1, VOCAB), k=30))


def run(engine: ToyEngine, job: Job, most) -> None:
    """Do a job in pieces; ``most`` returns the limit of the next one."""
    while not job.done:
        request = job.request(engine.held(job.sequence, job.prefix), most())
        job.take(request, step(engine, request))


def tree_with_a_right_path(engine: ToyEngine, rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    draft: list[int] = []
    parents: list[int] = []
    right, node = list(PREFIX), 0
    for index in range(size):
        if rng.random() < 0.4:
            right.append(engine.choice(right))
            draft.append(right[-1])
            parents.append(node)
            node = index + 1
        else:
            draft.append(rng.randrange(1, VOCAB))
            parents.append(rng.randint(0, index))
    return draft, parents


@given(seed=st.integers(0, 10_000), size=st.integers(0, 40), mosts=st.lists(st.integers(1, 20), min_size=1))
@settings(max_examples=150)
def test_pieces_of_a_tree_have_the_result_of_the_whole_tree(seed, size, mosts):
    engine, rng = ToyEngine(preempts=0.05), random.Random(seed)
    draft, parents = tree_with_a_right_path(engine, rng, size)
    job = Job(new_sequence(), PREFIX, Sampling(), draft, parents, rows_from=0)
    run(engine, job, lambda: rng.choice(mosts))
    paths = [list(PREFIX)]
    for token, parent in zip(draft, parents, strict=True):
        paths.append([*paths[parent], token])
    choices = [engine.choice(path) for path in paths]
    path = accepted_path(draft, parents, choices)
    # Of equal siblings another one may stand for the same token.
    assert [draft[index] for index in job.path] == [draft[index] for index in path]
    assert job.token == choices[path[-1] + 1 if path else 0]
    processed = range(len(PREFIX) + len(path))
    assert job.rows.start == 0 and job.rows.keys[:, 0, 0].tolist() == [1.0 + position for position in processed]


def test_a_piece_is_bounded():
    job = Job(1, PREFIX, Sampling(), [5] * 20, range(20), rows_from=0)
    assert job.prefills(0) and job.request(0, 7) == StepRequest(1, list(PREFIX[:7]), rows_from=0, expected=30)
    assert not job.prefills(30 - FEW)
    request = job.request(29, 4)  # one token of the prefix, and three of the draft
    assert (len(request.prefix), request.draft, request.sampling) == (30, [5, 5, 5], Sampling())
    assert job.request(30, 1).draft == []


def test_rows_of_held_tokens_come_piece_by_piece():
    engine, lengths = ToyEngine(), [MOST_ROWS, 2 * MOST_ROWS, 3 * MOST_ROWS]
    job = Job(new_sequence(), [1] * lengths[-1], Sampling(), rows_from=0)
    step(engine, StepRequest(job.sequence, job.prefix))
    run(engine, job, lambda: 20)
    assert [len(request.prefix) for [request] in engine.steps[1:]] == lengths
    assert job.rows.start == 0 and job.rows.keys[:, 0, 0].tolist() == [1.0 + position for position in range(192)]
