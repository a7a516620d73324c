"""How the target writes behind token prompts: what every writer offers, and transformers' batched generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moa_drafter.target import Target

# Compiled graphs are made for one shape, so on a GPU batches and prompts are rounded up to few sizes.
_PROMPT_BLOCK = 128
_BATCH_BLOCK = 64


@dataclass(frozen=True)
class Sampled:
    """How a text is sampled; ``top_p`` of 1 and ``min_p`` of 0 leave out no token."""

    temperature: float
    top_p: float = 1.0
    min_p: float = 0.0


class Decoder(Protocol):
    """A target that writes. Nothing but a decoder knows which program runs it.

    Attributes:
        name: of the writer, a key of :data:`moa_drafter.training.settings.WRITERS`.
    """

    name: str
    target: Target

    def begin(self, seed: int) -> None:
        """Begin a batch: from here on texts follow from the seed and the calls of this batch alone."""

    def write(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, ways: Sequence[Sampled | None]
    ) -> list[list[int]]:
        """What the target writes behind each prompt.

        Args:
            prompts: token ids.
            new_tokens: of each text at most.
            ways: how each text is chosen; None: greedily.

        Returns:
            token ids in the order of the prompts. A text ends with its stop token where it ended; it is empty where
            the prompt leaves no room in the context.
        """

    def close(self) -> None:
        """Free what is held beside the target."""


class TransformersDecoder:
    """Implements :class:`Decoder` with the target as it is loaded: a padded batch for each way of choosing."""

    name = "transformers"

    def __init__(self, target: Target) -> None:
        self.target = target

    def begin(self, seed: int) -> None:
        """See :meth:`Decoder.begin`."""
        torch.manual_seed(seed)

    def write(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, ways: Sequence[Sampled | None]
    ) -> list[list[int]]:
        """See :meth:`Decoder.write`; no context is ever too full."""
        found: list[list[int]] = [[] for _ in prompts]
        for way in dict.fromkeys(ways):
            alike = [index for index, each in enumerate(ways) if each == way]
            texts = generate(self.target, [prompts[index] for index in alike], new_tokens, **_options(way))
            for index, text in zip(alike, texts, strict=True):
                found[index] = text
        return found

    def close(self) -> None:
        """See :meth:`Decoder.close`: nothing is held."""


def _options(way: Sampled | None) -> dict[str, Any]:
    """Of transformers' ``generate``."""
    if way is None:
        return {"do_sample": False}
    options = {"do_sample": True, "temperature": way.temperature, "top_p": way.top_p}
    return {**options, "min_p": way.min_p} if way.min_p else options


def answer_greedily(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The target's greedy answers to token prompts, one batch; each ends with its stop token where it ended."""
    return generate(target, prompts, new_tokens, do_sample=False)


@torch.no_grad()
def generate(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any) -> list[list[int]]:
    """What the target writes behind each prompt; each result ends with its stop token where it ended.

    On a GPU transformers compiles the single-token step with CUDA graphs.

    Args:
        options: of transformers' ``generate``: ``do_sample``, ``temperature``, ``top_p``.
    """
    rows = list(prompts)
    longest = max(map(len, rows))
    compiled = target.device.type == "cuda"
    if compiled:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled is slower, and no reason to stop
        longest = _rounded(longest, _PROMPT_BLOCK)
        rows += [rows[-1]] * (_rounded(len(rows), _BATCH_BLOCK) - len(rows))
    stop = target.stop_tokens
    pad = stop[0]
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in rows], device=target.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in rows], device=target.device)
    out = target.model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        eos_token_id=list(stop),
        pad_token_id=pad,
        top_k=0,
        # Seen to be almost twice as fast as a growing cache at large batches on a CPU.
        cache_implementation="static",
        disable_compile=not compiled,
        **options,
    )
    return [_until_stop(row, stop) for row in out[: len(prompts), longest:].tolist()]


def _rounded(number: int, block: int) -> int:
    return -(-number // block) * block


def _until_stop(tokens: list[int], stop: Sequence[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


def repetitive(tokens: Sequence[int], span: int = 4, share: float = 0.5) -> bool:
    """Whether more than ``share`` of a text's ``span``-grams repeat earlier ones, as looping text does."""
    grams = [tuple(tokens[i : i + span]) for i in range(len(tokens) - span + 1)]
    return len(grams) >= 16 and len(set(grams)) < (1 - share) * len(grams)
