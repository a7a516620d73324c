"""Plain decoding: the target alone, token by token. What every other path is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moa_runtime.session.server import Sampling
from moa_server.engine import Engine


class Step(NamedTuple):
    """One token the target chose, and the forwards it took (more than one for a long prompt)."""

    token: int
    forwards: int


def decode(
    engine: Engine, prefix: Sequence[int], sampling: Sampling, max_new_tokens: int | None = None
) -> Iterator[Step]:
    """Continue ``prefix`` until a stop token (yielded too), ``max_new_tokens``, or the end of the context."""
    tokens = list(prefix)
    end = engine.max_context if max_new_tokens is None else min(engine.max_context, len(tokens) + max_new_tokens)
    sequence = engine.open()
    try:
        while len(tokens) < end:
            before = engine.forwards
            tokens += sequence.verify(tokens, (), (), sampling)
            sequence.keep(())
            yield Step(tokens[-1], engine.forwards - before)
            if tokens[-1] in engine.stop_tokens:
                return
    finally:
        sequence.close()
