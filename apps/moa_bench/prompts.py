"""Questions as the target reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moa_bench.questions import Question
from moa_runtime.errors import MoaError
from moa_runtime.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Prompt:
    """A question's first turn; ``tokens`` by the chat template, up to where the answer begins."""

    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Skipped:
    """A question that was not asked, and why."""

    question_id: int | str
    reason: str


def prompts_of(
    questions: Iterable[Question], tokenizer: ChatTokenizer, max_context: int
) -> tuple[list[Prompt], list[Skipped]]:
    """The questions that leave room for an answer in the target's context, and those that do not.

    Raises:
        MoaError: none of them does.
    """
    prompts, skipped = [], []
    for question in questions:
        text = question.turns[0]
        tokens = tokenizer.encode_chat([{"role": "user", "content": text}])
        if len(tokens) < max_context:
            prompts.append(Prompt(text, tokens))
        else:
            reason = f"it has {len(tokens)} tokens, the target's context holds {max_context}"
            skipped.append(Skipped(question.id, reason))
    if not prompts:
        raise MoaError(f"none of the questions fits the target's context of {max_context} tokens")
    return prompts, skipped
