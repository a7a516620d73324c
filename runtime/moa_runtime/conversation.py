"""The turns of a chat, the committed tokens that each takes, and marks of answers that are not confirmed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moa_runtime.chat_template import Message, Tool
from moa_runtime.errors import ChatError, MoaError
from moa_runtime.manifest import checked_count
from moa_runtime.session.events import Sampling
from moa_runtime.session.snapshot import sampling_from_json
from moa_runtime.tokenizer import ChatTokenizer, HistoryRewrittenError
from moa_runtime.tokens import common_length


def check_request(max_new_tokens: int, sampling: Sampling | None) -> None:
    """Raise ChatError if no verifier could serve this request."""
    sampling = sampling or Sampling()
    if problem := sampling.problem:
        raise ChatError(problem, code="out_of_range")
    if not 0 <= sampling.seed < 1 << 64:
        raise ChatError(f"a seed is a whole number of 64 bits, 0 or more, not {sampling.seed}", code="out_of_range")
    if max_new_tokens < 0:
        raise ChatError(f"an answer may have 0 tokens (no limit) or more, not {max_new_tokens}", code="out_of_range")


#: Roles of a turn that is answered, the fields that a turn may have besides role and content, and levels of these.
_ASKING = ("user", "tool")
_FIELDS = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}
_DEEPEST = 48
#: Tokens before a raw answer, with which its first ones are decoded: more than the bytes of a character.
_CONTEXT = 32


@dataclass(frozen=True)
class Unconfirmed:
    """Mark of an answer that the device wrote offline: the target has not confirmed its text, or its end.

    Attributes:
        turn: index of the answer among the conversation's turns.
        sampling: of the question; the target's choices depend on it.
        most: tokens that the answer may have, 0 for no limit; for an answer that the user stopped, its length.
    """

    turn: int
    sampling: Sampling
    most: int


@dataclass(frozen=True)
class Question:
    """A question in its conversation.

    Attributes:
        messages: the turns, the question included.
        kept: committed tokens that stay.
        supplied: tokens that follow them, at least one.
        behind: the last tokens of a raw text, which the answer continues; none in a conversation of turns.
        dropped: number of the oldest turns that are not among the tokens; a system message is.
    """

    messages: list[dict[str, Any]]
    kept: int
    supplied: list[int]
    behind: tuple[int, ...] = ()
    dropped: int = 0

    @property
    def length(self) -> int:
        """Number of tokens before the answer."""
        return self.kept + len(self.supplied)


class Conversation:
    """Turns as messages, see :data:`moa_runtime.chat_template.Message`.

    Answers keep their committed tokens, because encoding their text could give other tokens. So the position of
    each answer's end is stored; other text is encoded.

    Attributes:
        messages: the turns.
        unconfirmed: marks of the answers that the target has not confirmed, in order.
        thinking: whether the target reasons before it answers; None for the template's default.
        context: tokens that the target holds, if the oldest turns are to be dropped when they outgrow it; else 0.
    """

    def __init__(self, tokenizer: ChatTokenizer, system: str | None = None) -> None:
        self.thinking: bool | None = None
        self.context = 0
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.unconfirmed: list[Unconfirmed] = []
        self._tokenizer = tokenizer
        self._tools: list[Tool] | None = None
        self._ends = [(0, 0)]  # (turns, committed tokens that these take)
        self._dropped: dict[int, int] = {}  # by number of turns: those that are not among these tokens

    @property
    def tools(self) -> Sequence[Tool] | None:
        """Functions that the target may call; None for none."""
        return self._tools

    @tools.setter
    def tools(self, tools: Sequence[Tool] | None) -> None:
        checked: list[Tool] | None = None if tools is None else [dict(tool) for tool in tools]
        _check_part(checked)
        if checked != self._tools:  # they are a part of the prompt, before the first turn
            self._tools, self._ends, self._dropped = checked, [(0, 0)], {}

    @property
    def length(self) -> int:
        """Number of committed tokens that the turns take."""
        return self._ends[-1][1]

    @property
    def ends(self) -> list[tuple[int, int]]:
        """Pairs of a number of turns and the committed tokens that they take."""
        return list(self._ends)

    def resume(
        self,
        messages: Sequence[Message],
        ends: Sequence[tuple[int, int]],
        committed: int,
        unconfirmed: Sequence[Unconfirmed],
    ) -> None:
        """Continue the turns of an earlier program, see :meth:`restore`; ``committed`` of its tokens are left."""
        self.restore(messages, unconfirmed)
        self._ends = [(0, 0), *(end for end in ends if 0 < end[1] <= committed)]

    def restore(self, messages: Sequence[Message], unconfirmed: Sequence[Unconfirmed] = ()) -> None:
        """Replace the turns; raise MoaError for a malformed message, or a mark that is not on an answer."""
        turns = [checked_turn(message) for message in messages]
        self.unconfirmed = checked_marks(unconfirmed, turns)
        common = common_length(self.messages, turns)
        self._ends = [end for end in self._ends if end[0] <= common]
        self.messages = turns

    def ask(self, committed: Sequence[int], asked: str | Message) -> Question:
        """Encode a question.

        Args:
            committed: the session's tokens, which may still hold turns that were replaced.
            asked: the user's text, or the last turn: the user's, or the result of a tool.

        Raises:
            ChatTemplateError: the template refuses the conversation.
            MoaError: it is no text, or it is empty and there is no template.
        """
        turn = checked_turn({"role": "user", "content": asked} if isinstance(asked, str) else asked)
        if turn["role"] not in _ASKING:
            text = f"a question is the user's or the result of a tool, not of the role {turn['role']!r}"
            raise MoaError(text, code="malformed_message")
        return self._question(committed, [*self.messages, turn])

    def last_answer(self, committed: Sequence[int]) -> tuple[Question, list[int]]:
        """Return the last question and the tokens of its answer: the committed ones if they are known.

        Raises:
            ChatError: the last turn is no answer to a question, or is not confirmed yet.
            ChatTemplateError: see :meth:`ask`.
        """
        messages = self.messages  # restore() replaces them, perhaps while this runs in a thread
        last = len(messages) - 1
        if not is_answer(messages, last):
            raise ChatError("there is no answer to continue: ask something", code="nothing_to_continue")
        if any(mark.turn == last for mark in self.unconfirmed):
            text = "the answer is not confirmed yet: it can be continued once it is checked"
            raise ChatError(text, code="unconfirmed")
        question = self._question(committed, messages[:last])
        turns, end = self._ends[-1]
        same = [*committed[: question.kept], *question.supplied] == list(committed[: question.length])
        if turns == last + 1 and same:
            return question, list(committed[question.length : end])
        return question, self._tokenizer.encode(messages[last]["content"])

    def _question(self, committed: Sequence[int], messages: list[dict[str, Any]]) -> Question:
        ends = (end for end in reversed(self._ends) if self.context or not self._dropped.get(end[0]))
        turns, length = next(end for end in ends if end[0] < len(messages))
        known, dropped = list(committed[:length]), self._dropped.get(turns, 0)
        try:
            whole = known + self._tokenizer.continue_turns(
                known, messages[:turns], messages[turns:], thinking=self.thinking, tools=self.tools
            )
        except HistoryRewrittenError:
            whole, dropped = self._tokenizer.encode_chat(messages, thinking=self.thinking, tools=self.tools), 0
        if self.context and not self._tokenizer.raw and len(whole) > self.context - self.context // 8:
            whole, dropped = self._trimmed(messages, whole)
        if not whole:
            raise MoaError("there is no text to go on with: it is empty", code="empty")
        kept = min(common_length(committed, whole), len(whole) - 1)
        return replace(self.question(messages, whole, kept), dropped=dropped)

    def _trimmed(self, messages: list[dict[str, Any]], whole: list[int]) -> tuple[list[int], int]:
        """Return the tokens of a conversation without its oldest turns, and the number of these. What is left begins
        with a question and takes at most half of the context if the last question allows.

        To drop more than is needed keeps the next questions from being trimmed, too: each time, the target has to read
        all of what is left again.
        """
        first = int(messages[0]["role"] == "system")
        starts = [turn for turn in range(first + 1, len(messages)) if messages[turn]["role"] == "user"]
        if not starts:
            return whole, 0

        def tokens_from(start: int) -> list[int]:
            left = [*messages[:first], *messages[start:]]
            return self._tokenizer.encode_chat(left, thinking=self.thinking, tools=self.tools)

        last, half = len(starts) - 1, self.context // 2
        start = starts[bisect_left(starts, True, hi=last, key=lambda turn: len(tokens_from(turn)) <= half)]
        return tokens_from(start), start - first

    def question(self, messages: list[dict[str, Any]], tokens: Sequence[int], kept: int) -> Question:
        """Return the question at the end of ``messages``, whose tokens are ``tokens``."""
        behind = tuple(tokens[-_CONTEXT:]) if self._tokenizer.raw else ()
        return Question(messages, kept, list(tokens[kept:]), behind)

    def answered(self, question: Question, text: str, length: int) -> None:
        """Add a question and its answer; ``length`` committed tokens hold the conversation up to its end."""
        self._close(question, text)
        self._ends.append((len(self.messages), length))
        self._dropped[len(self.messages)] = question.dropped

    def set_aside(self, question: Question, text: str, sampling: Sampling, most: int, *, kept: bool = False) -> None:
        """Add a question and an answer that the target has not confirmed; ``kept`` if it never has to."""
        self._close(question, text)
        if not kept:
            self.unconfirmed.append(Unconfirmed(len(self.messages) - 1, sampling, most))

    def add(self, turns: Sequence[dict[str, Any]], unconfirmed: Sequence[Unconfirmed]) -> None:
        """Add those of ``turns`` that follow the newest one; ``unconfirmed`` are the marks of all."""
        self.messages = [*self.messages, *turns[len(self.messages) :]]
        self.unconfirmed = list(unconfirmed)

    def _close(self, question: Question, text: str) -> None:
        self.messages = [*question.messages, {"role": "assistant", "content": text}]
        self._ends = [end for end in self._ends if end[1] <= question.kept]
        self.unconfirmed = [mark for mark in self.unconfirmed if mark.turn < len(question.messages)]


def checked_turn(message: Message) -> dict[str, Any]:
    """Return a message as a turn, with the fields that a chat template may use. Raises MoaError for another form."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        text = f'a message must be {{"role": text, "content": text}}, not {dict(message)!r}'
        raise MoaError(text, code="malformed_message")
    more = {name: message[name] for name in _FIELDS.get(role, ()) if message.get(name)}
    _check_part([role, content, more])
    return {"role": role, "content": content, **more}


