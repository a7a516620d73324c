"""The bodies of requests: OpenAI's chat completions and completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moa_chat.gateway.errors import ApiError, unsupported
from moa_chat.history.chat_settings import sampling_for
from moa_runtime.options import OFFLINES, Offline
from moa_runtime.reasoning import ENABLE_THINKING
from moa_runtime.session.events import MOST_BIASED, Grammar, Sampling

#: Fields that would change the answer and that a verifier does not support, by the values that are accepted.
_UNSUPPORTED: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((), "guided_choice structured_outputs audio"),
    ((0,), "top_logprobs"),
    ((1,), "typical_p repeat_penalty"),
    ((False,), "ignore_eos logprobs echo"),
    (("",), "grammar suffix"),
    (([],), "stop_token_ids tools functions"),
    (({},), "json_schema"),
    (("none", "auto"), "tool_choice function_call"),
    ((["text"],), "modalities"),
)
_KINDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
_KINDS |= {dict: "an object", list: "a list", type(None): "null"}
_MOST_CHOICES = 8
_MOST_STOPS = 4
_HIGHEST_TEMPERATURE = 2
_SEEDS = 1 << 64
_MOST = (1 << 32) - 1  # the largest id of a token, and the largest ``top_k``
#: Texts of more characters for each token of the context are not even counted in tokens: that takes its time.
_MOST_PER_TOKEN = 32
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def fields_of(data: bytes) -> dict[str, Any]:
    """Return the fields of a JSON body that are not null. Raises ApiError if one of them is not supported."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {kind_of(body)}", code="invalid_type")
    fields = {name: value for name, value in body.items() if value is not None}
    for accepted, names in _UNSUPPORTED:
        for name in names.split():
            if name in fields and not any(_same(fields[name], one) for one in accepted):
                raise unsupported(name)
    return fields


