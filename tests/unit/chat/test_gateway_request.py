"""Valid requests to the OpenAI-compatible endpoint; test_gateway_malformed.py has the invalid ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from moa_chat.gateway.errors import ApiError, as_api_error
from moa_chat.gateway.requests import _UNSUPPORTED, Defaults, parse_chat
from moa_chat.gateway.schema_references import reference_problem
from moa_chat.gateway.tool_formats.hermes import HermesFormat
from moa_runtime.chat_template import ChatTemplateError
from moa_runtime.errors import ContextFullError, MoaError
from moa_runtime.session.events import Grammar, Sampling
from support.chat.pooled_chat import ASSISTANT, DEFAULTS, USER, parse, parse_text
from support.refusals import refused

OWN = Defaults("tiny", max_new_tokens=7, temperature=0.5, top_p=0.8, seed=3, system="Be brief.")


def test_a_chat_completion_is_read():
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    request = parse(
        messages=[{"role": "developer", "content": parts}, USER, ASSISTANT, {"role": "user", "content": "Why?"}],
        **{"temperature": 0.7, "top_p": 0.9, "seed": -1, "stop": "END", "max_completion_tokens": 5, "max_tokens": 9},
        **{"stream": True, "stream_options": {"include_usage": True}, "n": 1, "tools": [], "presence_penalty": 0},
        **{"user": "somebody", "metadata": {"of": "no interest"}},
    )
    assert request.history == [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]
    assert request.question == "Why?" and request.sampling == Sampling(0.7, 0.9, (1 << 64) - 1)
    assert request.max_new_tokens == 5 and request.stops == ("END",)
    assert request.stream and request.include_usage and request.offline == "off"
    assert parse(offline="writer").offline == "writer"


def test_the_sampling_of_openai_and_vllm_is_read():
    asked = {"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.25, "min_p": 0.125}
    request = parse(**asked, top_k=40, logit_bias={"12": -100, "5": 1.5}, min_tokens=2, max_tokens=2)
    expected = Sampling(**asked, top_k=40, logit_bias=((5, 1.5), (12, -100.0)), min_tokens=2)
    assert request.sampling == expected and request.sampling_of(1) == replace(expected, seed=1)
    assert parse(top_k=-1, min_p=0, repetition_penalty=1, logit_bias={}).sampling == Sampling()


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_message_without_content_is_told_so(content):
    with refused("missing_required_parameter", ApiError) as caught:
        parse(messages=[{"role": "user", **content}])
    assert caught.value.param == "messages[0].content"


def test_a_template_that_cannot_switch_reasoning_is_told_by_its_field():
    error = as_api_error(ChatTemplateError("NO", code="no_thinking"), "messages")
    assert (error.status, error.param) == (400, "chat_template_kwargs.enable_thinking")


def test_the_fields_that_are_refused_are_documented():
    text = (Path(__file__).parents[3] / "docs/chat.md").read_text("utf-8")
    names = {name for _, names in _UNSUPPORTED for name in names.split()} - {"audio", "modalities"}
    assert {name for name in names if f"`{name}`" not in text} == set()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"min_tokens": 1 << 40, "max_tokens": 1 << 41}, "out_of_range"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "out_of_range"),
        ({"logit_bias": {"300": 1}}, "invalid_value"),
    ],
)
def test_what_no_verifier_takes_is_refused_before_it_is_asked(fields, code):
    with pytest.raises(ApiError) as caught:
        parse(replace(OWN, vocab_size=300), **fields)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, next(iter(fields)))


def test_the_result_of_a_call_has_the_name_of_the_last_one_with_its_id():
    def called(name):
        call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": "{}"}}
        return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_0", "content": "1"}]

    body = {"messages": [USER, *called("add"), *called("sub")]}
    request = parse_chat(json.dumps(body).encode(), DEFAULTS, lambda: HermesFormat("", {}))
    assert [request.history[2]["name"], request.question["name"]] == ["add", "sub"]


def test_the_field_of_a_grammar_is_known():
    assert parse(guided_regex="a+").constrained_in == "guided_regex"
    assert parse(response_format={"type": "json_object"}).constrained_in == "response_format"


def test_what_an_answer_conforms_to_is_read():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    strict = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    own = Grammar("json_schema", json.dumps(schema))
    for fields, grammar in (
        ({"response_format": strict}, own),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_json": schema}, own),
        ({"guided_json": json.dumps(schema)}, own),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
    ):
        assert parse(**fields).sampling.grammar == grammar
    with pytest.raises(ApiError):
        parse(guided_regex="a", response_format=strict)


def test_a_field_that_is_left_out_is_as_on_the_command_line():
    plain = parse(temperature=None)
    assert plain.history == [] and plain.sampling == Sampling() and plain.max_new_tokens == 64
    assert not plain.stream and not plain.include_usage and plain.stops == ()
    request = parse(OWN)
    assert request.history == [{"role": "system", "content": "Be brief."}]
    assert request.sampling == Sampling(0.5, 0.8, 3) and request.max_new_tokens == 7
    assert parse(OWN, messages=[{"role": "system", "content": "Rhyme."}, USER]).history[0]["content"] == "Rhyme."
    assert parse(temperature=1).sampling.seed != parse(temperature=1).sampling.seed


def test_a_completion_is_read_and_an_error_names_the_field_of_the_question():
    request = parse_text(OWN, prompt="Once upon", n=3, best_of=3, echo=False, suffix="", logprobs=None)
    assert request.raw and request.history == [] and request.question == "Once upon" and request.count == 3
    assert [request.sampling_of(index).seed for index in range(3)] == [3, 4, 5] and request.max_new_tokens == 7
    assert parse_text(prompt=["Once"]).question == "Once" and not parse().raw and parse().count == 1
    for request, name in ((parse(), "messages"), (parse_text(), "prompt")):
        full = as_api_error(ContextFullError("FULL", code="refused"), request.asked_in)
        assert (full.status, full.param, full.code) == (400, name, "context_length_exceeded")


@pytest.mark.parametrize(
    ("parameters", "none"),
    [
        ({}, True),
        ({"properties": {}, "required": []}, True),
        ({"required": ["a"]}, False),
        ({"type": "object", "title": "none"}, True),
        ({"additionalProperties": {"type": "string"}}, False),
        ({"properties": {"a": {"type": "string"}}}, False),
        ({"patternProperties": {"a": {}}}, False),
    ],
)
def test_a_tool_without_properties_has_no_arguments(parameters, none):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = {"messages": [USER], "tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    request = parse_chat(json.dumps(asked).encode(), DEFAULTS, lambda: HermesFormat("", {}))
    [schema] = request.schemas.values()
    assert (schema.get("additionalProperties") is False) == none


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"$ref": "#"}, "itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "itself"),
        ({"$ref": "https://example.com/a"}, "within the"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"a": {}}}, "such part"),
        ({"properties": {"a": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {}}}, ""),
        ({"properties": {"$ref": {"type": "string"}, "a": {"$ref": "#"}, "b": {"$ref": "#c"}}}, ""),
        ({"allOf": [{"$ref": "#/allOf/1"}, {}]}, ""),
    ],
)
def test_the_reason_why_references_cannot_be_followed_is_told(schema, told):
    assert told in reference_problem(schema) and bool(told) == bool(reference_problem(schema))


def test_a_grammar_in_another_dialect_is_told_from_other_mistakes():
    failed = MoaError("it fails", code="invalid_grammar")
    hints = [parse(guided_grammar=text).refusal(failed) for text in ('root ::= "a"', 'start: "a"')]
    assert "Lark" in str(hints[0]) and "Lark" not in str(hints[1]) and hints[0].param == "guided_grammar"
