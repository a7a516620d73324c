"""OpenAI's Responses over HTTP, with chats that play scripts: what is asked, and what is answered and streamed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from moa_chat.gateway.app import Access, create_app
from moa_chat.gateway.pool import ChatPool
from moa_chat.gateway.tool_formats.hermes import HermesFormat
from moa_runtime.chat import ChatError
from moa_runtime.events import FinishReason, Origin, TokenLogprobs, TokenOrigin
from moa_runtime.session.events import Grammar
from support.chat.fake_chat import finished, update
from support.chat.pooled_chat import DEFAULTS, PooledChat

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
CALLING = 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
KINDS = ("added", "delta", "done")


def ask(*script, **fields):
    """What is answered to a request, and the chat that it was answered by; ``stream`` gives the events."""
    chats = []

    async def connect(needs_verifier: bool) -> PooledChat:
        chats.append(PooledChat(list(script)))
        return chats[-1]

    pool, access = ChatPool(connect), Access("")
    app = create_app(pool, pool, DEFAULTS, access, lambda line: None, tool_format=lambda: HermesFormat("", {}))
    answered = TestClient(app, base_url="http://127.0.0.1:11435").post(
        "/v1/responses", content=json.dumps({"input": "Hi", **fields})
    )
    if not fields.get("stream") or answered.status_code != 200:
        return answered.json(), chats[-1] if chats else None
    events = []
    for block in answered.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events, chats[-1]


def deep(levels: int) -> list:
    """A list of many levels."""
    found: list = []
    for _ in range(levels):
        found = [found]
    return found


def without_ids(response) -> dict:
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return {**response, "id": "", "created_at": 0, "output": output}


def test_an_answer_is_a_response():
    items = [
        {"role": "system", "content": "Rhyme."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
        {"role": "user", "content": "And?"},
    ]
    fields = {"instructions": "Be brief.", "max_output_tokens": 9, "temperature": 0.5, "truncation": "auto"}
    response, chat = ask(finished("Paris"), input=items, metadata={"a": "b"}, **fields)
    assert chat.asked == ["And?"] and chat.overflow == "trim" and chat.sampling[0].temperature == 0.5
    assert [turn["content"] for turn in chat.messages][:3] == ["Be brief.\n\nRhyme.", "Hi", "Hello."]
    [item] = response["output"]
    assert (
        item["type"] == "message"
        and item["role"] == "assistant"
        and item["status"] == response["status"] == "completed"
    )
    assert item["content"] == [{"type": "output_text", "text": "Paris", "annotations": [], "logprobs": []}]
    expected = {**fields, "object": "response", "model": "tiny", "metadata": {"a": "b"}, "error": None, "store": False}
    assert {name: response[name] for name in expected} == expected
    assert response["id"].startswith("resp_")
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert [response["usage"][f"{name}_tokens"] for name in ("input", "output", "total")] == [5, 5, 10]
    cut, chat = ask(finished("Par", FinishReason.LENGTH))
    assert cut["status"] == cut["output"][0]["status"] == "incomplete" and chat.overflow == "error"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Paris", ["message"]),
        ("", ["message"]),
        ("<think>So</think>Paris", ["reasoning", "message"]),
        (CALLING, ["message", "function_call"]),
        ("\n".join([CALLING[6:]] * 2), ["function_call"] * 2),
    ],
)
def test_a_stream_is_the_response_piece_by_piece(text, kinds):
    whole, _ = ask(finished(text), tools=[TOOL])
    assert [item["type"] for item in whole["output"]] == kinds
    updates = [update(text[:length]) for length in range(1, len(text))]
    [created, begun, *events, completed], _ = ask(*updates, finished(text), tools=[TOOL], stream=True)
    assert (created["type"], begun["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["output"] == [] and completed["type"] == "response.completed"
    assert without_ids(completed["response"]) == without_ids(whole)
    items = completed["response"]["output"]
    for index, item in enumerate(items):
        own = [event for event in events if event["output_index"] == index]
        assert own[0]["type"] == "response.output_item.added" and own[-1]["type"] == "response.output_item.done"
        assert own[0]["item"]["status"] == "in_progress" and own[-1]["item"] == item
        pieces = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert pieces == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
        assert all(event["item_id"] == item["id"] for event in own[1:-1])
    assert [event["output_index"] for event in events] == sorted(event["output_index"] for event in events)


def test_calls_and_their_results_are_parts_of_the_conversation():
    response, chat = ask(finished(CALLING), tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    said, call = response["output"]
    assert (call["name"], call["arguments"]) == ("add", '{"a": 1}') and said["content"][0]["text"] == "Well."
    assert response["tools"] == [TOOL] and chat.sampling[0].grammar is not None
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    _, chat = ask(finished("3"), input=[{"role": "user", "content": "?"}, said, call, result], tools=[TOOL])
    assert chat.asked[0]["role"] == "tool" and chat.asked[0]["content"] == "3"
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    _, chat = ask(finished("3"), input=[{"role": "user", "content": "?"}, call, said, result], tools=[TOOL])
    assert chat.messages[1]["content"] == "Well." and chat.asked[0]["content"] == "3"


def test_a_form_and_logprobs_are_those_of_a_chat_completion():
    form = {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}
    response, chat = ask(finished("{}"), text={"format": form})
    assert chat.sampling[0].grammar == Grammar("json_schema", json.dumps(SCHEMA)) and response["text"] == {
        "format": form
    }
    known = TokenLogprobs(-0.5, (97,), (-0.25,))
    answer = replace(finished("ab"), tokens=tuple(TokenOrigin(ord(one), Origin.DRAFTED, True, known) for one in "ab"))
    for fields in ({"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}):
        response, chat = ask(answer, **fields)
        assert chat.sampling[0].logprobs == fields.get("top_logprobs", 0)
        assert [each["token"] for each in response["output"][0]["content"][0]["logprobs"]] == ["a", "b"]
    events, _ = ask(answer, top_logprobs=1, stream=True)
    told = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [each["logprob"] for part in told for each in part] == [-0.5, -0.5]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "missing_required_parameter"),
        ({"input": 3}, "input", "invalid_type"),
        ({"input": ["Hi"]}, "input", "invalid_type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "invalid_value"),
        ({"input": [{"role": "user", "content": 3}]}, "input", "invalid_type"),
        ({"input": [{"role": "assistant", "content": "Hi"}]}, "input", "invalid_value"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "3"}]}, "input", "invalid_value"),
        ({"input": "\ud800"}, "input", "invalid_value"),
        ({"instructions": 3}, "instructions", "invalid_type"),
        ({"max_output_tokens": 0}, "max_output_tokens", "out_of_range"),
        ({"temperature": 3}, "temperature", "out_of_range"),
        ({"top_logprobs": 21}, "top_logprobs", "out_of_range"),
        ({"truncation": "middle"}, "truncation", "invalid_value"),
        ({"include": ["x"]}, "include", "invalid_value"),
        ({"include": [3]}, "include[0]", "invalid_type"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing_required_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"tools": 3}, "tools", "invalid_type"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        *(({name: "resp_1"}, name, "unsupported_parameter") for name in ("previous_response_id", "conversation")),
        *(({name: True}, name, "unsupported_parameter") for name in ("store", "background")),
        ({"model": "gpt-5"}, "model", "model_not_found"),
        ({"metadata": {"a": "\ud800"}}, "metadata", "invalid_value"),
        ({"text": {"format": {"type": "text", "name": "\ud800"}}}, "text", "invalid_value"),
        ({"tools": [{**TOOL, "of": "\ud800"}]}, "tools", "invalid_value"),
        ({"tools": [{**TOOL, "parameters": {"minimum": float("nan")}}]}, "tools", "invalid_value"),
        ({"text": {"format": {"type": "text", "of": float("inf")}}}, "text", "invalid_value"),
        ({"metadata": {"a": deep(200)}}, "metadata", "invalid_value"),
        ({"tool_choice": deep(200)}, "tool_choice", "invalid_value"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "add", "of": "\ud800"}},
            "tool_choice",
            "invalid_value",
        ),
    ],
)
def test_an_invalid_field_is_named(fields, param, code):
    answered, chat = ask(**fields)
    assert (answered["error"]["param"], answered["error"]["code"]) == (param, code) and chat is None
    assert param.partition(".")[0] in answered["error"]["message"] and answered["error"]["message"].isprintable()


def test_what_is_off_may_be_said_and_an_error_after_the_first_text_ends_the_stream():
    off = {"include": ["reasoning.encrypted_content"]}
    off |= {"store": False, "background": False, "previous_response_id": None, "tools": [], "parallel_tool_calls": True}
    assert ask(finished("a"), **off)[0]["status"] == "completed"
    [*_, error, failed], _ = ask(update("a"), ChatError("REPLACED", code="refused"), stream=True)
    assert (error["type"], error["code"], error["message"]) == ("error", "verifier_refused", "REPLACED")
    assert failed["type"] == "response.failed" and failed["response"]["error"]["code"] == "verifier_refused"
