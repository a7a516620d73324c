"""The result of a job does not depend on how it is split."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import accepted_path
from moa_server.engine.base import StepRequest, new_sequence
from moa_server.scheduling.step_drafts import only_verified
from moa_server.scheduling.verify_job import FEW, MOST_ROWS, Job, PricedDraft
from support.server.stepping import step
from support.toy_engine import VOCAB, ToyEngine

PREFIX = tuple(random.Random(4).choices(range(1, VOCAB), k=30))


def run(engine: ToyEngine, job: Job, most, nodes=lambda: None) -> None:
    """Do a job in pieces; ``most`` and ``nodes`` return the limit of the next one and its drafted tokens."""
    while not job.done:
        request = job.request(engine.held(job.sequence, job.prefix), most(), nodes())
        job.take(request, step(engine, request))


def likely(job: Job, rng: random.Random) -> list[int]:
    """Return the drafted tokens above a random probability: part of a tree that is a tree."""
    least = rng.random()
    return [index for index, path in enumerate(job.paths) if path >= least]


def random_paths(parents: list[int], rng: random.Random) -> list[float]:
    paths = [1.0]
    for parent in parents:
        paths.append(paths[parent] * rng.choice([0.5, 0.9, 1.0]))
    return paths[1:]


def tree_with_a_right_path(engine: ToyEngine, rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    """Make a tree without equal siblings, some of whose tokens are right."""
    places: dict[tuple[int, int], int] = {}  # parent and token -> node
    right, node = list(PREFIX), 0
    for _ in range(size):
        if rng.random() < 0.4:
            right.append(engine.choice(right))
            node = places.setdefault((node, right[-1]), len(places) + 1)
        else:
            places.setdefault((rng.randint(0, len(places)), rng.randrange(1, VOCAB)), len(places) + 1)
    return [token for _, token in places], [parent for parent, _ in places]


@given(
    seed=st.integers(0, 10_000),
    size=st.integers(0, 40),
    mosts=st.lists(st.integers(1, 20), min_size=1),
    cut=st.booleans(),
)
@settings(max_examples=150)
def test_pieces_of_a_tree_have_the_result_of_the_whole_tree(seed, size, mosts, cut):
    engine, rng = ToyEngine(preempts=0.05), random.Random(seed)
    draft, parents = tree_with_a_right_path(engine, rng, size)
    job = Job(new_sequence(), PREFIX, Sampling(), draft, parents, rows_from=0, paths=random_paths(parents, rng))
    run(engine, job, lambda: rng.choice(mosts), lambda: likely(job, rng) if cut else None)
    paths = [list(PREFIX)]
    for token, parent in zip(draft, parents, strict=True):
        paths.append([*paths[parent], token])
    choices = [engine.choice(path) for path in paths]
    path = accepted_path(draft, parents, choices)
    if path and path[-1] not in job.verified and path[-1] + 1 not in parents:
        path = path[:-1]  # the last token was left out, is the target's own choice, and nothing follows it
    assert list(job.path) == list(path)
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


@given(seed=st.integers(0, 10_000), size=st.integers(0, 40))
@settings(max_examples=100)
def test_of_a_proposed_draft_one_step_accepts_what_is_right_among_the_chosen_tokens(seed, size):
    """What is left out is no longer part of the job: a newer draft may hold it."""
    engine, rng = ToyEngine(preempts=0.2), random.Random(seed)
    draft, parents = tree_with_a_right_path(engine, rng, size)

    class Source:
        def newest(self) -> PricedDraft:
            return PricedDraft(draft, parents, random_paths(parents, rng))

    job = Job(new_sequence(), PREFIX, Sampling(), source=Source())
    while not job.done:
        job.take_newest()
        chosen = likely(job, rng)
        request = job.request(engine.held(job.sequence, job.prefix), 100, chosen)
        job.take(request, step(engine, request))
    text, node = list(PREFIX), 0
    for index in job.path:
        assert parents[index] == node and draft[index] == engine.choice(text)
        text, node = [*text, draft[index]], index + 1
    assert job.token == engine.choice(text) and job.verified == chosen
    assert not any(parents[index] == node and draft[index] == job.token for index in chosen)
    tokens, own_parents, path = only_verified(draft, parents, job.verified, job.path)
    assert list(tokens) == [draft[index] for index in chosen] and [chosen[place] for place in path] == list(job.path)
    assert [chosen[parent - 1] + 1 if parent else 0 for parent in own_parents] == [parents[index] for index in chosen]
