"""What the target answers to questions when nobody drafts, many questions at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from moa_bench.questions import Question
from moa_runtime.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from moa_drafter.target import Target

#: The answer to each text that was asked, as tokens: everything before an answer -> the answer.
Answers = dict[tuple[int, ...], list[int]]

_BATCH = 32


@dataclass
class _Dialogue:
    """A question's conversation as far as it is written."""

    question: Question
    tokens: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)

    def prompt(self, turn: int, tokenizer: ChatTokenizer) -> list[int]:
        """All tokens before the answer to the user's ``turn``."""
        text = self.question.turns[turn]
        return [*self.tokens, *tokenizer.continue_chat(self.tokens, self.messages, text)]

    def take(self, turn: int, prompt: list[int], answer: list[int], tokenizer: ChatTokenizer) -> None:
        """Add what the target answered."""
        self.tokens = [*prompt, *answer]
        self.messages += [
            {"role": "user", "content": self.question.turns[turn]},
            {"role": "assistant", "content": tokenizer.decode(answer)},
        ]


def write_answers(
    target: Target,
    questions: Sequence[Question],
    tokenizer: ChatTokenizer,
    *,
    max_new_tokens: int,
    max_context: int,
    known: Mapping[tuple[int, ...], list[int]] = MappingProxyType({}),
    on_answers: Callable[[list[tuple[list[int], list[int]]]], None] = lambda written: None,
    on_known: Callable[[int], None] = lambda count: None,
) -> Answers:
    """The target's greedy answers to all turns, each with its stop token where it ended.

    A batch rounds otherwise than a single sequence, so where two tokens are equally likely an answer may go on
    otherwise than one that is verified.

    Args:
        max_context: tokens of a conversation; a turn that leaves no room for an answer ends it, unanswered.
        known: answers written before, taken where the same is asked.
        on_answers: called with what was written at once, pairs of the text before an answer and the answer.
        on_known: called with the number of answers taken from ``known``.
    """
    from moa_drafter.training.decoding import answer_greedily

    answers: Answers = {}
    dialogues = [_Dialogue(question) for question in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        going_on = (dialogue for dialogue in dialogues if turn < len(dialogue.question.turns))
        asked = [(dialogue, dialogue.prompt(turn, tokenizer)) for dialogue in going_on]
        asked = [(dialogue, prompt) for dialogue, prompt in asked if len(prompt) < max_context]
        answers |= {tuple(prompt): known[tuple(prompt)] for _, prompt in asked if tuple(prompt) in known}
        # Of like length, for a batch is as long as its longest.
        unknown = sorted((prompt for _, prompt in asked if tuple(prompt) not in known), key=len)
        on_known(len(asked) - len(unknown))
        for start in range(0, len(unknown), _BATCH):
            part = unknown[start : start + _BATCH]
            whole = answer_greedily(target, part, max_new_tokens)
            written = [
                (prompt, answer[: max_context - len(prompt)]) for prompt, answer in zip(part, whole, strict=True)
            ]
            answers |= {tuple(prompt): answer for prompt, answer in written}
            on_answers(written)
        for dialogue, prompt in asked:
            dialogue.take(turn, prompt, answers[tuple(prompt)], tokenizer)
        dialogues = [dialogue for dialogue, _ in asked]
    return answers
