"""The base of the formats, and the split of an answer into its text and its calls."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.tool_formats.json_calls import Call, escaped, read_calls
from moa_runtime.chat_template import Message
from moa_runtime.grammar.after_reasoning import reasoning_rules
from moa_runtime.grammar.matcher import spaced_schema
from moa_runtime.reasoning import Thought
from moa_runtime.tokens import open_length

#: A text in JSON, perhaps without its end.
_QUOTED = r'"(?:[^"\\]+|\\.)*(?:"|\\?\Z)'


@dataclass(frozen=True)
class FunctionTool:
    """A function that the target may call.

    Attributes:
        parameters: JSON schema of its arguments.
        strict: whether calls must conform to it, if the target may choose not to call.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


class Parsed(NamedTuple):
    """An answer in its two parts."""

    content: str
    calls: list[Call]


class ToolFormat:
    """How a target writes calls: JSON objects after a mark.

    Args:
        source: the chat template.
        special: ids of those marks that are special tokens of the tokenizer, those of reasoning among them.
        thought: see :meth:`moa_runtime.tokenizer.ChatTokenizer.thought`.

    Attributes:
        marks: texts that begin and end calls. If they are special tokens, they stay visible in an answer.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    opening: str = ""  # before a call, or before a list of calls
    closing: str = ""  # after it
    listed: bool = False  # whether one mark begins a list of calls
    other_openings: ClassVar[tuple[str, ...]] = ()  # that are read, too
    quoted: ClassVar[bool] = True  # whether arguments are JSON, in whose texts a mark is none
    single: ClassVar[bool] = False  # whether the target was trained to write one call at a time
    between: str = ""  # two calls
    arguments: ClassVar[str] = "arguments"  # their name in an object
    tail: ClassVar[str] = "TEXT"  # grammar of an answer that is no call

    def __init__(
        self, source: str, special: Mapping[str, int], thought: Callable[[bool | None], Thought] = lambda thinking: ""
    ) -> None:
        self._special, self.thought = special, thought

    @classmethod
    def known_by(cls, source: str) -> bool:
        """Return whether a chat template has its target write calls in this format."""
        return bool(cls.marks) and cls.marks[0] in source

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens that must stay visible in an answer."""
        return frozenset(token for mark, token in self._special.items() if mark in self.marks)

    # -- prompts ----------------------------------------------------------------------------------

    def turns(self, turns: list[dict[str, Any]], tools: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the conversation as the chat template takes it, with the calls and results in it."""
        return turns

    def templated(self, tools: Sequence[Message]) -> Sequence[Message] | None:
        """Return the tools as the chat template takes them."""
        return tools

    def call_id(self) -> str:
        """Return a new id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def write(self, calls: Sequence[Message]) -> str:
        """Return calls of a turn as the target would write them."""
        named = [{"name": each["function"]["name"], self.arguments: each["function"]["arguments"]} for each in calls]
        return self.between.join(
            f"{self.opening}\n{json.dumps(each, ensure_ascii=False)}\n{self.closing}" for each in named
        )

    # -- answers ----------------------------------------------------------------------------------

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], *, final: bool) -> Parsed:
        """Split an answer into its text and its calls.

        Args:
            schemas: of the tools' arguments, by the tools' names.
            final: whether the answer is whole. If not, more of it only adds to what is returned.
        """
        marks = [mark for mark in (self.opening, *self.other_openings) if mark]
        ends = [*marks, self.closing] if self.closing else marks
        calls: list[Call] = []
        content, opened, at = "", "", 0
        while True:
            begin, end = self._next_mark(text, at, ends if opened else marks, quoted=bool(opened) and self.quoted)
            part, mark = text[at:begin], text[begin:end]
            if opened:
                whole = bool(mark) or final
                inside = part if whole else part[: len(part) - open_length(part, ends)]
                found, rest = self._calls(inside, schemas, final=whole)
                calls += found
                closed = mark if mark == self.closing else ""
                part = f"{opened}{inside}{closed}" if rest and not found else ""
            content += part
            if not mark:
                break
            opened, at = "" if mark == self.closing else mark, end
        if not final:
            content = content[: len(content) - open_length(content, marks)]
        return Parsed(content if final and not calls else content.rstrip(), calls)

    @staticmethod
    def _next_mark(text: str, at: int, marks: Sequence[str], *, quoted: bool) -> tuple[int, int]:
        """Return the first and the last offset of the next mark, the length of the text if there is none; ``quoted``:
        outside of the texts in JSON."""
        either = "|".join(map(re.escape, marks))
        found = re.compile(either).search(text, at)
        if quoted and found and (begin := text.find("{", at, found.start())) >= 0:
            begins = "".join(re.escape(mark[0]) for mark in marks)
            between = re.compile(f'(?:{_QUOTED}|[^"{begins}]+|(?!{either})[{begins}])*', re.DOTALL)
            at = between.match(text, begin).end()  # type: ignore[union-attr]  # it takes any text
            found = re.compile(either).match(text, at)
        return found.span() if found else (len(text), len(text))

    def _calls(self, text: str, schemas: Mapping[str, Mapping[str, Any]], *, final: bool) -> tuple[list[Call], str]:
        """Read calls between the marks, see :func:`read_calls`."""
        return read_calls(text, final=final)

    # -- grammars ---------------------------------------------------------------------------------

    def grammar(
        self,
        tools: Sequence[FunctionTool],
        *,
        required: bool,
        parallel: bool,
        otherwise: Mapping[str, Any] | None = None,
        thought: Thought = "",
    ) -> str:
        """Return llguidance's Lark grammar of an answer.

        Args:
            required: whether it is a call, and every schema binds; else it may be a text, and strict schemas bind.
            parallel: whether it may have several calls.
            otherwise: JSON schema of an answer that is no call.
            thought: whether answers have reasoning.
        """
        free = not required and otherwise is None
        one = " | ".join(f"call_{index}" for index in range(len(tools)))
        lines = [f"call: {one}", "TEXT: /(.|\\n)*/", *self._head(free, otherwise is None)]
        for index, tool in enumerate(tools):
            schema = tool.parameters if required or tool.strict else {"type": "object"}
            lines.append(f"call_{index}: {self._call(tool.name, schema)}")
        more = parallel and not self.single
        if self.listed:
            calls = f'head "[" call ("{self.between}" call)* "]"' if more else 'head "[" call "]"'
        else:
            calls = f"head call ({self._text(self.between)} head call)*" if more else "head call"
        if required:
            start = calls
        elif otherwise is not None:
            lines.append(f"other: %json {spaced_schema(otherwise)}")
            start = f"{calls} | other"
        else:
            lines.append(f"tail: {self.tail}")
            start = "(head call)* tail" if more and not self.listed else f"{calls} | tail"
        start, rules = reasoning_rules(start, "" if free else thought, self._special)
        return "\n".join(["%llguidance {}", f"start: {start}", *lines, *rules])

    def _head(self, free: bool, exclusive: bool) -> list[str]:
        """Return the rule of what comes before a call; ``free``: with text before; ``exclusive``: an answer that is no
        call is no JSON."""
        if not free:
            return [f"head: {self._mark(self.opening)}"]
        marks = [mark for mark in (self.opening, *self.other_openings) if mark not in self._special]
        special = [f"TEXT {self._mark(mark)}" for mark in (self.opening, *self.other_openings) if mark in self._special]
        rules = [f"spelled[lazy]: TEXT ({' | '.join(map(json.dumps, marks))})"] if marks else []
        return [f"head: {' | '.join([*special, *(['spelled'] if marks else [])])}", *rules]

    def _call(self, name: str, schema: Mapping[str, Any]) -> str:
        """Return the rule of a call after the opening mark."""
        begins = json.dumps(f'{{"name": {json.dumps(name)}, "{self.arguments}": ')
        return f'{begins} %json {spaced_schema(schema)} "}}"'

    @classmethod
    def _properties(cls, schema: Mapping[str, Any], name: str) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
        """Return the schemas of an object's properties, and those that it must have. Raises ApiError for others."""
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if isinstance(properties, dict) and isinstance(required, list):
            known = {key: {} if part is True else part for key, part in properties.items()}
            if all(isinstance(part, Mapping) for part in known.values()) and all(
                key in known for key in map(str, required)
            ):
                return known, required
        raise cls._unsupported(name)

    @staticmethod
    def _unsupported(name: str) -> ApiError:
        """Return the error for a schema of the tool ``name`` that has no grammar in this format."""
        raise NotImplementedError

    def _mark(self, mark: str) -> str:
        """Return a mark as a grammar has it."""
        return f"<[{self._special[mark]}]>" if mark in self._special else json.dumps(mark)

    @staticmethod
    def _text(text: str) -> str:
        return json.dumps(text) if text else ""


