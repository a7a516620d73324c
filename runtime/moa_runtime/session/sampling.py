"""How the target chooses, as a Prompt says it."""

from __future__ import annotations

from dataclasses import dataclass

from moa_runtime.wire.moa.v1 import session_pb2 as wire


@dataclass(frozen=True)
class Sampling:
    """How the target chooses: ``temperature`` 0 is greedy; ``seed`` and the position make the noise.

    ``top_k`` and ``min_p`` are 0 for none.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0


def sampling_of(message: wire.Sampling) -> Sampling:
    """What a Prompt asks for."""
    return Sampling(message.temperature, message.top_p or 1.0, message.seed, message.top_k, message.min_p)


def message_of(sampling: Sampling) -> wire.Sampling:
    """How a Prompt says it."""
    return wire.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )


def unknown(message: wire.Sampling) -> str:
    """What is asked for that this verifier does not do, for a sentence; empty where there is nothing."""
    if message.grammar:
        return "grammars"
    penalised = message.presence_penalty or message.frequency_penalty or message.repetition_penalty not in (0, 1)
    return "penalties" if penalised else ""
