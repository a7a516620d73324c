"""Steps of an engine without an event loop of one's own, and drafts for them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from moa_runtime.session.events import Sampling
from moa_server.engine.base import Engine, Outcome, StepRequest, new_sequence


def step(engine: Engine, request: StepRequest) -> Outcome:
    (outcome,) = asyncio.run(engine.step([request]))
    return outcome


def plain(engine: Engine, prefix: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """What the engine writes behind ``prefix``, token by token, in a sequence of its own."""
    number, tokens = new_sequence(), list(prefix)
    for _ in range(count):
        token = step(engine, StepRequest(number, tokens, sampling=sampling)).token
        assert token is not None
        tokens.append(token)
    engine.release(number)
    return tokens[len(prefix) :]


def fresh_choices(
    engine: Engine, prefix: Sequence[int], draft: Sequence[int], parents: Sequence[int], sampling: Sampling
) -> list[int]:
    """The choice after every node, each by a sequence of its own that sees only the node's path."""
    paths = [tuple(prefix)]
    for token, parent in zip(draft, parents, strict=True):
        paths.append((*paths[parent], token))
    return [plain(engine, path, sampling, 1)[0] for path in paths]


def random_tree(rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    return [rng.randrange(3, 512) for _ in range(size)], [rng.randint(0, index) for index in range(size)]
