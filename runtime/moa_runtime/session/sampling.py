"""Sampling parameters of an answer, and their message in a Prompt."""

from __future__ import annotations

from dataclasses import dataclass

from moa_runtime.wire.moa.v1 import session_pb2 as wire

LARGEST_REAL = 3e38  # largest number in the wire's float fields


@dataclass(frozen=True)
class Sampling:
    """How the target chooses a token.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus sampling, 0 to 1; 1 disables it.
        seed: determines, with a token's absolute position, the noise of the choice; 64 bits.
        top_k: number of most likely tokens to choose from; 0 disables it.
        min_p: smallest probability relative to the most likely token's, 0 to 1; 0 disables it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0


def impossible(sampling: Sampling) -> str:
    """Return an error message if a value is out of range; empty if all are valid."""
    if not 0 <= sampling.temperature <= LARGEST_REAL:
        return f"a temperature is 0 or more, not {sampling.temperature}"
    if not 0 <= sampling.top_p <= 1:
        return f"top_p is from 0 to 1, not {sampling.top_p}"
    return "" if 0 <= sampling.min_p <= 1 else f"min_p is from 0 to 1, not {sampling.min_p}"


def sampling_of(message: wire.Sampling) -> Sampling:
    """Parse the sampling of a Prompt."""
    return Sampling(message.temperature, message.top_p or 1.0, message.seed, message.top_k, message.min_p)


def message_of(sampling: Sampling) -> wire.Sampling:
    """Build the sampling of a Prompt."""
    return wire.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )


def unknown(message: wire.Sampling) -> str:
    """Return the name of a requested feature that this verifier lacks; empty if there is none."""
    if message.grammar:
        return "grammars"
    penalised = message.presence_penalty or message.frequency_penalty or message.repetition_penalty not in (0, 1)
    return "penalties" if penalised else ""
