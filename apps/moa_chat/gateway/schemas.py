"""Fields of a request's body, checked one by one: the message names the field, what it was and what it may be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moa_chat.gateway.errors import ApiError

#: Fields that would change the answer and that no target behind a verifier can honour, with what they may be.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
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
    "echo": (False,),
    "suffix": ("",),
}
_KINDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "an object",
    list: "a list",
    type(None): "null",
}


def fields_of(data: bytes) -> dict[str, Any]:
    """The fields of a body; those that are null are left out, as clients mean it.

    Raises:
        ApiError: 400, no JSON object, or a field that is not supported.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {kind_of(body)}")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, allowed in _UNSUPPORTED.items():
        if name in fields and not any(_same(fields[name], one) for one in allowed):
            raise unsupported(name)
    return fields


def unsupported(name: str) -> ApiError:
    """A field that nobody here can honour."""
    return ApiError(400, f"{name} is not supported here: leave it out", param=name, code="unsupported_parameter")


def field(fields: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """A field of a kind, or of one of several.

    Raises:
        ApiError: 400, it is of another.
    """
    value = fields.get(name)
    if value is None:
        return default
    # bool is a kind of int in Python, but not in JSON.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(_KINDS[one] for one in kinds if one is not int or float not in kinds)
        raise ApiError(400, f"{name} must be {expected}, not {kind_of(value)}", param=name)
    return value


def text_at(text: str, where: str) -> str:
    """A text of the body.

    Raises:
        ApiError: 400, it holds half of a character, which JSON can spell.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{where} holds half of a surrogate pair", param=where) from error
    return text


def kind_of(value: object) -> str:
    """What a value of JSON is, in words."""
    return _KINDS[type(value)]


def _same(value: Any, one: Any) -> bool:
    """Equal, and both or neither a truth value: 0 is not false."""
    return value == one and isinstance(value, bool) is isinstance(one, bool)
