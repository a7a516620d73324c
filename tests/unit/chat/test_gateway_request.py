"""Requests to the OpenAI-compatible endpoint: what is understood. What is refused: test_gateway_malformed.py."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")


from moa_chat.gateway.schemas import Defaults, as_api_error
from moa_runtime.errors import ContextFullError
from moa_runtime.session.events import Sampling
from support.chat.pooled_chat import ASSISTANT, USER, parse, parse_text


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


def test_a_text_is_understood():
    own = Defaults("tiny", max_new_tokens=7, temperature=0.5, top_p=0.8, seed=3, system="Be brief.")
    request = parse_text(own, prompt="Once upon", n=3, best_of=3, echo=False, suffix="", logprobs=None)
    assert request.raw and request.history == [] and request.question == "Once upon" and request.count == 3
    assert [request.sampling_of(index).seed for index in range(3)] == [3, 4, 5] and request.max_new_tokens == 7
    assert parse_text(prompt=["Once"]).question == "Once" and not parse().raw and parse().count == 1


def test_a_verdict_of_the_runtime_names_the_field_that_was_asked_in():
    for request, name in ((parse(), "messages"), (parse_text(), "prompt")):
        full = as_api_error(ContextFullError("too long"), request.asked_in)
        assert full.status == 400 and full.param == name and full.code == "context_length_exceeded"
