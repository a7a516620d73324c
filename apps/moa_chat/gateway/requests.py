"""The bodies of requests: OpenAI's chat completions and completions, validated by pydantic."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from moa_chat.gateway.errors import ApiError, as_api_error, unsupported
from moa_chat.gateway.schema_references import reference_problem
from moa_chat.gateway.tool_formats.prompted import PromptedFormat
from moa_chat.gateway.tool_formats.tool_format import CallSplitter, FunctionTool, ToolFormat
from moa_chat.history.chat_settings import sampling_for
from moa_runtime.chat_template import Tool
from moa_runtime.errors import MoaError, json_problem
from moa_runtime.options import OFFLINES, Offline, Overflow
from moa_runtime.session.events import MOST_BIASED, MOST_LOGPROBS, Grammar, Sampling

#: Fields that would change the answer and that a verifier does not support, by the values that are accepted.
_UNSUPPORTED: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((), "guided_choice structured_outputs audio"),
    ((1,), "typical_p repeat_penalty"),
    ((False,), "ignore_eos echo"),
    (("",), "grammar suffix"),
    (([],), "stop_token_ids functions"),
    (({},), "json_schema"),
    (("none", "auto"), "function_call"),
    ((["text"],), "modalities"),
)
_MOST_CHOICES = 8
_MOST_STOPS = 4
_MOST_TOOLS = 128
_NAME = re.compile("[a-zA-Z0-9_.-]{1,64}")
#: Keywords of a schema that has no property, unless the first two name some. A target would fill such an object with
#: anything, up to the longest answer.
_SAY_NO_PROPERTY = {"properties", "required", "type", "title", "description", "$schema", "$defs", "x-guidance"}
_DEEPEST = 32  # levels of a tool's schema, and of a call's arguments
_SEEDS = 1 << 64
_MOST = (1 << 32) - 1  # the largest ``top_k`` and ``min_tokens``
#: Texts of more characters for each token of the context are not even counted in tokens: that takes its time.
_MOST_PER_TOKEN = 32
_SHOWN = 80  # characters of a wrong value in a sentence
#: Kinds of JSON values in words, by their types and by pydantic's names of them.
_KINDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
_KINDS |= {dict: "an object", list: "a list", type(None): "null"}
_EXPECTED = {"string": str, "bool": bool, "int": int, "float": float, "dict": dict, "model": dict, "list": list}
#: The codes and sentences of pydantic's errors, in which the field's name comes first.
_BOUNDS = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "greater_than": "must be above {gt}",
    "finite_number": "must be finite",
}
#: Fields that say what an answer conforms to; a request has one of them.
_GRAMMARS = ("response_format", "guided_json", "guided_regex", "guided_grammar")


@dataclass(frozen=True)
class Defaults:
    """Values of fields that a request leaves out, from the command line. ``seed`` None draws one for each answer."""

    model: str
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    system: str | None
    offline: Offline = "off"
    max_context: int = 1 << 20
    vocab_size: int = 1 << 32
    thinking: bool | None = None  # whether the target reasons; None for its template's default
    overflow: Overflow = "error"  # what happens to a conversation that outgrows the context


@dataclass(frozen=True)
class AnswerRequest:
    """A request that can be answered."""

    history: list[dict[str, Any]]  # the turns before the question; none before a raw text
    question: str | dict[str, Any]  # the user's message, the result of a tool, or the raw text that is to be continued
    sampling: Sampling
    max_new_tokens: int
    stops: tuple[str, ...]
    count: int  # how many answers
    stream: bool
    include_usage: bool  # whether a stream ends with its figures
    offline: Offline  # what writes while there is no verifier; ``off``: nothing, the request waits or fails
    raw: bool  # whether the question is a text without chat template
    thinking: bool | None = None  # see :class:`Defaults`
    overflow: Overflow = "error"  # likewise
    tools: Sequence[Tool] | None = None  # for the chat template
    calls: ToolFormat | None = None  # in which the target writes calls; None if it may call nothing
    callable: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # schemas of the tools by their names
    parallel: bool = True  # whether an answer may have several calls
    constrained_in: str | None = None  # the field that a grammar comes from
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the grammar, by their fields
    asked_in: str = "messages"  # the field that holds what is asked

    def call_splitter(self) -> CallSplitter:
        """Return what reads the calls in one answer."""
        assert self.calls is not None
        return CallSplitter(self.calls, self.callable, parallel=self.parallel)

    @property
    def shown_tokens(self) -> frozenset[int]:
        """Special tokens that stay visible in the answer."""
        return self.calls.shown if self.calls else frozenset()

    def refusal(self, error: MoaError) -> ApiError:
        """Convert an error of the answer; one of its grammar names the schema that is at fault, if that is known."""
        found = as_api_error(error, self.asked_in, self.constrained_in)
        if found.code != "invalid_value" or found.param != self.constrained_in or error.code == "unsupported_grammar":
            return found
        problems = ((name, reference_problem(schema)) for name, schema in self.schemas.items())
        if (fault := next((each for each in problems if each[1]), None)) is not None:
            return ApiError(400, f"{fault[0]}: {fault[1]}", param=fault[0], code=found.code)
        if self.constrained_in == "tools" and len(self.schemas) == 1:
            [name] = self.schemas
            return ApiError(400, name + str(found).removeprefix("tools"), param=name, code=found.code)
        if self.constrained_in == "guided_grammar" and "::=" in (self.sampling.grammar or Grammar("lark")).text:
            text = f"{found}; rules of llguidance's Lark are written `name: ...`, not `name ::= ...`"
            return ApiError(400, text, param=found.param, code=found.code)
        return found

    def sampling_of(self, index: int) -> Sampling:
        """Return the sampling of the answer at ``index``: the seeds of a request's answers are consecutive."""
        return replace(self.sampling, seed=(self.sampling.seed + index) % _SEEDS)


