"""What the users of training conversations say: read from a file, or begun here and written on by the target."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from moa_drafter.training.data import open_lines
from moa_runtime.errors import MoaError

_WINDOW = 16  # batches whose prompts are sorted by length together

#: How a user's message begins, by kind; the target writes the rest. ``open`` leaves it all to the target.
OPENINGS: dict[str, tuple[str, ...]] = {
    "open": ("",),
    "chat": (
        "Can you recommend",
        "What is the best way to",
        "I have been feeling",
        "Tell me about",
        "Pretend that you are",
        "Why do people",
        "Give me some ideas for",
    ),
    "code": (
        "Write a Python function that",
        "Write a JavaScript function which",
        "Explain what this code does:\n\n```python\ndef",
        "How do I fix this error in my code?\n\n```\n",
        "Write a SQL query that",
        "Write a shell command to",
    ),
    "maths": (
        "Solve this problem step by step: A",
        "A shop sells",
        "If a train",
        "Calculate",
        "Maria has",
        "What is the probability that",
    ),
    "summary": (
        "Summarize the following text in one sentence:\n\nThe",
        "Give me the main points of this article:\n\n",
        "Write a short summary of this conversation:\n\n",
    ),
    "passage": (
        "Read the passage and answer the question.\n\nPassage: The",
        "Answer the question using only the text below.\n\nText: In",
        "Context: ",
    ),
    "translation": (
        "Translate the following sentence into German: ",
        "Translate into English: Der",
        "Translate into English: Le",
        "How do you say this in Spanish: ",
        "Translate the following text into French:\n\n",
    ),
    "extraction": (
        "Extract all names and dates from this text:\n\n",
        "List the key facts of this text as JSON:\n\n",
        "Which products and prices are mentioned here?\n\n",
    ),
    "rewriting": (
        "Rewrite this sentence so that it is more formal: ",
        "Correct the grammar of this text: ",
        "Make this paragraph shorter and simpler:\n\n",
        "Rephrase the following email politely:\n\n",
    ),
}


def read_prompts(path: Path, batch_size: int) -> list[list[list[str]]]:
    """Read what users say, in batches of conversations of like length, which waste little padding.

    The batches themselves are in random order, the same in every call, so that a run that stops early has
    answered long prompts too.

    Args:
        path: JSON lines of ``{"messages": [{"role": "user", "content": ...}, ...]}``, of which the user's are
            taken, or of ``{"prompt": ...}``; gzip if named ``.gz``.

    Returns:
        batches of conversations, each a list of what the user says turn by turn.

    Raises:
        MoaError: the file cannot be read, or a line is broken (named by number).
    """
    said: list[list[str]] = []
    try:
        with open_lines(path) as lines:
            for number, line in enumerate(lines, 1):
                said.append(_turns(line, f"{path}, line {number}"))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise MoaError(f"cannot read the prompts {path}: {error}; expected JSON lines") from error
    batches: list[list[list[str]]] = []
    for start in range(0, len(said), _WINDOW * batch_size):
        window = sorted(said[start : start + _WINDOW * batch_size], key=lambda turns: (len(turns), len(turns[0])))
        alike = [window[i : i + batch_size] for i in range(0, len(window), batch_size)]
        batches += random.Random(start).sample(alike, len(alike))
    return batches


def _turns(line: str, where: str) -> list[str]:
    try:
        raw = json.loads(line)
        if "prompt" in raw:
            return [str(raw["prompt"])]
        turns = [str(message["content"]) for message in raw["messages"] if message.get("role", "user") == "user"]
        if not turns:
            raise ValueError("no message of the user")
        return turns
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MoaError(f"{where}: expected {{'prompt': text}} or {{'messages': [...]}}, one of the user") from error


def draw_openings(mix: dict[str, float], count: int, rng: random.Random) -> Sequence[str]:
    """How ``count`` messages begin, their kinds drawn by weight.

    Raises:
        MoaError: a kind that there is not, or no weight above zero.
    """
    for kind, weight in mix.items():
        if kind not in OPENINGS:
            raise MoaError(f"mix names an unknown kind {kind!r}: known are {', '.join(OPENINGS)}")
        if not weight >= 0:
            raise MoaError(f"the weight of {kind!r} in mix must be at least 0, not {weight}")
    if not sum(mix.values()) > 0:
        raise MoaError("mix needs a weight above 0")
    kinds = rng.choices(list(mix), list(mix.values()), k=count)
    return [rng.choice(OPENINGS[kind]) for kind in kinds]
