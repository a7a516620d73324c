"""Calls of tools as targets write them: read whole and in pieces, and as grammars."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.tool_formats.choice import format_class, tool_format
from moa_chat.gateway.tool_formats.functiongemma import FunctionGemmaFormat
from moa_chat.gateway.tool_formats.granite import GraniteFormat
from moa_chat.gateway.tool_formats.hermes import HermesFormat
from moa_chat.gateway.tool_formats.llama3 import Llama3Format
from moa_chat.gateway.tool_formats.mistral import MistralFormat
from moa_chat.gateway.tool_formats.prompted import PromptedFormat
from moa_chat.gateway.tool_formats.qwen3_coder import Qwen3CoderFormat
from moa_chat.gateway.tool_formats.smollm3 import SmolLM3Format
from moa_chat.gateway.tool_formats.tool_format import CallSplitter, FunctionTool
from support.refusals import refused

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TURNS = [
    {"role": "user", "content": "1 and 2?"},
    {"role": "assistant", "content": "Well.", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"},
]
#: A template's text, and the format that it is written for.
TEMPLATES = {
    "{% for m in messages %}{{ m.content }} of tools{% endfor %}": PromptedFormat,
    "{% for t in tools %}{{ t }}{% endfor %}<tool_call></tool_call>": HermesFormat,
    "{% for t in xml_tools %}{{ t }}{% endfor %}<tool_call></tool_call>": SmolLM3Format,
    "{% if tools is not none %}{% endif %}[TOOL_CALLS]": MistralFormat,
    "{% if tools %}{% endif %}[TOOL_CALLS][ARGS]": MistralFormat,
    "{%- elif tools %}respond with <|tool_call|>": GraniteFormat,
    "{% if not tools is defined %}{% endif %}<|python_tag|>": Llama3Format,
    '{% if tools %}{% endif %}{"name": function name, "parameters": }': Llama3Format,
    "{% for t in tools %}{{ t }}{% endfor %}<start_function_call>": FunctionGemmaFormat,
    "{% for t in tools %}{{ t }}{% endfor %}<tool_call><function=f><parameter=p>": Qwen3CoderFormat,
}
NAMED = "{% if tools %}{% endif %}[TOOL_CALLS][ARGS]"
HERMES, SMOL, MISTRAL = (list(TEMPLATES)[index] for index in (1, 2, 3))
GRANITE, LLAMA, GEMMA, CODER = (list(TEMPLATES)[index] for index in (5, 6, 8, 9))
SCHEMAS = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    "now": {},
    "f": {"properties": {"on": {"type": "boolean"}}},
}
ADD = '{"name": "add", "arguments": {"a": 1, "b": "x}"}}'
MARKED = '{"name": "add", "arguments": {"b": "a </tool_call> \\" <tool_call>"}}'
ONE, NONE = ("add", '{"a": 1, "b": "x}"}'), ("now", "{}")
#: Template, answer, its text, its calls.
ANSWERS = [
    (HERMES, f"So:\n<tool_call>\n{ADD}\n</tool_call>", "So:", [ONE]),
    (HERMES, f'<tool_call>{ADD}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>', "", [ONE, NONE]),
    (HERMES, '<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, "<tool_call>\n" + ADD, "", [ONE]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": ', "", [("add", '{"a":')]),
    (HERMES, "a < b, <tool_call>no JSON</tool_call> then", "a < b, <tool_call>no JSON</tool_call> then", []),
    (HERMES, "It is <tool", "It is <tool", []),
    (HERMES, f"<tool_call>{MARKED}</tool_call> So.", " So.", [("add", '{"b": "a </tool_call> \\" <tool_call>"}')]),
    (HERMES, '<tool_call>"no </tool_call> <tool_call>{"name": "now"}', '<tool_call>"no </tool_call>', [NONE]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": <tool_call>', "", [("add", '{"a":')]),
    (HERMES, '<tool_call>{"name": "a\\x", "arguments": {}}', '<tool_call>{"name": "a\\x", "arguments": {}}', []),
    (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}', "", [("\\ud800", "{}")]),
    (HERMES, '<tool_call>{"arguments": {"b": "\\ud800"}, "name": "add"}', "", [("add", '{"b": "\\ud800"}')]),
    (SMOL, f"<tool_call>\n{ADD}\n</tool_call>", "", [ONE]),
    (MISTRAL, f'[TOOL_CALLS] [{ADD}, {{"name": "now", "arguments": {{}}}}]', "", [ONE, NONE]),
    (MISTRAL, f"Yes.[TOOL_CALLS][{ADD}", "Yes.", [ONE]),
    (NAMED, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x}"}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}', "", [ONE, NONE]),
    (NAMED, '[TOOL_CALLS]add{"a": 1, "b": "x}"}', "", [ONE]),
    (NAMED, "[TOOL_CALLS]add", "[TOOL_CALLS]add", []),
    (GRANITE, f"<|tool_call|>[{ADD}]", "", [ONE]),
    (GRANITE, f"<tool_call>[{ADD}]", "", [ONE]),
    (GRANITE, "Write <tool_call>, then", "Write <tool_call>, then", []),
    (GRANITE, '<|tool_call|>[{"name": "add", "arguments": {"a": <|tool_call|>[', "", [("add", '{"a":')]),
    (NAMED, '[TOOL_CALLS]add{"b": "[TOOL_CALLS]"}', "", [("add", '{"b": "[TOOL_CALLS]"}')]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1, "b": "x}"}}', "", [ONE]),
    (LLAMA, '{"type": "function", "name": "add", "parameters": {"a": 1, "b": "x}"}}', "", [ONE]),
    (LLAMA, f"<|python_tag|>{ADD}; {ADD}", "", [ONE, ONE]),
    (LLAMA, f"{ADD} and more", "", [ONE]),
    (LLAMA, f"{ADD}<|python_tag|>{ADD}", "", [ONE]),
    (LLAMA, f"{{x}} so <|python_tag|>{ADD}", "{x} so", [ONE]),
    (LLAMA, '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    (LLAMA, "{x} is a set", "{x} is a set", []),
    (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (LLAMA, " 3 < 4 ", " 3 < 4 ", []),
    (
        GEMMA,
        "<start_function_call>call:add{a:1,b:<escape>x}<escape>}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        "",
        [ONE, NONE],
    ),
    (
        GEMMA,
        '<start_function_call>call:f{o:{k:[true,1.5,<escape>y"<escape>]},p:word,q:-Infinity}<end_function_call>',
        "",
        [("f", '{"o": {"k": [true, 1.5, "y\\""]}, "p": "word", "q": "-Infinity"}')],
    ),
    (
        CODER,
        "So:\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx}\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "So:",
        [ONE, NONE],
    ),
    (
        CODER,
        "<tool_call><function=f><parameter=on>True</parameter><parameter=c>1\n2</parameter></function></tool_call>",
        "",
        [("f", '{"on": true, "c": "1\\n2"}')],
    ),
    (
        CODER,
        "<tool_call><function=f><parameter=c>NaN</parameter><parameter=d>1e999</parameter>"
        '<parameter=e>"\\udfff"</parameter><parameter=g>"\n</parameter></function></tool_call>',
        "",
        [("f", '{"c": "NaN", "d": "1e999", "e": "\\udfff", "g": "\\""}')],
    ),
    (CODER, "<tool_call>\n<function=now>", "", [NONE]),
    (CODER, "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
    (GEMMA, "<start_function_call>call:f{a<end_function_call>", "<start_function_call>call:f{a<end_function_call>", []),
]


def form(source: str, **special: int):
    tokenizer = SimpleNamespace(
        template_source=source, thought=lambda thinking: "", special_tokens=lambda marks: special
    )
    return tool_format(tokenizer)


@pytest.mark.parametrize(("source", "kind"), TEMPLATES.items())
def test_the_format_is_chosen_by_the_template(source, kind):
    assert format_class(source) is kind


def test_a_template_with_another_format_is_refused():
    for source in ("{% if tools %}{% endif %}<function=f>", "{{ tools }}<tool_call><function=f>"):
        with refused("unsupported_tools", ApiError):
            format_class(source)


@pytest.mark.parametrize(("source", "text", "content", "calls"), ANSWERS, ids=lambda value: str(value)[:30])
def test_an_answer_is_split_into_text_and_calls_however_it_comes(source, text, content, calls):
    for size in (1, 2, 3, 7, len(text)):
        splitter = CallSplitter(form(source), SCHEMAS, parallel=True)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        fed = [*(splitter.feed(piece) for piece in pieces), splitter.feed("", final=True)]
        changes = list(itertools.chain.from_iterable(part for _, part in fed))
        assert "".join(piece for piece, _ in fed) == content and splitter.called == bool(calls)
        begun = [change for change in changes if "id" in change]
        assert [change["function"]["name"] for change in begun] == [name for name, _ in calls]
        for index, (_, arguments) in enumerate(calls):
            own = [change["function"]["arguments"] for change in changes if change["index"] == index]
            assert "".join(own) == arguments and own[0] == ""
        assert all(change["function"]["arguments"] for change in changes if "id" not in change)
    whole, given = CallSplitter(form(source), SCHEMAS, parallel=True).whole(text)
    assert whole == content and [(each["function"]["name"], each["function"]["arguments"]) for each in given] == calls
    assert len(CallSplitter(form(source), SCHEMAS, parallel=False).whole(text)[1]) == min(1, len(calls))


def test_arguments_come_as_they_are_written():
    splitter = CallSplitter(form(HERMES), SCHEMAS, parallel=True)
    changes = [change for char in f"<tool_call>{ADD}</tool_call>" for change in splitter.feed(char)[1]]
    name, *arguments = changes
    assert name["function"] == {"name": "add", "arguments": ""} and len(arguments) > 10


def test_turns_are_as_the_template_takes_them():
    tools = [{"type": "function", "function": {"name": "add"}}]
    for source in (HERMES, GRANITE, LLAMA, GEMMA):
        assert form(source).turns(TURNS, tools) == TURNS and form(source).templated(tools) == tools
    assert form(SMOL).write([{"function": {"name": "add", "arguments": {"a": "é"}}}]).count("é") == 1
    written = "Well.\n" + '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert form(SMOL).turns(TURNS, tools)[1:] == [{"role": "assistant", "content": written}, TURNS[2]]
    answer, result = form(MISTRAL).turns(TURNS, tools)[1:]
    assert answer["tool_calls"][0]["id"] == result["tool_call_id"] and len(result["tool_call_id"]) == 9
    assert len(form(MISTRAL).call_id()) == 9 and TURNS[1]["tool_calls"][0]["id"] == "call_1"
    prompted = form("{{ messages }}")
    system, user, answer, results = prompted.turns([*TURNS, TURNS[2]], tools)
    assert json.dumps(tools[0]["function"]) in system["content"] and prompted.templated(tools) is None
    assert (user, answer["content"], results["role"]) == (TURNS[0], written, "user")
    assert results["content"].count("<tool_response>\n3\n</tool_response>") == 2
    brief = {"role": "system", "content": "Be brief."}
    assert prompted.turns([brief, *TURNS], tools)[0]["content"].startswith("Be brief.\n\n")


def test_a_schema_that_is_no_grammar_in_a_format_is_refused():
    grammar = form(GEMMA, **{"<escape>": 7}).grammar
    tool = FunctionTool("f", {"type": "object", "properties": {"a": {"anyOf": []}}}, True)
    with refused("unsupported_schema", ApiError):
        grammar([tool], required=True, parallel=True)
