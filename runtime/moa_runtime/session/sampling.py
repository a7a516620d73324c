"""How the target chooses, as a Prompt says it."""

from __future__ import annotations

from dataclasses import dataclass

from moa_runtime.wire.moa.v1 import session_pb2 as wire

LARGEST_REAL = 3e38  # of the wire's floats


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


def impossible(sampling: Sampling) -> str:
    """What no target can do, in a sentence; empty where there is nothing."""
    if not 0 <= sampling.temperature <= LARGEST_REAL:
        return f"a temperature is 0 or more, not {sampling.temperature}"
    if not 0 <= sampling.top_p <= 1:
        return f"top_p is from 0 to 1, not {sampling.top_p}"
    return "" if 0 <= sampling.min_p <= 1 else f"min_p is from 0 to 1, not {sampling.min_p}"


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