def is_answer(turns: Sequence[Message], turn: int) -> bool:
    """Whether the turn at an index is the assistant's answer to a question or to the result of a tool."""
    return 0 < turn < len(turns) and turns[turn - 1]["role"] in _ASKING and turns[turn]["role"] == "assistant"


def _check_part(value: Any, depth: int = 0) -> None:
    """Raise MoaError if a part of a message or of a tool is no JSON value, is nested too deeply, or holds half of a
    character."""
    if isinstance(value, str):
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise MoaError("a message must be text, without halves of characters (surrogates)", code="not_unicode")
    elif isinstance(value, list | Mapping) and depth < _DEEPEST:
        for part in value if isinstance(value, list) else [*value, *value.values()]:
            _check_part(part, depth + 1)
    elif not (value is None or isinstance(value, bool | int | float)):
        text = f"tools and their calls are JSON values of at most {_DEEPEST} levels"
        raise MoaError(text, code="malformed_message")


def mark_from_json(data: Any) -> Unconfirmed:
    """Read a mark that ``dataclasses.asdict`` made; raise MoaError if it is malformed."""
    try:
        turn, most = checked_count(data["turn"]), checked_count(data["most"])
    except (KeyError, TypeError, ValueError) as error:
        text = f"an unconfirmed turn must have a turn and a most, whole numbers, not {data!r}"
        raise MoaError(text, code="malformed_mark") from error
    return Unconfirmed(turn, sampling_from_json(data.get("sampling")), most)


def checked_marks(marks: Sequence[Unconfirmed], turns: Sequence[dict[str, Any]]) -> list[Unconfirmed]:
    """Return the marks of ``turns`` in order; raise MoaError if one is not on an answer, or cannot be checked."""
    for mark in marks:
        if not is_answer(turns, mark.turn):
            text = f"an unconfirmed turn must be an answer after its question, and turn {mark.turn} is not"
            raise MoaError(text, code="malformed_mark")
        check_request(mark.most, mark.sampling)
    return sorted({mark.turn: mark for mark in marks}.values(), key=lambda mark: mark.turn)
