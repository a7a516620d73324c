"""OpenAI's Responses: a body is read as that of a chat completion, and the reply is made of that answer's parts."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.replies import Ending, Reply, event, metrics_of, usage_of
from moa_chat.gateway.requests import (
    AnswerRequest,
    Defaults,
    Part,
    Text,
    check_levels,
    invalid,
    kind_of,
    parse_chat,
    prompted,
    read_body,
    short,
)
from moa_chat.gateway.tool_formats.tool_format import CallSplitter, ToolFormat

#: What would have to be kept here. A conversation is sent whole each time.
_KEEPING = ("store", "previous_response_id", "conversation", "background", "prompt")
#: Fields of a chat completion by those of a response, for errors.
_NAMES = {"messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens"}
_SCHEMA_IN = "response_format.json_schema"  # whose fields a text's format has itself
_LOGPROBS = "message.output_text.logprobs"
#: What else OpenAI's ``include`` names; responses here have none of it.
_ABSENT = (
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)
#: Events of an item's text, and how ids of items begin, by kind.
_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXTS = ("input_text", "output_text", "text")
_NO_CACHE = {"cached_tokens": 0, "cache_write_tokens": 0}  # none that is told of
_DEEPEST = 128  # levels of what a response repeats


def _text_of(content: Any, where: str) -> str:
    """Return a text that may come in parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise invalid(f"{where} must be a text or a list of parts, not {kind_of(content)}", "invalid_type")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise invalid(f'{where} may only hold parts of the form {{"type": "input_text", "text": ...}}')
    return "".join(part["text"] for part in parts)


