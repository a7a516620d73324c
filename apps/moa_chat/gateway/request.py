"""A request for an answer: what of OpenAI's chat completions and completions is understood."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.schemas import field, fields_of, kind_of, text_at, unsupported
from moa_chat.sampling import sampling_for
from moa_runtime.options import OFFLINES, Offline
from moa_runtime.session.events import Sampling

_MOST_CHOICES = 8
_MOST_STOPS = 4
_HIGHEST_TEMPERATURE = 2
_SEEDS = 1 << 64
#: Texts of more characters for each token of the context are not even counted in tokens: that takes its time.
_MOST_PER_TOKEN = 32
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


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
class AnswerRequest:
    """A request that can be answered.

    Attributes:
        history: the turns before the question; none before a raw text.
        question: the user's message, or the raw text that the target is to write on.
        count: how many answers.
        offline: what writes while there is no verifier; ``off``: nothing, the request waits or fails.
        include_usage: whether a stream ends with its figures.
        raw: whether the question is a text without chat template.
    """

    history: list[dict[str, str]]
    question: str
    sampling: Sampling
    max_new_tokens: int
    stops: tuple[str, ...]
    count: int
    stream: bool
    include_usage: bool
    offline: Offline
    raw: bool

    @property
    def asked_in(self) -> str:
        """The field that holds what is asked."""
        return "prompt" if self.raw else "messages"

    def sampling_of(self, index: int) -> Sampling:
        """How the target chooses in an answer: each has the seed behind that of the one before."""
        return replace(self.sampling, seed=(self.sampling.seed + index) % _SEEDS)


def parse_chat(data: bytes, defaults: Defaults) -> AnswerRequest:
    """Read the body of a chat completion. Fields that do not matter here are ignored.

    Raises:
        ApiError: 400 or 404; the message names the field, what it was and what it may be.
    """
    fields = _checked(data, defaults)
    messages = _messages(fields, defaults)
    if defaults.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": defaults.system})
    return _request(fields, defaults, messages[:-1], messages[-1]["content"], raw=False)


def parse_completion(data: bytes, defaults: Defaults) -> AnswerRequest:
    """Read the body of a completion, which goes on with a text as it is.

    Raises:
        ApiError: see :func:`parse_chat`.
    """
    fields = _checked(data, defaults)
    return _request(fields, defaults, [], _prompt(fields, defaults), raw=True)


def _checked(data: bytes, defaults: Defaults) -> dict[str, Any]:
    fields = fields_of(data)
    model = field(fields, "model", str, defaults.model)
    if model != defaults.model:
        text = f"there is no model {model!r} here, only {defaults.model!r}"
        raise ApiError(404, text, param="model", code="model_not_found")
    return fields


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
    )


def _prompt(fields: Mapping[str, Any], defaults: Defaults) -> str:
    given = field(fields, "prompt", (str, list), "")
    texts = [given] if isinstance(given, str) else given
    if len(texts) != 1 or not isinstance(texts[0], str):
        text = "prompt must be a text, or a list of one: token ids, or several texts, are not understood here"
        raise ApiError(400, text, param="prompt")
    if not texts[0]:
        wrong = "empty" if "prompt" in fields else "missing"
        raise ApiError(400, f"prompt is {wrong}: the text that the target is to write on", param="prompt")
    _check_length("prompt", len(texts[0]), defaults)
    return text_at(texts[0], "prompt")


def _messages(fields: Mapping[str, Any], defaults: Defaults) -> list[dict[str, str]]:
    given = field(fields, "messages", list, [])
    if not given:
        wrong = "empty" if "messages" in fields else "missing"
        raise ApiError(400, f"messages is {wrong}: the turns so far, the last one the user's", param="messages")
    if len(given) > defaults.max_context:
        text = f"messages are {len(given)}; the target's context holds {defaults.max_context} tokens"
        raise ApiError(400, text, param="messages", code="context_length_exceeded")
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    if messages[-1]["role"] != "user":
        text = f"the last message must be the user's, not of the role {messages[-1]['role']!r}"
        raise ApiError(400, text, param=f"messages[{len(messages) - 1}].role")
    _check_length("messages", sum(len(message["content"]) for message in messages), defaults)
    return messages


def _check_length(name: str, characters: int, defaults: Defaults) -> None:
    if characters > _MOST_PER_TOKEN * defaults.max_context:
        text = f"{name}: {characters} characters; the target's context holds {defaults.max_context} tokens"
        raise ApiError(400, text, param=name, code="context_length_exceeded")


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} must be an object, not {kind_of(message)}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise ApiError(400, f"{where}.role must be one of {known}, not {role!r}", param=f"{where}.role")
    if message.get("tool_calls"):
        raise ApiError(400, f"{where}.tool_calls is not supported here", param=f"{where}.tool_calls")
    return {"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, str):
        return text_at(content, where)
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a text or a list of parts, not {kind_of(content)}", param=where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(400, f'{where} may only hold parts of the form {{"type": "text", "text": ...}}', param=where)
    return text_at("".join(part["text"] for part in content), where)


def _sampling(fields: Mapping[str, Any], defaults: Defaults) -> Sampling:
    temperature = field(fields, "temperature", (int, float), defaults.temperature)
    if not 0 <= temperature <= _HIGHEST_TEMPERATURE:
        text = f"temperature must be between 0 and {_HIGHEST_TEMPERATURE}, not {temperature}"
        raise ApiError(400, text, param="temperature")
    top_p = field(fields, "top_p", (int, float), defaults.top_p)
    if not 0 < top_p <= 1:
        raise ApiError(400, f"top_p must be above 0 and at most 1, not {top_p}", param="top_p")
    seed = field(fields, "seed", int, defaults.seed)
    # OpenAI's seeds may be negative; the verifier's have 64 bits.
    return sampling_for(temperature, top_p, None if seed is None else seed % _SEEDS)


def _max_new_tokens(fields: Mapping[str, Any], defaults: Defaults) -> int:
    # max_tokens is the older name, which most clients still send.
    name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    limit: int = field(fields, name, int, defaults.max_new_tokens)
    if limit < 1:
        raise ApiError(400, f"{name} must be at least 1, not {limit}", param=name)
    return limit


def _count(fields: Mapping[str, Any]) -> int:
    count: int = field(fields, "n", int, 1)
    if not 1 <= count <= _MOST_CHOICES:
        raise ApiError(400, f"n must be between 1 and {_MOST_CHOICES}, not {count}", param="n")
    if field(fields, "best_of", int, count) != count:  # as many as n means all of them
        raise unsupported("best_of")
    return count


def _offline(fields: Mapping[str, Any], defaults: Defaults) -> Offline:
    asked = field(fields, "offline", str, defaults.offline)
    for known in OFFLINES:
        if asked == known:
            return known
    raise ApiError(400, f"offline must be one of {', '.join(OFFLINES)}, not {asked!r}", param="offline")


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stop = field(fields, "stop", (str, list), [])
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > _MOST_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise ApiError(400, f"stop must be a text or up to {_MOST_STOPS} of them, none empty", param="stop")
    return tuple(stops)