# -- what fields may hold -------------------------------------------------------------------------------------


def invalid(text: str, code: str = "invalid_value") -> PydanticCustomError:
    """Return the error of a field; ``text`` follows the field's name."""
    return PydanticCustomError(code, "{text}", {"text": text})  # type: ignore[arg-type]


def whole_text(text: str) -> str:
    """Return a text, unless it holds half of a character, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid("holds half of a surrogate pair") from error
    return text


def _content(content: Any) -> str:
    """Return the text of a message, which may come in parts."""
    if isinstance(content, str):
        return whole_text(content)
    if content is None:
        raise invalid("is missing", "missing_required_parameter")
    if not isinstance(content, list):
        raise invalid(f"must be a text or a list of parts, not {kind_of(content)}", "invalid_type")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid('may only hold parts of the form {"type": "text", "text": ...}')
    return whole_text("".join(part["text"] for part in content))


def _one_text(prompt: Any) -> str:
    texts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(texts, list):
        raise invalid(f"must be a text or a list, not {kind_of(prompt)}", "invalid_type")
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise invalid("must be a text, or a list of one: token ids, or several texts, are not understood here")
    if not texts[0]:
        raise invalid("is empty: the text that the target is to continue", "missing_required_parameter")
    return whole_text(texts[0])


def _stop_texts(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list):
        raise invalid(f"must be a text or a list, not {kind_of(stop)}", "invalid_type")
    if len(stops) > _MOST_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise invalid(f"must be a text or up to {_MOST_STOPS} of them, none empty")
    return [whole_text(text) for text in stops]


def _schema_text(schema: Any) -> str:
    if isinstance(schema, dict):
        return json.dumps(schema)
    if not isinstance(schema, str):
        raise invalid(f"must be an object or a text, not {kind_of(schema)}", "invalid_type")
    return whole_text(schema)


def _offline(asked: str) -> Offline:
    for known in OFFLINES:
        if asked == known:
            return known
    raise invalid(f"must be one of {', '.join(OFFLINES)}, not {short(asked)}")


def _biases(given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Return biases by tokens, which JSON names as texts."""
    if len(given) > MOST_BIASED:
        raise invalid(f"may have {MOST_BIASED} tokens, not {len(given)}", "out_of_range")
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10 and int(token) < info.context.vocab_size):
            raise invalid(f"has {short(token)}, which is no id of a token")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise invalid(f"must give token {token} a number between -100 and 100", "out_of_range")
    return given


