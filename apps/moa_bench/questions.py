"""Questions in the format of Spec-Bench (JSON lines with ``question_id``, ``category`` and ``turns``), and prompts."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from moa_runtime.checked_file import open_checked
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.tokenizer import ChatTokenizer

MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
_LARGEST_FILE = 1 << 28


class QuestionsError(MoaError):
    """Raised for a questions file that cannot be read; the message names the line."""


@dataclass(frozen=True)
class Question:
    """The user's turns of one conversation. ``task``: the category; ``"mt_bench"`` for the eight categories of
    MT-bench."""

    id: int | str
    task: str
    turns: tuple[str, ...]


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Read the first ``limit`` questions, or all of them; empty lines are skipped, later lines are not read. Raises
    QuestionsError: no such file, no questions in it, or a line that is no question."""
    try:
        with io.TextIOWrapper(open_checked(path, _LARGEST_FILE), encoding="utf-8-sig") as lines:
            found = list(islice(_questions(path, lines), limit))
    except OSError as error:
        text = f"cannot read the questions file {path}: {reason_of(error)}"
        raise QuestionsError(text, code="not_readable") from error
    except UnicodeDecodeError as error:
        text = f"cannot read the questions file {path}: it is no UTF-8 text"
        raise QuestionsError(text, code="not_utf8") from error
    if not found:
        raise QuestionsError(f"the questions file {path} holds no questions", code="empty")
    return found


def _questions(path: Path, lines: Iterator[str]) -> Iterator[Question]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _question(json.loads(line))
        except json.JSONDecodeError as error:
            text = f"line {number} of {path} is no JSON: {error.msg} at column {error.colno}"
            raise QuestionsError(text, code="not_json") from error
        except (RecursionError, ValueError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
            text = f"line {number} of {path} is no question: {reason}"
            raise QuestionsError(text, code="no_question") from error


def _question(raw: Any) -> Question:
    """Check and convert a parsed line. Raises ValueError."""
    if not isinstance(raw, dict):
        raise ValueError("expected a JSON object with question_id, category and turns")
    if missing := [name for name in ("question_id", "category", "turns") if name not in raw]:
        raise ValueError(f"it has no {missing[0]!r}")
    identity, category, turns = raw["question_id"], raw["category"], raw["turns"]
    if isinstance(identity, bool) or not isinstance(identity, int | str):
        raise ValueError("'question_id' must be a number or a text")
    if not isinstance(category, str) or not category:
        raise ValueError("'category' must be a text")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError("'turns' must be a list of texts, at least one")
    if any("\ud800" <= character <= "\udfff" for character in "".join([str(identity), category, *turns])):
        raise ValueError("it has half of a character (a surrogate)")
    return Question(identity, MT_BENCH if category in MT_BENCH_CATEGORIES else category, tuple(turns))


#: For benchmarks of speed and cost, which need an everyday mix and no file.
BUILTIN_QUESTIONS = tuple(
    Question(number, task, (text,))
    for number, (task, text) in enumerate(
        (
            ("qa", "Why is the sky blue during the day and red at sunset?"),
            ("writing", "Write a short letter to a neighbour who looked after my plants while I was away."),
            ("math", "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Explain each step."),
            ("coding", "Write a Python function that returns the longest word in a sentence, and explain it."),
            ("summary", "Sum up in three sentences how a bill becomes a law in a parliament with two chambers."),
            ("qa", "What is the difference between weather and climate?"),
            ("writing", "Tell a bedtime story about a lighthouse keeper and a lost seagull."),
            ("advice", "I have twenty minutes each evening to learn Italian. How should I use them?"),
            ("coding", "Explain what a hash table is, when it is slow, and what one can do about it."),
            ("qa", "How does a vaccine teach the body to recognise a virus?"),
            ("advice", "Suggest a simple dinner with rice, tomatoes, eggs and spinach, step by step."),
            ("math", "A shirt costs 40 euros after a discount of 20 percent. What did it cost before? Show why."),
        ),
        1,
    )
)


@dataclass(frozen=True)
class Prompt:
    """A question's first turn; ``tokens`` is the chat template's text up to the beginning of the answer."""

    text: str
    tokens: list[int]


def prompts_of(
    questions: Iterable[Question], tokenizer: ChatTokenizer, max_context: int
) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """Encode the questions; list those that leave no room for an answer in the target's context (tokens). Raises
    MoaError: none of them leaves room."""
    prompts, skipped = [], []
    for question in questions:
        text = question.turns[0]
        tokens = tokenizer.encode_chat([{"role": "user", "content": text}])
        if len(tokens) < max_context:
            prompts.append(Prompt(text, tokens))
        else:
            reason = f"it has {len(tokens)} tokens, the target's context holds {max_context}"
            skipped.append({"question_id": question.id, "reason": reason})
    if not prompts:
        text = f"none of the questions fits the target's context of {max_context} tokens"
        raise MoaError(text, code="too_long")
    return prompts, skipped