def _messages(items: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat completion for a response's input."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise invalid(f"must be a text or a list of items, not {kind_of(items)}", "invalid_type")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        where = f"[{index}]"
        if not isinstance(item, dict):
            raise invalid(f"{where} must be an object, not {kind_of(item)}", "invalid_type")
        kind = item.get("type", "message")
        if kind == "message":
            message = {"role": item.get("role"), "content": _text_of(item.get("content"), f"{where}.content")}
            if message["role"] == "assistant" and messages and "tool_calls" in messages[-1]:
                messages[-1]["content"] += message["content"]  # text after the calls of the same answer
            else:
                messages.append(message)
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _text_of(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":  # which templates leave out of earlier answers
            raise invalid(f"{where}.type must be message, function_call, function_call_output or reasoning")
    return messages


def _tools(tools: Any) -> Any:
    """Return the tools of a chat completion for those of a response."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and tool.get("type") != "function":
            raise invalid("may only be functions: this endpoint has no tools of its own", "unsupported_parameter")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid("must be a list of objects", "invalid_type")
    return [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in tools]


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and "name" in choice:
        return {"type": choice.get("type"), "function": {"name": choice["name"]}}
    return choice


def _includable(names: list[str]) -> list[str]:
    for name in names:
        if name not in (_LOGPROBS, *_ABSENT):
            raise invalid(f"may name {_LOGPROBS!r}, not {short(name)}")
    return names


class TextOptions(Part):
    """What the answer's text conforms to."""

    format: dict[str, Any] | None = None

    @property
    def response_format(self) -> dict[str, Any] | None:
        """The field of a chat completion that says the same."""
        if self.format is None or self.format.get("type") != "json_schema":
            return self.format
        return {"type": "json_schema", "json_schema": {k: v for k, v in self.format.items() if k != "type"}}


class ResponseBody(Part):
    """The body of a request for a response; fields that are not named here are those of a chat completion."""

    model_config = ConfigDict(extra="allow")

    input: Annotated[list[dict[str, Any]], BeforeValidator(_messages)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions = TextOptions()
    tools: Annotated[list[dict[str, Any]], BeforeValidator(_tools)] = Field([])
    tool_choice: Annotated[Any, BeforeValidator(_choice)] = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[Text], AfterValidator(_includable)] = Field([])
    top_logprobs: int | None = None
    metadata: dict[str, str] = Field({})
    store: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None

    @field_validator("text", "tools", "tool_choice", "metadata", mode="before")
    @classmethod
    def _repeatable(cls, value: Any) -> Any:
        """Return what the response repeats, unless no reply can."""
        check_levels(value, _DEEPEST)
        return value

    @field_validator(*_KEEPING)
    @classmethod
    def _nothing_kept(cls, value: Any, info: ValidationInfo) -> Any:
        if value:
            text = f"{info.field_name}: responses are not kept here: leave it out, and send the whole conversation"
            raise ApiError(400, text, param=info.field_name, code="unsupported_parameter")
        return value

    def as_chat(self) -> dict[str, Any]:
        """Return the body of a chat completion that asks for the same."""
        messages = list(self.input)
        if self.instructions is not None:
            first = messages[0] if messages and messages[0]["role"] in ("system", "developer") else None
            text = self.instructions if first is None else f"{self.instructions}\n\n{first['content']}"
            messages[: first is not None] = [{"role": "system", "content": text}]
        own = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.response_format,
            "tools": self.tools or None,
            "tool_choice": self.tool_choice,
        }
        if _LOGPROBS in self.include or self.top_logprobs:
            own |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return {**(self.model_extra or {}), **own, "n": None}

    def about(self, chat: Mapping[str, Any], asked: AnswerRequest) -> dict[str, Any]:
        """Return the fields of the response that repeat the request."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": chat.get("parallel_tool_calls", True),
            "temperature": asked.sampling.temperature,
            "text": {"format": self.text.format or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": [{"type": "function", **tool["function"]} for tool in self.tools],
            "top_p": asked.sampling.top_p,
            "truncation": "auto" if asked.overflow == "trim" else "disabled",
        }


def parse_response(
    data: bytes, defaults: Defaults, tool_format: Callable[[], ToolFormat] = prompted
) -> tuple[AnswerRequest, dict[str, Any]]:
    """Read the body of a request for a response; see :func:`~moa_chat.gateway.requests.parse_chat`.

    Returns:
        the request, and the fields of the response that repeat it.
    """
    body = read_body(ResponseBody, data, defaults)
    chat = body.as_chat()
    try:
        asked = parse_chat(json.dumps(chat).encode(), defaults, tool_format)
    except ApiError as error:
        name = re.split(r"[.\[]", error.param or "")[0]
        if (own := _NAMES.get(name)) is None:
            raise
        text = str(error).replace(_SCHEMA_IN, own).replace(name, own)
        text = text if own in text else f"{own}: {text}"
        inside = str(error.param).replace(_SCHEMA_IN, name).removeprefix(name) if name == "response_format" else ""
        raise ApiError(error.status, text, param=own + inside, code=error.code) from error
    constrained_in = _NAMES.get(asked.constrained_in or "", asked.constrained_in)
    schemas = {
        name.replace(_SCHEMA_IN, "text.format").replace("].function", "]"): schema
        for name, schema in asked.schemas.items()
    }
    asked = replace(asked, asked_in="input", constrained_in=constrained_in, schemas=schemas)
    if body.truncation is not None:
        asked = replace(asked, overflow="trim" if body.truncation == "auto" else "error")
    return asked, body.about(chat, asked)


class ResponseReply(Reply):
    """The objects of a response; its answer is cut into items, one after the other: reasoning, a message, calls.

    Args:
        about: fields that repeat the request.
    """

    id_begins, whole_object = "resp_", "response"

    def __init__(
        self,
        model: str,
        about: dict[str, Any],
        *,
        begun: bool = False,
        calls: Callable[[], CallSplitter] | None = None,
    ) -> None:
        super().__init__(model, 1, begun=begun, calls=calls)
        self._about |= {"object": self.whole_object, "created_at": self._about.pop("created"), **about}
        self._output: list[dict[str, Any]] = []  # the last item may be open
        self._open = False
        self._events = 0

    def whole(self, texts: Sequence[str], endings: Sequence[Ending]) -> dict[str, Any]:
        for _ in self._last(texts[0], endings[0]):
            pass
        return self._response(endings[0])

    def first_chunks(self) -> str:
        begun = self._response()
        return self._told("response.created", response=begun) + self._told("response.in_progress", response=begun)

    def chunk(self, index: int, text: str) -> str:
        return "".join(self._changes(text))

    def last_chunk(self, index: int, ending: Ending) -> str:
        rest = "".join(self._last("", ending))
        response = self._response(ending)
        return rest + self._told(f"response.{response['status']}", response=response)

    def end(self, endings: Sequence[Ending], *, include_usage: bool) -> str:
        return ""

    def failure(self, error: ApiError) -> str:
        told = {"code": error.code, "message": str(error)}
        response = {**self._response(), "status": "failed", "error": told}
        return self._told("error", **told, param=error.param) + self._told("response.failed", response=response)

    # -- items ------------------------------------------------------------------------------------

    def _last(self, text: str, ending: Ending) -> Iterator[str]:
        """Add the end of the answer; yield the events of that. A response has one item at least."""
        yield from self._changes(text, final=True)
        if not self._output:
            yield from self._begin("message")
        yield from self._close("completed" if ending.reason == "stop" else "incomplete")

    def _changes(self, text: str, *, final: bool = False) -> Iterator[str]:
        """Add text to the items; yield the events of that."""
        delta = self.delta(0, text, final=final).get("delta", {})
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            if piece := delta.get(name):
                yield from self._begin(kind)
                self._part["text"] += piece
                more = {"logprobs": self._logprobs()} if kind == "message" else {}
                yield self._told_of(f"{_EVENTS[kind]}.delta", content_index=0, delta=piece, **more)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._begin("function_call", call_id=call["id"], name=function["name"], arguments="")
            if piece := function["arguments"]:
                self._output[-1]["arguments"] += piece
                yield self._told_of("response.function_call_arguments.delta", delta=piece)

    @property
    def _part(self) -> dict[str, Any]:
        """The content of the last item."""
        part: dict[str, Any] = self._output[-1]["content"][0]
        return part

    def _begin(self, kind: str, **fields: Any) -> Iterator[str]:
        """Open an item, unless it is open; yield the events of that."""
        if self._open and kind == self._output[-1]["type"] != "function_call":
            return
        yield from self._close("completed")
        if kind == "message":
            fields = {"role": "assistant"}
        elif kind == "reasoning":
            fields = {"summary": []}
        item = {"type": kind, "id": f"{_IDS[kind]}_{secrets.token_hex(12)}", "status": "in_progress", **fields}
        self._output.append(item)
        self._open = True
        empty = {} if kind == "function_call" else {"content": []}
        yield self._told("response.output_item.added", output_index=len(self._output) - 1, item={**item, **empty})
        if kind != "function_call":
            more = {"annotations": [], "logprobs": []} if kind == "message" else {}
            item["content"] = [{"type": _EVENTS[kind].partition(".")[2], "text": "", **more}]
            yield self._told_of("response.content_part.added", content_index=0, part=self._part)

    def _close(self, status: str) -> Iterator[str]:
        """Close the open item, if there is one; yield the events of that."""
        if not self._open:
            return
        item, self._open = self._output[-1], False
        item["status"], kind = status, item["type"]
        if kind == "function_call":
            arguments = {"arguments": item["arguments"], "name": item["name"]}
            yield self._told_of("response.function_call_arguments.done", **arguments)
        else:
            more = {}
            if kind == "message":
                self._logprobs()  # of tokens without text
                more = {"logprobs": self._part["logprobs"]}
            yield self._told_of(f"{_EVENTS[kind]}.done", content_index=0, text=self._part["text"], **more)
            yield self._told_of("response.content_part.done", content_index=0, part=self._part)
        yield self._told("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _logprobs(self) -> list[dict[str, Any]]:
        """Move the scores that no event has told into the open message; return them."""
        scores, self._scores[0] = [token.as_dict() for token in self._scores[0]], []
        self._part["logprobs"] += scores
        return scores

    def _told_of(self, kind: str, **fields: Any) -> str:
        """Return an event about the last item."""
        return self._told(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _told(self, kind: str, **fields: Any) -> str:
        """Return a server-sent event."""
        data = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: {kind}\n{event(data)}"

    def _response(self, ending: Ending | None = None) -> dict[str, Any]:
        """Return the response as it is now; ``ending`` says how it ended."""
        status, details, figures = "in_progress", None, {"usage": None}
        if ending is not None:
            usage = usage_of([ending])
            written = {
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
            }
            read = {"input_tokens": usage["prompt_tokens"], "input_tokens_details": _NO_CACHE}
            own = {**read, **written, "total_tokens": usage["total_tokens"], "moa": usage["moa"]}
            status, figures = "completed", {"usage": own, "metrics": metrics_of([ending])}
            if ending.reason != "stop":
                status, details = "incomplete", {"reason": "max_output_tokens"}
        kept = {"previous_response_id": None, "store": False}
        response = {**self._about, **kept, "status": status, "error": None, "incomplete_details": details}
        return {**response, "output": self._output, **figures}