def _function_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise invalid(f"must be 1 to 64 letters, digits, '_', '-' or '.', not {short(name)}")
    return name


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments."""
    if (kind := schema.get("type", "object")) != "object":
        raise invalid(f"must be a schema of the type 'object', not {short(kind)}")
    check_levels(schema)
    return {"type": "object", **schema} if schema else schema


def check_levels(value: Any, deepest: int = _DEEPEST) -> None:
    """Raise an error for what is nested too deeply, holds half of a character, or a number that JSON does not have."""
    parts = [value]
    for level in range(deepest + 1):
        for part in parts:
            if isinstance(part, str):
                whole_text(part)
            elif isinstance(part, float) and not math.isfinite(part):
                raise invalid(f"holds {part}, which is no number in JSON")
        inside = [part for part in parts if isinstance(part, dict | list)]
        if inside and level == deepest:
            raise invalid(f"is nested more than {deepest} levels deep")
        parts = [each for part in inside for each in (chain(part, part.values()) if isinstance(part, dict) else part)]


def _choice(choice: Any) -> tuple[str, str]:
    """Return one of OpenAI's ``tool_choice``, and the name of a tool that is chosen by name."""
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return choice, ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        text = 'must be auto, none, required or {"type": "function", "function": {"name": ...}}, not '
        raise invalid(text + short(choice))
    return "named", function["name"]


Text = Annotated[str, AfterValidator(whole_text)]
Logprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
Name = Annotated[str, AfterValidator(_function_name)]


class Part(BaseModel):
    """An object in a request. Numbers and texts are not converted into each other; unknown fields are ignored, and one
    that is null is as one left out."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        given = fields.items() if isinstance(fields, dict) else ()
        return {name: value for name, value in given if value is not None} if given else fields


class StreamOptions(Part):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False


class TemplateOptions(Part):
    """vLLM's ``chat_template_kwargs``, as far as they are known."""

    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool | None = None


