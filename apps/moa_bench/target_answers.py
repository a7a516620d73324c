"""Answers that the target writes before drafts are compared with them: written in batches, kept in a file, replayed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

from moa_bench.questions import Question
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import accepted_path
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.engine.base import Engine, Outcome, Rows, StepRequest, new_sequence
from moa_server.engine.baseline import PREFILL_CHUNK, BlockingEngine, PlainDecoding
from moa_server.scheduling.verify_job import Job

#: The answer (tokens) to each text before it (tokens).
Answers = dict[tuple[int, ...], list[int]]

_BATCH = 32


def turn_messages(text: str, answer: str) -> list[dict[str, str]]:
    """Return the messages of a user's turn and its answer, as chat templates take them."""
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


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
    """Let the target answer all turns, 32 at a time, each answer with its stop token if it ended.

    An engine that is not batch-invariant rounds differently in a step of many sequences: between two equally likely
    tokens an answer may continue differently than one that is verified.

    Args:
        max_context: tokens of a conversation, by default the engine's; a turn without room for an answer ends it.
        known: answers written before, reused for the same texts.
        on_answers: called with new pairs of the text before an answer and the answer.
        on_known: called with the number of answers taken from ``known``.
    """
    context = engine.max_context if max_context is None else max_context
    answers: Answers = {}
    # Questions that are not over, each with its tokens and messages so far.
    asked: list[tuple[Question, list[int], list[dict[str, str]]]] = [(question, [], []) for question in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        prompts = [
            (question, [*tokens, *tokenizer.continue_chat(tokens, messages, question.turns[turn])], messages)
            for question, tokens, messages in asked
            if turn < len(question.turns)
        ]
        prompts = [each for each in prompts if len(each[1]) < context]
        answers |= {tuple(prompt): known[tuple(prompt)] for _, prompt, _ in prompts if tuple(prompt) in known}
        unknown = [prompt for _, prompt, _ in prompts if tuple(prompt) not in known]
        on_known(len(prompts) - len(unknown))
        begun = [
            _Writing(prompt, PlainDecoding(engine, prompt, sampling, min(max_new_tokens, context - len(prompt))))
            for prompt in unknown
        ]
        answers |= asyncio.run(_written(engine, begun, on_answers))
        asked = []
        for question, prompt, messages in prompts:
            answer = answers[tuple(prompt)]
            more = turn_messages(question.turns[turn], tokenizer.decode(answer))
            asked.append((question, [*prompt, *answer], [*messages, *more]))
    return answers


@dataclass
class _Writing:
    """An answer under way, and the job that decides its next token."""

    prompt: list[int]
    plain: PlainDecoding
    answer: list[int] = field(default_factory=list)
    job: Job | None = None


async def _written(
    engine: Engine, begun: Sequence[_Writing], on_answers: Callable[[list[tuple[list[int], list[int]]]], None]
) -> Answers:
    """Write all answers, a batch at a time; when one ends, the next begins."""
    waiting, running = list(begun), list[_Writing]()
    while waiting or running:
        while waiting and len(running) < _BATCH:
            running.append(waiting.pop(0))
        for one in running:
            one.job = one.job or one.plain.next()
        ended = [one for one in running if one.job is None]
        for one in ended:
            engine.release(one.plain.sequence)
        if ended:
            on_answers([(one.prompt, one.answer) for one in ended])
        running = [one for one in running if one.job is not None]
        jobs = [one.job for one in running if one.job is not None]
        requests = [job.request(engine.held(job.sequence, job.prefix), PREFILL_CHUNK) for job in jobs]
        for one, request, outcome in zip(running, requests, await engine.step(requests), strict=True):
            assert one.job is not None
            one.job.take(request, outcome)
            if one.job.done:
                one.answer.append(one.plain.take(one.job).token)
                one.job = None
    return {tuple(one.prompt): one.answer for one in begun}


class AnswerFile:
    """A file of answers: JSON lines ``{"target": fingerprint, "max_new_tokens": n}``, then ``{"p": [ids], "r": [ids]}``
    for each answer, in ``answers``. If answers are sampled, the first line has ``"sampling"`` too.

    It is created if it is missing, and read up to its last whole line, so an interrupted benchmark continues. Raises
    MoaError: a file that cannot be read or created, with other content, or of another target, length or sampling.
    """

    def __init__(self, path: Path, target: str, max_new_tokens: int, sampling: Sampling, *, vocab_size: int) -> None:
        self._path = path
        header: dict[str, object] = {"target": target, "max_new_tokens": max_new_tokens}
        if sampling.temperature:
            header["sampling"] = asdict(sampling)
        try:
            whole = path.read_bytes() if path.exists() else b""
            kept = whole[: whole.rfind(b"\n") + 1]
            found, self.answers = _header_and_answers(kept, path, vocab_size) if whole else (header, {})
            if found["target"] != target:
                text = f"the answers in {path} are another target's: choose another --answers, or remove it"
                raise MoaError(text, code="other_target")
            if found["max_new_tokens"] != max_new_tokens:
                text = (
                    f"the answers in {path} have at most {found['max_new_tokens']} tokens, not {max_new_tokens}: "
                    "choose another --answers, or the same --max-new-tokens"
                )
                raise MoaError(text, code="other_settings")
            if found.get("sampling") != header.get("sampling"):
                text = (
                    f"the answers in {path} were sampled otherwise: choose another --answers, or the same "
                    "--temperature, --top-p and --seed"
                )
                raise MoaError(text, code="other_settings")
            if not whole:
                self._append([header])
            elif len(kept) < len(whole):
                os.truncate(path, len(kept))
        except OSError as error:
            raise self._error(error) from error

    def add(self, written: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Append answers, each with the text before it. Raises MoaError if the file cannot be written."""
        try:
            self._append([{"p": list(prompt), "r": list(answer)} for prompt, answer in written])
        except OSError as error:
            raise self._error(error) from error

    def _append(self, lines: Iterable[object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)

    def _error(self, error: OSError) -> MoaError:
        return MoaError(f"cannot keep answers in {self._path}: {error.strerror}", code="not_writable")


def _header_and_answers(kept: bytes, path: Path, vocab_size: int) -> tuple[dict[str, object], Answers]:
    """Parse whole lines. Raises MoaError."""
    try:
        header, *rest = [json.loads(line) for line in kept.decode().splitlines()]
        if not isinstance(header, dict) or not {"target", "max_new_tokens"} <= header.keys():
            raise ValueError
        answers = {tuple(line["p"]): list(line["r"]) for line in rest}
        if not all(_are_ids(prompt, vocab_size) and _are_ids(answer, vocab_size) for prompt, answer in answers.items()):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"{path} holds no answers of moa-bench: choose another --answers, or remove it"
        raise MoaError(text, code="damaged") from error
    return header, answers


def _are_ids(tokens: Sequence[object], vocab_size: int) -> bool:
    return bool(tokens) and all(type(token) is int and 0 <= token < vocab_size for token in tokens)


@dataclass
class _Text:
    """A sequence: the conversation up to the end of its last answer, and its memory rows from the first one on."""

    tokens: list[int] = field(default_factory=list)
    rows: Rows | None = None


def rows_of(engine: Engine, tokens: Sequence[int]) -> Rows | None:
    """Return the memory rows of a text; None if the engine makes none."""
    with closing(BlockingEngine(engine)) as blocking:
        job = blocking.run(Job(new_sequence(), tokens, None, rows_from=0))
        blocking.release(job.sequence)
    return job.rows


class ReplayEngine:
    """An engine that compares drafts with known answers instead of verifying them. Implements
    :class:`moa_server.engine.base.Engine`.

    A target writes the same text however it is drafted, for the same seed if it samples. So one forward over question
    and answer gives every memory row that a drafter will be sent, and a round costs no forward. A drafter without rows
    costs no forward at all.

    Args:
        engine: asked for memory rows.
        has_rows: whether the drafter is sent memory rows.

    Attributes:
        forwards: verdicts given; each would be a forward of the target.
    """

    def __init__(self, engine: Engine, answers: Answers, *, has_rows: bool = True) -> None:
        self._engine, self._answers, self.has_rows = engine, answers, has_rows
        self.fingerprints, self.vocab_size = engine.fingerprints, engine.vocab_size
        self.stop_tokens, self.max_context = engine.stop_tokens, engine.max_context
        self.capabilities, self.facts, self.cache_use = engine.capabilities, engine.facts, (0, 0)
        self.forwards = self.tokens_reused = 0
        self._texts: dict[int, _Text] = {}

    def share(self, sequence: int, owner: str) -> None:
        self._engine.share(sequence, owner)

    def held(self, sequence: int, prefix: Sequence[int]) -> int:
        text = self._texts.get(sequence, _Text()).tokens
        if not self.has_rows or list(prefix) == text[: len(prefix)]:
            return len(prefix)
        return self._engine.held(sequence, prefix)

    async def step(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        return [await self._verify(request) for request in requests]

    def release(self, sequence: int) -> None:
        self._texts.pop(sequence, None)
        self._engine.release(sequence)

    def close(self) -> None:
        self._texts.clear()

    async def _verify(self, request: StepRequest) -> Outcome:
        text, prefix = self._texts.setdefault(request.sequence, _Text()), list(request.prefix)
        known = prefix == text.tokens[: len(prefix)]
        if request.sampling is None:
            if known or not self.has_rows:
                return Outcome(rows=self._rows(text, request, len(prefix)))
            [outcome] = await self._engine.step([request])
            return outcome
        self.forwards += 1
        if not known:
            text.tokens = [*prefix, *self._answers[tuple(prefix)]]
            text.rows = await self._all_rows(request.sequence, text.tokens) if self.has_rows else None
        # By node, the prefix first: the number of the text's tokens up to it, or None off the text.
        ends: list[int | None] = [len(prefix)]
        for token, parent in zip(request.draft, request.parents, strict=True):
            end = ends[parent]
            ends.append(end + 1 if end is not None and self._next(text, end) == token else None)
        # The target's choice after a wrong token decides nothing.
        choices = [self.stop_tokens[0] if end is None else self._next(text, end) for end in ends]
        path = accepted_path(request.draft, request.parents, choices)
        chosen = choices[path[-1] + 1] if path else choices[0]
        return Outcome(tuple(path), chosen, self._rows(text, request, len(prefix) + len(path)))

    async def _all_rows(self, sequence: int, tokens: Sequence[int]) -> Rows | None:
        """Return the memory rows of a whole text."""
        job = Job(sequence, tokens, None, rows_from=0)
        while not job.done:
            request = job.request(self._engine.held(sequence, tokens), PREFILL_CHUNK)
            [outcome] = await self._engine.step([request])
            job.take(request, outcome)
        return job.rows

    def _next(self, text: _Text, end: int) -> int:
        """Return the token after the first ``end``; after the whole text, where it decides nothing, a stop token."""
        return text.tokens[end] if end < len(text.tokens) else self.stop_tokens[0]

    @staticmethod
    def _rows(text: _Text, request: StepRequest, end: int) -> Rows | None:
        if text.rows is None or request.rows_from is None:
            return None
        start = request.rows_from
        return Rows(start, text.rows.keys[start:end], text.rows.values[start:end])
