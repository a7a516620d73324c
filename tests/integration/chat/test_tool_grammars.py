"""Grammars of calls, as llguidance reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

pytest.importorskip("starlette")
llguidance = pytest.importorskip("llguidance")

from moa_chat.gateway.errors import ApiError  # noqa: E402
from moa_chat.gateway.tool_formats.functiongemma import FunctionGemmaFormat  # noqa: E402
from moa_chat.gateway.tool_formats.granite import GraniteFormat  # noqa: E402
from moa_chat.gateway.tool_formats.hermes import HermesFormat  # noqa: E402
from moa_chat.gateway.tool_formats.llama3 import Llama3Format  # noqa: E402
from moa_chat.gateway.tool_formats.mistral import MistralFormat  # noqa: E402
from moa_chat.gateway.tool_formats.qwen3_coder import Qwen3CoderFormat  # noqa: E402
from moa_chat.gateway.tool_formats.tool_format import FunctionTool  # noqa: E402
from moa_runtime.grammar.after_reasoning import after_reasoning  # noqa: E402
from moa_runtime.session.events import Grammar, Sampling  # noqa: E402
from support.refusals import refused  # noqa: E402

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [FunctionTool("add", ADD, strict=True), FunctionTool("now", NOTHING)]
OTHER = {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}
#: Format, template, a call, what is between two.
FORMATS = [
    (HermesFormat, "", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "\n"),
    (Llama3Format, "", '{"name": "add", "parameters": {"a": 1}}', None),
    (MistralFormat, "", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', None),
    (MistralFormat, "[ARGS]", '[TOOL_CALLS]add[ARGS]{"a": 1}', ""),
    (GraniteFormat, "", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]', None),
    (
        Qwen3CoderFormat,
        "",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "\n",
    ),
    (FunctionGemmaFormat, "", "<start_function_call>call:add{a:1}<end_function_call>", ""),
]


@pytest.fixture(scope="module")
def folder(tiny_target: Path, tmp_path_factory) -> Path:
    """A tokenizer without the marks as tokens, and one with."""
    made = tmp_path_factory.mktemp("tokenizers")
    for name, marks in (("text", []), ("special", [mark for form, *_ in FORMATS for mark in form.marks])):
        tokenizer = Tokenizer.from_file(str(tiny_target / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
        tokenizer.save(str(made / name))
    return made


def read(file: Path, grammar: str, text: str) -> str:
    """How far the grammar takes a text: ``whole``, ``begun`` or ``no``."""
    tokenizer = Tokenizer.from_file(str(file))
    vocabulary = llguidance.LLTokenizer(str(file), tokenizer.get_vocab_size(), [2])
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    if matcher.try_consume_tokens(tokens) < len(tokens):
        return "no"
    return "whole" if matcher.is_accepting() else "begun"


@pytest.mark.parametrize("kind", ["text", "special"])
@pytest.mark.parametrize(("form", "source", "call", "between"), FORMATS)
def test_an_answer_is_a_call_a_text_or_an_object(folder, kind, form, source, call, between):
    file = folder / kind
    tokenizer = Tokenizer.from_file(str(file))
    special = {mark: found for mark in form.marks if (found := tokenizer.token_to_id(mark)) is not None}
    written, wrong = form(source, special), call.replace("1", "true")
    none = call.replace("add", "sub")

    def reads(text: str, *, required: bool = False, parallel: bool = False, **options) -> str:
        grammar = written.grammar(TOOLS, required=required, parallel=parallel, **options)
        return read(file, grammar, text)

    assert [reads(text, required=True) for text in (call, wrong, none, "Hi", "Hi " + call)] == ["whole", *["no"] * 4]
    assert reads("Hi there, 1 < 2.") == reads("") == "whole" and reads(call) == "whole"
    for opening in written.other_openings if kind == "text" else ():  # no token of theirs
        assert [reads(opening + each.removeprefix(written.opening)) for each in (call, wrong)] == ["whole", "no"]
    assert reads("\n Hi") == "whole" and reads("\n " + wrong) == "no"
    assert reads(wrong) == "no" and (reads("Hi " + call) == "whole" or form is Llama3Format)
    twice = f"{call}{between}{call}"
    assert reads(twice, required=True, parallel=True) == ("no" if between is None else "whole")
    assert reads(twice, required=True) == "no"
    both = [reads(text, otherwise=OTHER) for text in ('{"q": 1}', '{"q": "1"}', "Hi")]
    assert both == ["whole", "no", "no"]
    marked = "<|python_tag|>" + call if form is Llama3Format else call
    assert reads(marked, otherwise=OTHER) == "whole"
    thought = {"required": True, "thought": "may"}
    assert reads("<think>Hm.</think>\n\n" + call, **thought) == reads(call, **thought) == "whole"
    thought["thought"] = "begun"
    assert reads("Hm.</think>\n\n" + call, **thought) == "whole" and reads("Hm.", **thought) == "begun"


@pytest.mark.parametrize(("form", "source", "call"), [(each[0], each[1], each[2]) for each in FORMATS[:5]])
def test_the_white_space_of_arguments_may_be_the_schemas_own(folder, form, source, call):
    spaced = call.replace('{"a": 1}', '{ "a" :1 }')
    tools = [FunctionTool("add", ADD), FunctionTool("add", {**ADD, "x-guidance": {"whitespace_flexible": True}})]
    fixed, own = (form(source, {}).grammar([tool], required=True, parallel=False) for tool in tools)
    assert [read(folder / "text", fixed, text) for text in (call, spaced)] == ["whole", "no"]
    assert [read(folder / "text", own, text) for text in (call, spaced)] == ["whole", "whole"]


def test_texts_of_xml_stand_without_quotes_and_their_patterns_are_refused(folder):
    parts = {"t": {"type": "string"}, "k": {"type": "string", "enum": ["a b"]}, "n": {"type": ["integer", "null"]}}
    tool = FunctionTool("f", {"type": "object", "properties": parts, "required": ["t", "k"]})
    begins, ends = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"
    texts = [
        f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in (("t", '<"\n{'), ("k", "a b"), ("n", "null"))
    ]

    def reads(*members: str, required: bool = True, strict: bool = True) -> str:
        tools = [replace(tool, strict=strict)]
        grammar = Qwen3CoderFormat("", {}).grammar(tools, required=required, parallel=False)
        return read(folder / "text", grammar, begins + "".join(members) + ends)

    assert reads(*texts) == reads(*texts[:2]) == "whole"
    assert reads(texts[0]) == reads(texts[0], texts[1].replace("a b", "c")) == "no"
    assert reads("<parameter=z>\n1\n</parameter>\n", required=False, strict=False) == "whole"
    patterned = FunctionTool("f", {"type": "object", "properties": {"t": {"type": "string", "pattern": "a"}}})
    with refused("unsupported_schema", ApiError):
        Qwen3CoderFormat("", {}).grammar([patterned], required=True, parallel=False)


def test_what_is_no_json_conforms_to_its_schema_or_is_refused(folder):
    parts = {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}, "c": {"title": "Any."}}
    tools = [FunctionTool("f", {"type": "object", "properties": parts}, strict=True), FunctionTool("g", ADD)]

    def reads(arguments: str, name: str = "f") -> str:
        grammar = FunctionGemmaFormat("", {}).grammar(tools, required=False, parallel=False)
        return read(folder / "text", grammar, f"<start_function_call>call:{name}{arguments}<end_function_call>")

    for arguments in ("{}", "{a:-7,b:[<escape>x, y<escape>,<escape><escape>]}", "{c:{k:[true,<escape>]<escape>]}}"):
        assert reads(arguments) == "whole"
    assert [reads(arguments) for arguments in ("{a:07}", "{a:1.5}", "{b:[x]}", "{d:1}")] == ["no"] * 4
    assert reads("{a:<escape>x<escape>,z:[]}", "g") == "whole"  # of a tool that is not strict


@pytest.mark.parametrize("form", [FunctionGemmaFormat, Qwen3CoderFormat])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 3},
        {"required": 3},
        {"properties": {"a": 3}},
        {"properties": {"a": {"type": "string", "pattern": "a"}}},
        {"properties": {"b": {}}, "required": ["a"]},
    ],
)
def test_a_schema_without_a_grammar_is_refused(form, schema):
    with refused("unsupported_schema", ApiError):
        form("", {}).grammar([FunctionTool("f", {"type": "object", **schema})], required=True, parallel=False)


@pytest.mark.parametrize(
    ("thought", "text"), [("may", "<think>{1}</think>\n\n"), ("may", ""), ("begun", "{1}</think>")]
)
def test_json_may_follow_reasoning(folder, thought, text):
    asked = Sampling(grammar=Grammar("json_schema", json.dumps(OTHER)))
    grammar = after_reasoning(asked, thought, {}).grammar
    assert read(folder / "text", grammar.text, text + '{"q": 1}') == "whole"
    assert read(folder / "text", grammar.text, text + '{"q": "1"}') == "no"
    for other in (Grammar("regex", "a"), Grammar("json_schema", "{"), Grammar("json_schema", "true"), None):
        assert after_reasoning(replace(asked, grammar=other), thought, {}).grammar == other
    assert after_reasoning(asked, "", {}) == asked