class JsonSchema(Part):
    """The ``json_schema`` of a response format."""

    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Part):
    """OpenAI's ``response_format``."""

    type: Any = None
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type is None:
            raise invalid(".type is missing", "missing_required_parameter")
        if self.type not in ("text", "json_object", "json_schema"):
            raise invalid(f".type must be text, json_object or json_schema, not {short(self.type)}")
        if self.type == "json_schema" and self.answer_schema is None:
            raise invalid(".json_schema.schema is missing", "missing_required_parameter")
        return self

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None if it is text."""
        schema = self.json_schema.json_schema if self.json_schema else None
        return {"json_schema": schema, "json_object": {"type": "object"}}.get(self.type)

    @property
    def grammar(self) -> Grammar | None:
        """What the answer conforms to."""
        if self.type == "json_schema":
            return Grammar("json_schema", json.dumps(self.answer_schema))
        return Grammar("json_object") if self.type == "json_object" else None


class FunctionDefinition(Part):
    """A function that the target may call."""

    name: Name
    description: Text = ""
    parameters: Annotated[dict[str, Any], AfterValidator(_schema)] = {}
    strict: bool = False


class ToolDefinition(Part):
    """One of OpenAI's ``tools``."""

    type: Literal["function"]
    function: FunctionDefinition

    def described(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        own = self.function
        parameters = own.parameters or {"type": "object", "properties": {}}
        function = {"name": own.name, "description": own.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def tool(self) -> FunctionTool:
        """Return the tool as grammars take it; without a schema it has no arguments."""
        parameters = self.function.parameters
        named = parameters.get("properties") or parameters.get("required")
        if not named and parameters.keys() <= _SAY_NO_PROPERTY:
            parameters = {**parameters, "type": "object", "properties": {}, "additionalProperties": False}
        return FunctionTool(self.function.name, parameters, self.function.strict)


class FunctionCall(Part):
    """The function of a call."""

    name: Text
    arguments: Text = "{}"

    def parsed(self) -> Any:
        """Return the arguments as chat templates take them: an object, or the text of something else."""
        try:
            arguments = json.loads(self.arguments)
            check_levels(arguments)
        except (ValueError, RecursionError):
            return self.arguments
        return arguments if isinstance(arguments, dict) else self.arguments


class ToolCall(Part):
    """A call in an earlier answer."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall

    def turn(self) -> dict[str, Any]:
        """Return the call as the runtime has it."""
        function = {"name": self.function.name, "arguments": self.function.parsed()}
        return {"id": self.id, "type": "function", "function": function}


class Message(Part):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], FailFast(), Field(max_length=_MOST_TOOLS)] = []
    tool_call_id: Text = ""
    content: str = Field(None, validate_default=True)  # type: ignore[assignment]

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any, info: ValidationInfo) -> str:
        return "" if content is None and info.data.get("tool_calls") else _content(content)

    def turn(self, names: dict[str, str]) -> dict[str, Any]:
        """Return the message as the runtime has it; ``names`` are those of the functions that were called."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.role == "assistant" and self.tool_calls:
            turn["tool_calls"] = [call.turn() for call in self.tool_calls]
        if self.role == "tool":
            turn |= {"tool_call_id": self.tool_call_id, "name": names[self.tool_call_id]}
        return turn


# -- bodies ---------------------------------------------------------------------------------------------------


class CompletionBody(Part):
    """What the bodies of chat completions and completions have in common.

    The validation context is the :class:`Defaults`.
    """

    asked_in: ClassVar[str]  # the field that holds what is asked

    model: str | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # the older name, which most clients still send
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MOST)] = -1  # vLLM's for all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] = 0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1
    logit_bias: Annotated[dict[str, Any], AfterValidator(_biases)] = {}
    min_tokens: Annotated[int, Field(ge=0, le=_MOST)] = 0
    response_format: ResponseFormat | None = None
    guided_json: Annotated[str, BeforeValidator(_schema_text)] | None = None
    guided_regex: Text | None = None
    guided_grammar: Text | None = None
    stop: Annotated[list[str], BeforeValidator(_stop_texts)] = []
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] = 1
    best_of: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    offline: Annotated[str, AfterValidator(_offline)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, fields: Any) -> Any:
        for accepted, names in _UNSUPPORTED:
            for name in names.split():
                value = fields.get(name) if isinstance(fields, dict) else None
                if value is not None and not any(_same(value, one) for one in accepted):
                    raise unsupported(name)
        return fields

    @field_validator("model")
    @classmethod
    def _served(cls, name: str, info: ValidationInfo) -> str:
        if name != info.context.model:
            raise no_model(name, info.context)
        return name

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> CompletionBody:
        if self.min_tokens > (most := self.most_tokens(info.context)):
            text = f"min_tokens must be at most {most}, not {self.min_tokens}"
            raise ApiError(400, text, param="min_tokens", code="out_of_range")
        if self.best_of not in (None, self.n):  # as many as n means all of them
            raise unsupported("best_of")
        if len(asked := self.given_grammars) > 1:
            text = f"{asked[0]} and {asked[1]} exclude each other"
            raise ApiError(400, text, param=asked[1], code="invalid_value")
        return self

    def most_tokens(self, defaults: Defaults) -> int:
        """Return the most tokens of an answer."""
        return self.max_completion_tokens or self.max_tokens or defaults.max_new_tokens

    @property
    def given_grammars(self) -> list[str]:
        """The fields that say what the answer conforms to."""
        return [name for name in _GRAMMARS if getattr(self, name) is not None]

    @property
    def grammar(self) -> Grammar | None:
        """What the answer conforms to, as OpenAI or vLLM names it."""
        if self.guided_json is not None:
            return Grammar("json_schema", self.guided_json)
        if self.guided_regex is not None:
            return Grammar("regex", self.guided_regex)
        if self.guided_grammar is not None:
            return Grammar("lark", self.guided_grammar)
        return self.response_format.grammar if self.response_format else None

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schemas of the answer's grammar by their fields, unless they are texts."""
        schema = self.response_format.answer_schema if self.response_format else None
        return {} if schema is None else {"response_format.json_schema.schema": schema}

    @property
    def logprobs_wanted(self) -> int | None:
        """See :attr:`moa_runtime.session.events.Sampling.logprobs`."""
        raise NotImplementedError

    def sampling(self, defaults: Defaults) -> Sampling:
        """Return how the target chooses tokens."""
        temperature = defaults.temperature if self.temperature is None else self.temperature
        top_p = defaults.top_p if self.top_p is None else self.top_p
        seed = defaults.seed if self.seed is None else self.seed
        return replace(
            # OpenAI's seeds may be negative; the verifier's have 64 bits.
            sampling_for(temperature, top_p, None if seed is None else seed % _SEEDS),
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(sorted({int(token): float(bias) for token, bias in self.logit_bias.items()}.items())),
            min_tokens=self.min_tokens,
            grammar=self.grammar,
            logprobs=self.logprobs_wanted,
        )

    def request(self, defaults: Defaults, **asked: Any) -> AnswerRequest:
        """Return the request, with the fields that are not common."""
        sampling = self.sampling(defaults)
        return AnswerRequest(
            sampling=sampling,
            max_new_tokens=self.most_tokens(defaults),
            stops=tuple(self.stop),
            count=self.n,
            stream=self.stream,
            include_usage=self.stream_options.include_usage,
            offline=self.offline or defaults.offline,
            overflow=defaults.overflow,
            constrained_in=self.given_grammars[0] if sampling.grammar else None,
            schemas=self.schemas,
            **asked,
        )