def field(fields: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """Return a field of one of these types. Raises ApiError if it has another type."""
    value = fields.get(name)
    if value is None:
        return default
    # bool is a kind of int in Python, but not in JSON.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(_KINDS[one] for one in kinds if one is not int or float not in kinds)
        raise ApiError(400, f"{name} must be {expected}, not {kind_of(value)}", param=name, code="invalid_type")
    return value


def text_at(text: str, where: str) -> str:
    """Return the text. Raises ApiError if it holds half of a character, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{where} holds half of a surrogate pair", param=where, code="invalid_value") from error
    return text


def kind_of(value: object) -> str:
    """Return the kind of a JSON value in words."""
    return _KINDS[type(value)]


def _same(value: Any, one: Any) -> bool:
    """Return whether two values are equal in JSON, where 0 is not false."""
    return value == one and isinstance(value, bool) is isinstance(one, bool)


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
    thinking: bool | None = None  # whether the target reasons; None for its template's default


@dataclass(frozen=True)
class AnswerRequest:
    """A request that can be answered."""

    history: list[dict[str, str]]  # the turns before the question; none before a raw text
    question: str  # the user's message, or the raw text that the target is to write on
    sampling: Sampling
    max_new_tokens: int
    stops: tuple[str, ...]
    count: int  # how many answers
    stream: bool
    include_usage: bool  # whether a stream ends with its figures
    offline: Offline  # what writes while there is no verifier; ``off``: nothing, the request waits or fails
    raw: bool  # whether the question is a text without chat template
    thinking: bool | None = None  # see :class:`Defaults`

    @property
    def asked_in(self) -> str:
        """The field that holds what is asked."""
        return "prompt" if self.raw else "messages"

    def sampling_of(self, index: int) -> Sampling:
        """Return the sampling of the answer at ``index``: the seeds of a request's answers are consecutive."""
        return replace(self.sampling, seed=(self.sampling.seed + index) % _SEEDS)


def parse_chat(data: bytes, defaults: Defaults) -> AnswerRequest:
    """Read the body of a chat completion; unknown fields are ignored. Raises ApiError, which names the field."""
    fields = _checked(data, defaults)
    messages = _messages(fields, defaults)
    if defaults.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": defaults.system})
    return _request(fields, defaults, messages[:-1], messages[-1]["content"], raw=False)


def parse_completion(data: bytes, defaults: Defaults) -> AnswerRequest:
    """Read the body of a completion, which continues a raw text; see :func:`parse_chat`."""
    fields = _checked(data, defaults)
    return _request(fields, defaults, [], _prompt(fields, defaults), raw=True)


def _checked(data: bytes, defaults: Defaults) -> dict[str, Any]:
    fields = fields_of(data)
    model = field(fields, "model", str, defaults.model)
    if model != defaults.model:
        raise no_model(model, defaults)
    return fields


def no_model(name: str, defaults: Defaults) -> ApiError:
    """Return the error for a model that is not served."""
    text = f"there is no model {name!r} here, only {defaults.model!r}"
    return ApiError(404, text, param="model", code="model_not_found")


def _request(
    fields: Mapping[str, Any], defaults: Defaults, history: list[dict[str, str]], question: str, *, raw: bool
) -> AnswerRequest:
    stream_options = field(fields, "stream_options", dict, {})
    return AnswerRequest(
        history=history,
        question=question,
        sampling=_sampling(fields, defaults),
        max_new_tokens=_max_new_tokens(fields, defaults),
        stops=_stops(fields),
        count=_count(fields),
        stream=field(fields, "stream", bool, False),
        include_usage=field(stream_options, "include_usage", bool, False),
        offline=_offline(fields, defaults),
        raw=raw,
        thinking=None if raw else _thinking(fields, defaults),
    )


def _thinking(fields: Mapping[str, Any], defaults: Defaults) -> bool | None:
    """Read the only one of vLLM's ``chat_template_kwargs`` that is known."""
    given = field(fields, "chat_template_kwargs", dict, {})
    if others := [name for name in given if name != ENABLE_THINKING]:
        raise unsupported(f"chat_template_kwargs.{others[0]}")
    thinking: bool | None = field(given, ENABLE_THINKING, bool, defaults.thinking)
    return thinking


def _prompt(fields: Mapping[str, Any], defaults: Defaults) -> str:
    given = field(fields, "prompt", (str, list), "")
    texts = [given] if isinstance(given, str) else given
    if len(texts) != 1 or not isinstance(texts[0], str):
        text = "prompt must be a text, or a list of one: token ids, or several texts, are not understood here"
        raise ApiError(400, text, param="prompt", code="invalid_value")
    if not texts[0]:
        wrong = "empty" if "prompt" in fields else "missing"
        text = f"prompt is {wrong}: the text that the target is to continue"
        raise ApiError(400, text, param="prompt", code="missing_required_parameter")
    _check_length("prompt", len(texts[0]), defaults)
    return text_at(texts[0], "prompt")


def _messages(fields: Mapping[str, Any], defaults: Defaults) -> list[dict[str, str]]:
    given = field(fields, "messages", list, [])
    if not given:
        wrong = "empty" if "messages" in fields else "missing"
        text = f"messages is {wrong}: the turns so far, the last one the user's"
        raise ApiError(400, text, param="messages", code="missing_required_parameter")
    if len(given) > defaults.max_context:
        text = f"messages are {len(given)}; the target's context holds {defaults.max_context} tokens"
        raise ApiError(400, text, param="messages", code="context_length_exceeded")
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    if messages[-1]["role"] != "user":
        text = f"the last message must be the user's, not of the role {messages[-1]['role']!r}"
        raise ApiError(400, text, param=f"messages[{len(messages) - 1}].role", code="invalid_value")
    _check_length("messages", sum(len(message["content"]) for message in messages), defaults)
    return messages


def _check_length(name: str, characters: int, defaults: Defaults) -> None:
    if characters > _MOST_PER_TOKEN * defaults.max_context:
        text = f"{name}: {characters} characters; the target's context holds {defaults.max_context} tokens"
        raise ApiError(400, text, param=name, code="context_length_exceeded")


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} must be an object, not {kind_of(message)}", param=where, code="invalid_type")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        text = f"{where}.role must be one of {', '.join(_ROLES)}, not {role!r}"
        raise ApiError(400, text, param=f"{where}.role", code="invalid_value")
    if message.get("tool_calls"):
        raise unsupported(f"{where}.tool_calls")
    return {"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, str):
        return text_at(content, where)
    if not isinstance(content, list):
        text = f"{where} must be a text or a list of parts, not {kind_of(content)}"
        raise ApiError(400, text, param=where, code="invalid_type")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            text = f'{where} may only hold parts of the form {{"type": "text", "text": ...}}'
            raise ApiError(400, text, param=where, code="invalid_value")
    return text_at("".join(part["text"] for part in content), where)


def _sampling(fields: Mapping[str, Any], defaults: Defaults) -> Sampling:
    temperature = field(fields, "temperature", (int, float), defaults.temperature)
    if not 0 <= temperature <= _HIGHEST_TEMPERATURE:
        text = f"temperature must be between 0 and {_HIGHEST_TEMPERATURE}, not {temperature}"
        raise ApiError(400, text, param="temperature", code="out_of_range")
    top_p = field(fields, "top_p", (int, float), defaults.top_p)
    if not 0 < top_p <= 1:
        text = f"top_p must be above 0 and at most 1, not {top_p}"
        raise ApiError(400, text, param="top_p", code="out_of_range")
    seed = field(fields, "seed", int, defaults.seed)
    # OpenAI's seeds may be negative; the verifier's have 64 bits.
    chosen = sampling_for(temperature, top_p, None if seed is None else seed % _SEEDS)
    return replace(
        chosen,
        top_k=max(0, int(_number(fields, "top_k", int, -1, _MOST))),  # -1 is vLLM's for all tokens
        min_p=_number(fields, "min_p", float, 0, 1),
        presence_penalty=_number(fields, "presence_penalty", float, -2, 2),
        frequency_penalty=_number(fields, "frequency_penalty", float, -2, 2),
        repetition_penalty=_number(fields, "repetition_penalty", float, 0.01, 10, usual=1),
        logit_bias=_logit_bias(fields),
        min_tokens=int(_number(fields, "min_tokens", int, 0, _max_new_tokens(fields, defaults))),
        grammar=_grammar(fields),
    )


def _grammar(fields: Mapping[str, Any]) -> Grammar | None:
    """Return what the answer conforms to, as OpenAI or vLLM names it."""
    asked = [name for name in ("response_format", "guided_json", "guided_regex", "guided_grammar") if name in fields]
    if len(asked) > 1:
        text = f"{asked[0]} and {asked[1]} exclude each other"
        raise ApiError(400, text, param=asked[1], code="invalid_value")
    if not asked:
        return None
    if asked == ["guided_json"]:
        schema = field(fields, "guided_json", (dict, str), {})
        return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
    if asked == ["guided_regex"]:
        return Grammar("regex", text_at(field(fields, "guided_regex", str, ""), "guided_regex"))
    if asked == ["guided_grammar"]:
        return Grammar("lark", text_at(field(fields, "guided_grammar", str, ""), "guided_grammar"))
    wanted = field(fields, "response_format", dict, {})
    match wanted.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar("json_object")
        case "json_schema":
            schema = field(field(wanted, "json_schema", dict, {}), "schema", dict, None)
            if schema is None:
                text, param = "response_format.json_schema.schema is missing", "response_format"
                raise ApiError(400, text, param=param, code="missing_required_parameter")
            return Grammar("json_schema", json.dumps(schema))
    text = f"response_format.type must be text, json_object or json_schema, not {wanted.get('type')!r}"
    raise ApiError(400, text, param="response_format", code="invalid_value")


def _number(fields: Mapping[str, Any], name: str, kind: type, least: float, most: float, *, usual: float = 0) -> float:
    value: float = field(fields, name, (int, float) if kind is float else kind, usual)
    if not least <= value <= most:
        text = f"{name} must be between {least} and {most}, not {value}"
        raise ApiError(400, text, param=name, code="out_of_range")
    return value


def _logit_bias(fields: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Return pairs of a token, which JSON names as a text, and its bias."""
    given = field(fields, "logit_bias", dict, {})
    if len(given) > MOST_BIASED:
        text = f"logit_bias may have {MOST_BIASED} tokens, not {len(given)}"
        raise ApiError(400, text, param="logit_bias", code="out_of_range")
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10 and int(token) <= _MOST):
            text = f"logit_bias: {token!r} is no id of a token"
            raise ApiError(400, text, param="logit_bias", code="invalid_value")
        if kind_of(bias) not in (_KINDS[int], _KINDS[float]) or not -100 <= bias <= 100:
            text = f"logit_bias: token {token} must have a number between -100 and 100"
            raise ApiError(400, text, param="logit_bias", code="out_of_range")
    return tuple(sorted({int(token): float(bias) for token, bias in given.items()}.items()))


def _max_new_tokens(fields: Mapping[str, Any], defaults: Defaults) -> int:
    # max_tokens is the older name, which most clients still send.
    name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    limit: int = field(fields, name, int, defaults.max_new_tokens)
    if limit < 1:
        raise ApiError(400, f"{name} must be at least 1, not {limit}", param=name, code="out_of_range")
    return limit


def _count(fields: Mapping[str, Any]) -> int:
    count: int = field(fields, "n", int, 1)
    if not 1 <= count <= _MOST_CHOICES:
        text = f"n must be between 1 and {_MOST_CHOICES}, not {count}"
        raise ApiError(400, text, param="n", code="out_of_range")
    if field(fields, "best_of", int, count) != count:  # as many as n means all of them
        raise unsupported("best_of")
    return count


def _offline(fields: Mapping[str, Any], defaults: Defaults) -> Offline:
    asked = field(fields, "offline", str, defaults.offline)
    for known in OFFLINES:
        if asked == known:
            return known
    text = f"offline must be one of {', '.join(OFFLINES)}, not {asked!r}"
    raise ApiError(400, text, param="offline", code="invalid_value")


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stop = field(fields, "stop", (str, list), [])
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > _MOST_STOPS or not all(isinstance(text, str) and text for text in stops):
        text = f"stop must be a text or up to {_MOST_STOPS} of them, none empty"
        raise ApiError(400, text, param="stop", code="invalid_value")
    return tuple(stops)
