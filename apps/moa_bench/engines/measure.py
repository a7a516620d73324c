"""The same questions to two engines, token by token."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moa_bench.engines.nearness import nearness
from moa_bench.prompts import Prompt
from moa_runtime.session.sampling import Sampling
from moa_runtime.session.tree import chain
from moa_server.blocking import BlockingEngine
from moa_server.engine import Engine, Float32, new_sequence
from moa_server.jobs import Job
from moa_server.plain import decode

#: Tokens of a draft, at random, and how many of them are wrong.
_LENGTHS = (0, 1, 2, 4, 8, 16)
_WRONG = 0.2


@dataclass(frozen=True)
class Place:
    """Where the engines' choices differ.

    Attributes:
        question: its number, from 0 on.
        position: of the token in the answer, from 0 on.
        expected, found: the tokens that the first engine chose, and the second.
        nearness: see :func:`moa_bench.engines.nearness.nearness`.
    """

    question: int
    position: int
    expected: int
    found: int
    nearness: float | None


@dataclass
class Results:
    """What was compared so far, whole answers only."""

    questions: int = 0
    tokens: int = 0
    places: list[Place] = field(default_factory=list)


def compare(
    prompts: Iterable[Prompt],
    engines: tuple[Engine, Engine],
    logits: Callable[[Sequence[int]], Float32],
    sampling: Sampling,
    max_new_tokens: int,
    results: Results,
) -> None:
    """Let the first engine write each answer alone, and the second one verify drafts of it: of any length, a fifth of
    their tokens wrong. Where its text differs it goes on behind the expected one, so all of it is compared.

    Args:
        logits: of the first engine behind a text, ``[vocab_size]``.
    """
    first, second = engines
    with contextlib.closing(BlockingEngine(second)) as verifying:
        for number, prompt in enumerate(prompts):
            rng = random.Random(number)
            expected = [token.token for token in decode(first, prompt.tokens, sampling, max_new_tokens)]
            for at, found in _differing(verifying, prompt.tokens, expected, sampling, rng):
                text = [*prompt.tokens, *expected[:at]]
                near = nearness(logits(text), sampling, len(text), found, rng)
                results.places.append(Place(number, at, expected[at], found, near))
            results.questions, results.tokens = results.questions + 1, results.tokens + len(expected)


def _differing(
    engine: BlockingEngine, prompt: Sequence[int], expected: Sequence[int], sampling: Sampling, rng: random.Random
) -> list[tuple[int, int]]:
    """Positions in the answer at which the engine chooses another token, and what it chooses."""
    sequence, at, places = new_sequence(), 0, []
    while at < len(expected):
        draft = [_perhaps_wrong(token, rng) for token in expected[at : at + rng.choice(_LENGTHS)]]
        job = engine.run(Job(sequence, [*prompt, *expected[:at]], sampling, draft, chain(len(draft))))
        assert job.token is not None
        for token in (*draft[: len(job.path)], job.token):
            if at == len(expected):
                break
            if token != expected[at]:
                places.append((at, token))
                at += 1
                break
            at += 1
    engine.release(sequence)
    return places


def _perhaps_wrong(token: int, rng: random.Random) -> int:
    return token if rng.random() >= _WRONG else max(0, token - 1)