class ChatBody(CompletionBody):
    """The body of a chat completion."""

    messages: Annotated[list[Message], FailFast()]
    tools: Annotated[list[ToolDefinition], FailFast(), Field(max_length=_MOST_TOOLS)] = []
    tool_choice: Annotated[tuple[str, str], BeforeValidator(_choice)] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    logprobs: bool = False
    top_logprobs: Logprobs = 0

    @property
    def logprobs_wanted(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            text = "top_logprobs are for answers with logprobs: set it to true"
            raise ApiError(400, text, param="top_logprobs", code="invalid_value")
        return self.top_logprobs if self.logprobs else None

    @field_validator("messages", mode="before")
    @classmethod
    def _some(cls, messages: Any, info: ValidationInfo) -> Any:
        if messages == []:
            raise invalid("is empty: the turns so far, the last one the user's", "missing_required_parameter")
        if isinstance(messages, list) and len(messages) > info.context.max_context:
            text = f"are {len(messages)}; the target's context holds {info.context.max_context} tokens"
            raise invalid(text, "context_length_exceeded")
        return messages

    @field_validator("messages")
    @classmethod
    def _answerable(cls, messages: list[Message], info: ValidationInfo) -> list[Message]:
        if messages[-1].role not in ("user", "tool"):
            text = f"the last message must be the user's or the result of a tool, not of the role {messages[-1].role!r}"
            raise ApiError(400, text, param=f"messages[{len(messages) - 1}].role", code="invalid_value")
        called: set[str] = set()
        for index, message in enumerate(messages):
            where = f"messages[{index}]"
            if message.role != "tool":
                called = {call.id for call in message.tool_calls}
            elif not called:
                text = f"{where}: the result of a tool must follow an answer with calls"
                raise ApiError(400, text, param=f"{where}.role", code="invalid_value")
            elif message.tool_call_id not in called:
                text = f"{where}: no call before has the id {short(message.tool_call_id)}"
                raise ApiError(400, text, param=f"{where}.tool_call_id", code="invalid_value")
        return messages

    @model_validator(mode="after")
    def _short_enough(self, info: ValidationInfo) -> ChatBody:
        calls = [call.function.arguments for message in self.messages for call in message.tool_calls]
        tools = [json.dumps(tool.described()) for tool in self.tools]
        characters = sum(map(len, [*(message.content for message in self.messages), *calls, *tools]))
        _check_length("messages", characters, info.context)
        return self

    @model_validator(mode="after")
    def _callable(self) -> ChatBody:
        kind, name = self.choice
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ApiError(400, "tools: two have the same name", param="tools", code="invalid_value")
        if kind == "required" and not names:
            raise ApiError(400, "tool_choice: there are no tools", param="tool_choice", code="invalid_value")
        if kind == "named" and name not in names:
            text = f"tool_choice: no tool has the name {short(name)}"
            raise ApiError(400, text, param="tool_choice", code="invalid_value")
        for guided in _GRAMMARS[1:]:
            if names and getattr(self, guided) is not None:
                text = f"tools and {guided} exclude each other"
                raise ApiError(400, text, param=guided, code="invalid_value")
        return self

    @property
    def choice(self) -> tuple[str, str]:
        """Whether the target calls tools, and the name of one that is chosen by name."""
        return self.tool_choice or ("auto", "")

    @property
    def tool_schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schemas of the tools whose calls must conform to them, by their fields."""
        kind, name = self.choice
        return {
            f"tools[{index}].function.parameters": tool.tool().parameters
            for index, tool in enumerate(self.tools)
            if (tool.function.name == name if kind == "named" else kind == "required" or tool.function.strict)
        }

    def call_grammar(self, form: ToolFormat, thinking: bool | None) -> Grammar | None:
        """Return what an answer conforms to that is or may be a call; None if it is free."""
        kind, name = self.choice
        tools = [each.tool() for each in self.tools if kind != "named" or each.function.name == name]
        required = kind in ("required", "named")
        other = self.response_format.answer_schema if self.response_format else None
        if not (required or other is not None or any(tool.strict for tool in tools)):
            return None
        text = form.grammar(
            tools,
            required=required,
            parallel=self.parallel_tool_calls and kind != "named",
            otherwise=None if required else other,
            thought=form.thought(thinking),
        )
        return Grammar("lark", text)


class TextBody(CompletionBody):
    """The body of a completion, which continues a raw text."""

    prompt: Annotated[str, BeforeValidator(_one_text)]
    logprobs: Annotated[Logprobs | None, BeforeValidator(lambda asked: None if asked is False else asked)] = None

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs

    @field_validator("prompt")
    @classmethod
    def _short(cls, prompt: str, info: ValidationInfo) -> str:
        _check_length("prompt", len(prompt), info.context)
        return prompt


def prompted() -> ToolFormat:
    """Return the format of a chat template that knows no tools."""
    return PromptedFormat("", {})


def parse_chat(data: bytes, defaults: Defaults, tool_format: Callable[[], ToolFormat] = prompted) -> AnswerRequest:
    """Read the body of a chat completion; unknown fields are ignored.

    Args:
        tool_format: returns the format in which the target writes calls.

    Raises:
        ApiError: it is no request that can be answered; names the field.
    """
    body = read_body(ChatBody, data, defaults)
    names: dict[str, str] = {}  # of calls; a later answer may use the ids of an earlier one again
    turns = []
    for message in body.messages:
        names |= {call.id: call.function.name for call in message.tool_calls}
        turns.append(message.turn(names))
    if defaults.system and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": defaults.system})
    thinking = body.chat_template_kwargs.enable_thinking
    thinking = defaults.thinking if thinking is None else thinking
    # A target to which tools are described may call them.
    tools = [] if body.choice[0] == "none" else [tool.described() for tool in body.tools]
    form = tool_format() if tools or names else None
    if form is not None:
        turns = form.turns(turns, tools)
    asked = body.request(
        defaults,
        history=turns[:-1],
        question=turns[-1]["content"] if turns[-1]["role"] == "user" else turns[-1],
        raw=False,
        thinking=thinking,
    )
    if form is None or not tools:
        return asked
    grammar = body.call_grammar(form, thinking)
    return replace(
        asked,
        sampling=replace(asked.sampling, grammar=grammar),
        tools=form.templated(tools),
        calls=form,
        callable={tool["function"]["name"]: tool["function"]["parameters"] for tool in tools},
        parallel=body.parallel_tool_calls,
        constrained_in="tools" if grammar else None,
        schemas=body.schemas | body.tool_schemas if grammar else {},
    )


def parse_completion(data: bytes, defaults: Defaults) -> AnswerRequest:
    """Read the body of a completion, which continues a raw text; see :func:`parse_chat`."""
    body = read_body(TextBody, data, defaults)
    return body.request(defaults, history=[], question=body.prompt, raw=True, asked_in="prompt")


# -- reading --------------------------------------------------------------------------------------------------

Body = TypeVar("Body", bound=BaseModel)


def read_body(kind: type[Body], data: bytes, defaults: Defaults) -> Body:
    """Read a JSON body. Raises ApiError, which names the field that is at fault."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {json_problem(error)}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, not {kind_of(fields)}", code="invalid_type")
    try:
        return kind.model_validate(fields, context=defaults)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from error


