"""What the target answers to questions when nobody drafts, many questions at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from moa_bench.questions import Question
from moa_runtime.session.events import Sampling
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.engine.base import Engine
from moa_server.engine.baseline import PlainDecoding
from moa_server.engine.blocking import CHUNK
from moa_server.scheduling.verify_job import Job

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
    engine: Engine,
    questions: Sequence[Question],
    tokenizer: ChatTokenizer,
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    max_context: int | None = None,
    known: Mapping[tuple[int, ...], list[int]] = MappingProxyType({}),
    on_answers: Callable[[list[tuple[list[int], list[int]]]], None] = lambda written: None,
    on_known: Callable[[int], None] = lambda count: None,
) -> Answers:
    """The target's answers to all turns, each with its stop token where it ended.

    An engine that is not batch-invariant rounds otherwise in a step of many sequences, so where two tokens are equally
    likely an answer may go on otherwise than one that is verified.

    Args:
        max_context: tokens of a conversation, the engine's if nothing is said; a turn that leaves no room for an answer
            ends it, unanswered.
        known: answers written before, taken where the same is asked.
        on_answers: called with what was written since, pairs of the text before an answer and the answer.
        on_known: called with the number of answers taken from ``known``.
    """
    context = engine.max_context if max_context is None else max_context
    answers: Answers = {}
    dialogues = [_Dialogue(question) for question in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        going_on = (dialogue for dialogue in dialogues if turn < len(dialogue.question.turns))
        asked = [(dialogue, dialogue.prompt(turn, tokenizer)) for dialogue in going_on]
        asked = [(dialogue, prompt) for dialogue, prompt in asked if len(prompt) < context]
        answers |= {tuple(prompt): known[tuple(prompt)] for _, prompt in asked if tuple(prompt) in known}
        unknown = [prompt for _, prompt in asked if tuple(prompt) not in known]
        on_known(len(asked) - len(unknown))
        begun = [
            _Writing(prompt, PlainDecoding(engine, prompt, sampling, min(max_new_tokens, context - len(prompt))))
            for prompt in unknown
        ]
        answers |= asyncio.run(_written(engine, begun, on_answers))
        for dialogue, prompt in asked:
            dialogue.take(turn, prompt, answers[tuple(prompt)], tokenizer)
        dialogues = [dialogue for dialogue, _ in asked]
    return answers


@dataclass
class _Writing:
    """An answer that is being written."""

    prompt: list[int]
    plain: PlainDecoding
    answer: list[int] = field(default_factory=list)
    job: Job | None = None  # that decides its next token


async def _written(
    engine: Engine, begun: Sequence[_Writing], on_answers: Callable[[list[tuple[list[int], list[int]]]], None]
) -> Answers:
    """Write all answers, a batch of them at a time; where one ends, the next begins."""
    waiting, going_on = list(begun), list[_Writing]()
    while waiting or going_on:
        while waiting and len(going_on) < _BATCH:
            going_on.append(waiting.pop(0))
        for one in going_on:
            one.job = one.job or one.plain.next()
        ended = [one for one in going_on if one.job is None]
        for one in ended:
            engine.release(one.plain.sequence)
        if ended:
            on_answers([(one.prompt, one.answer) for one in ended])
        going_on = [one for one in going_on if one.job is not None]
        jobs = [one.job for one in going_on if one.job is not None]
        requests = [job.request(engine.held(job.sequence, job.prefix), CHUNK) for job in jobs]
        for one, request, outcome in zip(going_on, requests, await engine.step(requests), strict=True):
            assert one.job is not None
            one.job.take(request, outcome)
            if one.job.done:
                one.answer.append(one.plain.take(one.job).token)
                one.job = None
    return {tuple(one.prompt): one.answer for one in begun}