class CallSplitter:
    """Splits an answer that comes piece by piece into text and OpenAI's ``tool_calls``.

    Args:
        schemas: of the tools' arguments, by the tools' names.
        parallel: whether several calls are wanted; else those after the first are left out.
    """

    def __init__(self, form: ToolFormat, schemas: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> None:
        self._form, self._schemas, self._parallel = form, schemas, parallel
        self._text, self._content, self._arguments = "", 0, list[int]()
        self.called = False

    def feed(self, text: str, *, final: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Add text; return what is certain now and was not returned before: text, and changes of ``tool_calls``."""
        self._text += text
        content, calls = self._form.read(self._text, self._schemas, final=final)
        piece, self._content = content[self._content :], max(self._content, len(content))
        changes = []
        for index, call in enumerate(calls if self._parallel else calls[:1]):
            name, arguments = map(escaped, call)
            if index == len(self._arguments):
                self._arguments.append(0)
                own = {"id": self._form.call_id(), "type": "function"}
                changes.append({"index": index, **own, "function": {"name": name, "arguments": ""}})
            if more := arguments[self._arguments[index] :]:
                self._arguments[index] += len(more)
                changes.append({"index": index, "function": {"arguments": more}})
        self.called = bool(self._arguments)
        return piece, changes

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Split a whole answer into its text and its ``tool_calls``."""
        content, changes = self.feed(text, final=True)
        calls: list[dict[str, Any]] = []
        for change in changes:
            if "id" in change:
                calls.append({name: change[name] for name in ("id", "type", "function")})
            else:
                calls[change["index"]]["function"]["arguments"] += change["function"]["arguments"]
        return content, calls
