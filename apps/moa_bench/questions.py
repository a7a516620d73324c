"""Questions in the format of Spec-Bench: JSON lines with ``question_id``, ``category`` and ``turns``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from moa_runtime.errors import MoaError

MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


class QuestionsError(MoaError):
    """A questions file that cannot be read; the message names the line."""


@dataclass(frozen=True)
class Question:
    """One conversation to hold: the user's turns, in order.

    ``task`` is the category, but ``"mt_bench"`` for the eight categories of MT-bench.
    """

    id: int | str
    task: str
    turns: tuple[str, ...]


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Read the first ``limit`` questions, or all; empty lines do not count, lines behind the last are not read.

    Raises:
        QuestionsError: no such file, no questions in it, or a line that is no question.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            found = list(islice(_questions(path, lines), limit))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise QuestionsError(f"cannot read the questions file {path}: {reason}") from error
    if not found:
        raise QuestionsError(f"the questions file {path} holds no questions")
    return found


def _questions(path: Path, lines: Iterator[str]) -> Iterator[Question]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _question(json.loads(line))
        except json.JSONDecodeError as error:
            raise QuestionsError(f"line {number} of {path} is no JSON: {error.msg} at column {error.colno}") from error
        except RecursionError as error:
            raise QuestionsError(f"line {number} of {path} is no question: it is nested too deeply") from error
        except ValueError as error:
            raise QuestionsError(f"line {number} of {path} is no question: {error}") from error


def _question(raw: Any) -> Question:
    """Raises ValueError on anything but a question."""
    if not isinstance(raw, dict):
        raise ValueError("expected a JSON object with question_id, category and turns")
    for name in ("question_id", "category", "turns"):
        if name not in raw:
            raise ValueError(f"it has no {name!r}")
    identity, category, turns = raw["question_id"], raw["category"], raw["turns"]
    if isinstance(identity, bool) or not isinstance(identity, int | str):
        raise ValueError("'question_id' must be a number or a text")
    if not isinstance(category, str) or not category:
        raise ValueError("'category' must be a text")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError("'turns' must be a list of texts, at least one")
    return Question(identity, MT_BENCH if category in MT_BENCH_CATEGORIES else category, tuple(turns))
