"""Requests to the OpenAI-compatible endpoint: what is understood and what is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")


from pooled_chat import ASSISTANT, DEFAULTS, USER, parse

from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.request import Defaults, parse_request
from moa_runtime.session.events import Sampling


def test_a_request_is_understood():
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    request = parse(
        messages=[{"role": "developer", "content": parts}, USER, ASSISTANT, {"role": "user", "content": "Why?"}],
        temperature=0.7,
        top_p=0.9,
        seed=-1,
        stop="END",
        max_completion_tokens=5,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
        user="somebody",
        metadata={"of": "no interest"},
        n=1,
        tools=[],
        presence_penalty=0,
    )
    assert request.history == [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]
    assert request.question == "Why?"
    assert request.sampling == Sampling(0.7, 0.9, (1 << 64) - 1)
    assert request.max_new_tokens == 5 and request.stops == ("END",)
    assert request.stream and request.include_usage and request.offline == "off"
    assert parse(offline="writer").offline == "writer" and parse(top_k=-1, min_p=0, repetition_penalty=1).stops == ()


def test_what_a_request_leaves_out_is_as_on_the_command_line():
    plain = parse(temperature=None)
    assert plain.history == [] and plain.sampling == Sampling() and plain.max_new_tokens == 64
    assert not plain.stream and not plain.include_usage and plain.stops == ()
    own = Defaults("tiny", max_new_tokens=7, temperature=0.5, top_p=0.8, seed=3, system="Be brief.")
    request = parse(own)
    assert request.history == [{"role": "system", "content": "Be brief."}]
    assert request.sampling == Sampling(0.5, 0.8, 3) and request.max_new_tokens == 7
    assert parse(own, messages=[{"role": "system", "content": "Rhyme."}, USER]).history[0]["content"] == "Rhyme."
    assert parse(temperature=1).sampling.seed != parse(temperature=1).sampling.seed


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"messages": None}, "messages", "messages is missing"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": "Hi"}, "messages", "must be a list, not a text"),
        ({"messages": [3]}, "messages[0]", "must be an object, not a whole number"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "one of system, developer, user"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "one of system, developer, user"),
        ({"messages": [{"role": {}, "content": "x"}]}, "messages[0].role", "one of system, developer, user"),
        ({"messages": [USER] * 99 + [{"role": "user", "content": "a" * 2**25}]}, "messages", "context holds 1048576"),
        ({"offline": "perhaps"}, "offline", "one of writer, drafter, off, not 'perhaps'"),
        ({"offline": True}, "offline", "must be a text"),
        ({"top_k": 40}, "top_k", "not supported here"),
        ({"min_p": 0.05}, "min_p", "not supported here"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "not supported here"),
        ({"guided_json": {}}, "guided_json", "not supported here"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a text or a list of parts, not null"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content", "only hold parts"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "half of a surrogate pair"),
        ({"messages": [USER, ASSISTANT]}, "messages[1].role", "must be the user's"),
        ({"messages": [{**ASSISTANT, "tool_calls": [{}]}, USER]}, "messages[0].tool_calls", "not supported"),
        ({"model": 3}, "model", "must be a text, not a whole number"),
        ({"temperature": "hot"}, "temperature", "temperature must be a number, not a text"),
        ({"temperature": True}, "temperature", "not true or false"),
        ({"temperature": 3}, "temperature", "between 0 and 2, not 3"),
        ({"temperature": float("nan")}, "temperature", "between 0 and 2, not nan"),
        ({"top_p": 0}, "top_p", "above 0 and at most 1, not 0"),
        ({"seed": 1.5}, "seed", "must be a whole number, not a number"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, not 0"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens", "must be a whole number"),
        ({"stop": ["a"] * 5}, "stop", "up to 4"),
        ({"stop": ""}, "stop", "none empty"),
        ({"stream": "yes"}, "stream", "must be true or false, not a text"),
        ({"stream_options": []}, "stream_options", "must be an object, not a list"),
        ({"n": 2}, "n", "not supported here"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported here"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported here"),
        ({"logprobs": True}, "logprobs", "not supported here"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported here"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_meant_is_named(fields, param, said):
    with pytest.raises(ApiError, match=said) as caught:
        parse(**fields)
    assert caught.value.status == 400 and caught.value.param == param
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"{", "no JSON"), (b"[1]", "object, not a list"), (b"[" * 100_000, "no JSON"), (b"\xff", "JSON")],
)
def test_a_body_that_is_no_request(data, said):
    with pytest.raises(ApiError, match=said):
        parse_request(data, DEFAULTS)


def test_another_model_is_not_found():
    with pytest.raises(ApiError, match="only 'tiny'") as caught:
        parse(model="gpt-5")
    assert caught.value.status == 404 and caught.value.code == "model_not_found"
