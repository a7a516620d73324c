"""Token store: conversations as JSON lines, and how they are packed into training steps."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moa_runtime.errors import MoaError


@dataclass(frozen=True)
class Conversation:
    """One prompt with the target's answer, as token ids; the answer ends with the end-of-turn token
    where it ended."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def read_conversations(path: Path, *, vocab_size: int) -> list[Conversation]:
    """Read a token store: a line a conversation, ``{"p": [ids], "r": [ids]}``, gzip if named ``.gz``.

    A last line cut short by an interrupted writer is left out.

    Raises:
        MoaError: the file is missing, or a line is broken (named by number).
    """
    if not path.is_file():
        raise MoaError(f"no token file {path}: expected JSON lines as `moa-train generate` writes them")
    found: list[Conversation] = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                break
            try:
                raw = json.loads(line)
                conversation = Conversation(tuple(raw["p"]), tuple(raw["r"]))
                in_range = all(0 <= token < vocab_size for token in conversation.tokens)
            except (ValueError, KeyError, TypeError) as error:
                raise MoaError(f"{path}, line {number}: expected {{'p': [ids], 'r': [ids]}} ({error})") from error
            if not in_range:
                raise MoaError(f"{path}, line {number}: a token id outside 0..{vocab_size - 1}; another tokenizer's?")
            if conversation.prompt and len(conversation.answer) > 1:
                found.append(conversation)
    if not found:
        raise MoaError(f"{path} holds no conversation with an answer of two tokens or more")
    return found


def frequent_tokens(conversations: Sequence[Conversation], size: int, always: Sequence[int]) -> list[int]:
    """The draft vocabulary: ``size`` token ids, ascending; ``always`` first, then by frequency in
    answers and prompts, then lowest ids (which byte-pair encodings learnt first)."""
    counts: Counter[int] = Counter()
    for conversation in conversations:
        counts.update(conversation.tokens)
    chosen = dict.fromkeys(always)
    for token, _ in counts.most_common():
        if len(chosen) >= size:
            break
        chosen[token] = None
    for token in range(size):
        if len(chosen) >= size:
            break
        chosen[token] = None
    return sorted(chosen)


def packed_order(lengths: Sequence[int], step_tokens: int, seed: int) -> Iterator[list[int]]:
    """Endless training steps: lists of conversation indices of about ``step_tokens`` tokens in all.

    Each epoch is a new permutation drawn from ``seed`` and the epoch's number, so step ``n`` is the same
    in every run and a resumed run can skip to it.
    """
    epoch = 0
    while True:
        order = list(range(len(lengths)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        step: list[int] = []
        size = 0
        for index in order:
            if step and size + lengths[index] > step_tokens:
                yield step
                step, size = [], 0
            step.append(index)
            size += lengths[index]
        yield step
        epoch += 1
