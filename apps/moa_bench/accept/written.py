"""What the target answers to questions when nobody drafts, many questions at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    on_answers: Callable[[int], None] = lambda count: None,
) -> Answers:
    """The target's greedy answers to all turns, each with its stop token where it ended.

    A batch rounds otherwise than a single sequence, so where two tokens are equally likely an answer may go on
    otherwise than one that is verified.

    Args:
        max_context: tokens of a conversation; a turn that leaves no room for an answer ends it, unanswered.
        on_answers: called with the number of turns done at once.
    """
    from moa_drafter.training.decoding import answer_greedily

    answers: Answers = {}
    dialogues = [_Dialogue(question) for question in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        going_on = (dialogue for dialogue in dialogues if turn < len(dialogue.question.turns))
        asked = [(dialogue, dialogue.prompt(turn, tokenizer)) for dialogue in going_on]
        asked = [(dialogue, prompt) for dialogue, prompt in asked if len(prompt) < max_context]
        # Of like length, for a batch is as long as its longest.
        asked.sort(key=lambda pair: len(pair[1]))
        for start in range(0, len(asked), _BATCH):
            part = asked[start : start + _BATCH]
            written = answer_greedily(target, [prompt for _, prompt in part], max_new_tokens)
            for (dialogue, prompt), whole in zip(part, written, strict=True):
                answer = whole[: max_context - len(prompt)]
                answers[tuple(prompt)] = answer
                dialogue.take(turn, prompt, answer, tokenizer)
            on_answers(len(part))
        dialogues = [dialogue for dialogue, _ in asked]
    return answers