def _refusal(error: ErrorDetails) -> ApiError:
    """Return the error of the API for one of pydantic's."""
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    param, code = _param(error["loc"]), "invalid_value"
    expected = _EXPECTED.get(kind.removesuffix("_type"))
    if kind in _BOUNDS:
        text, code = f"{param} {_BOUNDS[kind].format(**context)}, not {short(given)}", "out_of_range"
    elif kind == "too_long":
        text, code = f"{param} must have at most {context['max_length']} items, not {len(given)}", "out_of_range"
    elif kind == "missing":
        text, code = f"{param} is missing", "missing_required_parameter"
    elif kind == "extra_forbidden":
        return unsupported(".".join(map(str, error["loc"])))
    elif expected is not None:
        said = short(given) if isinstance(given, float) else kind_of(given)
        text, code = f"{param} must be {_KINDS[expected]}, not {said}", "invalid_type"
    elif "text" in context:  # of _invalid
        text, code = f"{param}{'' if context['text'].startswith(('.', '[')) else ' '}{context['text']}", kind
        if context["text"].startswith("."):  # of a field inside
            param = text.partition(" ")[0]
    elif kind == "literal_error":
        text = f"{param} must be {context['expected']}, not {short(given)}"
    else:
        text = f"{param}: {error['msg']}"
    return ApiError(400, text, param=param, code=code)


def short(value: object) -> str:
    """Return a value for a sentence."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _param(path: tuple[int | str, ...]) -> str:
    """Return the name of a field, the path to it: ``messages[0].role``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:]


def no_model(name: str, defaults: Defaults) -> ApiError:
    """Return the error for a model that is not served."""
    text = f"there is no model {short(name)} here, only {defaults.model!r}"
    return ApiError(404, text, param="model", code="model_not_found")


def kind_of(value: object) -> str:
    """Return the kind of a JSON value in words."""
    return _KINDS[type(value)]


def _check_length(name: str, characters: int, defaults: Defaults) -> None:
    if characters > _MOST_PER_TOKEN * defaults.max_context:
        text = f"{name}: {characters} characters; the target's context holds {defaults.max_context} tokens"
        raise ApiError(400, text, param=name, code="context_length_exceeded")


def _same(value: Any, one: Any) -> bool:
    """Return whether two values are equal in JSON, where 0 is not false."""
    return value == one and isinstance(value, bool) is isinstance(one, bool)
