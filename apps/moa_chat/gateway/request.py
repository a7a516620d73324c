"""A request for an answer: what of OpenAI's chat completions is understood, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moa_chat.gateway.errors import ApiError
from moa_chat.sampling import sampling_for
from moa_runtime.offline import OFFLINES, Offline
from moa_runtime.session.events import Sampling

_MOST_STOPS = 4
_HIGHEST_TEMPERATURE = 2
#: Texts of more characters for each token of the context are not even counted in tokens: that takes its time.
_MOST_PER_TOKEN = 32
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
#: Fields that would change the answer and that no target behind a verifier can honour, with what they may be.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "grammar": ("",),
    "json_schema": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "modalities": (["text"],),
    "audio": (),
}


@dataclass(frozen=True)
class Defaults:
    """What a request may leave out: the command line's options. ``seed`` None draws one for each answer."""

    model: str
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    system: str | None
    offline: Offline = "off"
    max_context: int = 1 << 20


@dataclass(frozen=True)
class ChatRequest:
    """A request that can be answered.

    Attributes:
        history: the turns before the question.
        offline: what writes while there is no verifier; ``off``: nothing, the request waits or fails.
        include_usage: whether a stream ends with its figures.
    """

    history: list[dict[str, str]]
    question: str
    sampling: Sampling
    max_new_tokens: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    offline: Offline = "off"


def parse_request(data: bytes, defaults: Defaults) -> ChatRequest:
    """Read the body of a request. Fields that do not matter here are ignored.

    Raises:
        ApiError: 400 or 404; the message names the field, what it was and what it may be.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(body)}")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, allowed in _UNSUPPORTED.items():
        if name in fields and fields[name] not in allowed:
            raise ApiError(400, f"{name} is not supported here: leave it out", param=name, code="unsupported_parameter")
    model = _field(fields, "model", str, defaults.model)
    if model != defaults.model:
        text = f"there is no model {model!r} here, only {defaults.model!r}"
        raise ApiError(404, text, param="model", code="model_not_found")
    messages = _messages(fields)
    characters = sum(len(message["content"]) for message in messages)
    if characters > _MOST_PER_TOKEN * defaults.max_context:
        text = f"messages have {characters} characters; the target's context holds {defaults.max_context} tokens"
        raise ApiError(400, text, param="messages", code="context_length_exceeded")
    if defaults.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": defaults.system})
    stream_options = _field(fields, "stream_options", dict, {})
    return ChatRequest(
        history=messages[:-1],
        question=messages[-1]["content"],
        sampling=_sampling(fields, defaults),
        max_new_tokens=_max_new_tokens(fields, defaults),
        stops=_stops(fields),
        stream=_field(fields, "stream", bool, False),
        include_usage=_field(stream_options, "include_usage", bool, False),
        offline=_offline(fields, defaults),
    )


def _field(fields: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    # bool is a kind of int in Python, but not in JSON.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(_KINDS[one] for one in kinds if one is not int or float not in kinds)
        raise ApiError(400, f"{name} must be {expected}, not {_kind(value)}", param=name)
    return value


_KINDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "an object",
    list: "a list",
    type(None): "null",
}


def _kind(value: object) -> str:
    return _KINDS[type(value)]


def _messages(fields: Mapping[str, Any]) -> list[dict[str, str]]:
    given = _field(fields, "messages", list, [])
    if not given:
        wrong = "empty" if "messages" in fields else "missing"
        raise ApiError(400, f"messages is {wrong}: the turns so far, the last one the user's", param="messages")
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    if messages[-1]["role"] != "user":
        text = f"the last message must be the user's, not of the role {messages[-1]['role']!r}"
        raise ApiError(400, text, param=f"messages[{len(messages) - 1}].role")
    return messages


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} must be an object, not {_kind(message)}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise ApiError(400, f"{where}.role must be one of {known}, not {role!r}", param=f"{where}.role")
    if message.get("tool_calls"):
        raise ApiError(400, "tool calls are not supported here", param=f"{where}.tool_calls")
    text = _content(message.get("content"), f"{where}.content")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{where}.content holds half of a surrogate pair", param=f"{where}.content") from error
    return {"role": _ROLES[role], "content": text}


def _content(content: Any, where: str) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a text or a list of parts, not {_kind(content)}", param=where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(400, f'{where} may only hold parts of the form {{"type": "text", "text": ...}}', param=where)
    return "".join(part["text"] for part in content)


def _sampling(fields: Mapping[str, Any], defaults: Defaults) -> Sampling:
    temperature = _field(fields, "temperature", (int, float), defaults.temperature)
    if not 0 <= temperature <= _HIGHEST_TEMPERATURE:
        text = f"temperature must be between 0 and {_HIGHEST_TEMPERATURE}, not {temperature}"
        raise ApiError(400, text, param="temperature")
    top_p = _field(fields, "top_p", (int, float), defaults.top_p)
    if not 0 < top_p <= 1:
        raise ApiError(400, f"top_p must be above 0 and at most 1, not {top_p}", param="top_p")
    seed = _field(fields, "seed", int, defaults.seed)
    # OpenAI's seeds may be negative; the verifier's have 64 bits.
    return sampling_for(temperature, top_p, None if seed is None else seed % (1 << 64))


def _max_new_tokens(fields: Mapping[str, Any], defaults: Defaults) -> int:
    # max_tokens is the older name, which most clients still send.
    name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    limit: int = _field(fields, name, int, defaults.max_new_tokens)
    if limit < 1:
        raise ApiError(400, f"{name} must be at least 1, not {limit}", param=name)
    return limit


def _offline(fields: Mapping[str, Any], defaults: Defaults) -> Offline:
    asked = _field(fields, "offline", str, defaults.offline)
    for known in OFFLINES:
        if asked == known:
            return known
    raise ApiError(400, f"offline must be one of {', '.join(OFFLINES)}, not {asked!r}", param="offline")


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stop = _field(fields, "stop", (str, list), [])
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > _MOST_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise ApiError(400, f"stop must be a text or up to {_MOST_STOPS} of them, none empty", param="stop")
    return tuple(stops)
