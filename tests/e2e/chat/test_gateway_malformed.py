"""Invalid requests to ``moa-chat --serve`` as users run it: each is refused with a code that names the fault, costs one
line of the log, and harms no other request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("granian")

from support.chat.pooled_chat import ASSISTANT, USER
from support.chat.programs import Running, gateway
from support.malformed_framing import REQUESTS, SMUGGLED

CHAT, TEXT = "chat/completions", "completions"
TIMEOUT_S = 60
FULL, LESS, MISSING = "context_length_exceeded", "out_of_range", "missing_required_parameter"
TYPE, VALUE, UNSUPPORTED = "invalid_type", "invalid_value", "unsupported_parameter"


@pytest.fixture(scope="module")
def tools_endpoint(onnx_bundle: Path, server: Running) -> Iterator[Running]:
    """One of its own: an endpoint leaves lines of its log out if there are several hundred within seconds."""
    with gateway(onnx_bundle, server.url) as running:
        yield running


def post(endpoint: Running, path: str, data: object) -> httpx.Response:
    content = data if isinstance(data, bytes) else json.dumps(data)
    return httpx.post(f"{endpoint.url}/{path}", content=content, timeout=TIMEOUT_S, verify=False)


def good(endpoint: Running) -> None:
    """An ordinary request is answered as ever."""
    assert post(endpoint, CHAT, {"messages": [USER], "max_tokens": 1}).status_code == 200


def after(endpoint: Running, *requests: str) -> None:
    """The log has one line for each request, and an ordinary one is answered."""
    good(endpoint)
    for request in requests:
        refused = endpoint.process.stderr.readline()
        assert refused.startswith(f"moa-chat: {request} ") and refused.strip().isprintable()
    assert endpoint.process.stderr.readline().startswith(f"moa-chat: POST /v1/{CHAT} 200 ")


def user(content: object) -> list[dict]:
    return [{"role": "user", "content": content}]


FORM = "response_format"
IN_FORM = f"{FORM}.json_schema.schema"


def form(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


CHATS = [
    ("messages", "messages", MISSING, (None, [])),
    ("messages", "messages", TYPE, ("Hi", {"0": USER})),
    ("messages", "messages[0]", TYPE, ([3], [None])),
    ("messages", "messages", FULL, ([USER] * 600, user("a" * 20_000), user("word " * 600))),
    ("messages", "messages[0].role", MISSING, ([{"content": "x"}], [{"role": None, "content": "x"}])),
    ("messages", "messages[0].role", VALUE, ([{"role": "tool", "content": "x"}],)),
    ("messages", "messages[0].role", VALUE, ([{"role": ["user"], "content": "x"}], [{"role": {}, "content": "x"}])),
    ("messages", "messages[0].content", MISSING, ([{"role": "user"}], user(None))),
    ("messages", "messages[0].content", TYPE, (user({"text": "x"}), user(3))),
    ("messages", "messages[0].content", VALUE, (user([{"type": "image_url"}]), user([{"type": "text", "text": 3}]))),
    ("messages", "messages[0].content", VALUE, (user("\ud800"), user([{"type": "text", "text": "\udfff"}]))),
    ("messages", "messages[1].role", VALUE, ([USER, ASSISTANT],)),
    ("model", "model", TYPE, (3,)),
    ("temperature", "temperature", TYPE, ("hot", True)),
    ("temperature", "temperature", LESS, (3, -0.1, float("nan"))),
    ("top_p", "top_p", LESS, (0, float("inf"))),
    ("seed", "seed", TYPE, (1.5,)),
    ("max_tokens", "max_tokens", LESS, (0,)),
    ("max_completion_tokens", "max_completion_tokens", TYPE, ("9",)),
    ("stop", "stop", VALUE, (["a"] * 5, "", [1])),
    ("stream", "stream", TYPE, ("yes",)),
    ("stream_options", "stream_options", TYPE, ([],)),
    ("stream_options", "stream_options.include_usage", TYPE, ({"include_usage": 1},)),
    ("n", "n", LESS, (0, 9)),
    ("n", "n", TYPE, (True,)),
    ("offline", "offline", VALUE, ("perhaps",)),
    ("offline", "offline", TYPE, (True,)),
    ("top_k", "top_k", LESS, (-2, 1 << 32)),
    ("top_k", "top_k", TYPE, (1.5, "4")),
    ("min_p", "min_p", LESS, (-0.1, 1.5, float("nan"))),
    *((name, name, LESS, (-2.5, 3, float("nan"))) for name in ("presence_penalty", "frequency_penalty")),
    ("repetition_penalty", "repetition_penalty", LESS, (0, -1, 11)),
    ("logit_bias", "logit_bias", TYPE, ([[5, 1]],)),
    ("logit_bias", "logit_bias", VALUE, ({"a": 1}, {"-1": 1}, {"1" * 5000: 1}, {"4294967296": 1})),
    ("logit_bias", "logit_bias", LESS, ({"5": 101}, {"5": "1"}, {"5": True}, {str(n): 1 for n in range(1025)})),
    ("min_tokens", "min_tokens", LESS, (-1, 1 << 20)),
    *((name, name, UNSUPPORTED, (1.1,)) for name in ("typical_p", "repeat_penalty")),
    ("structured_outputs", "structured_outputs", UNSUPPORTED, ({},)),
    ("response_format", "response_format", TYPE, ("json", ["json_object"])),
    ("response_format", f"{FORM}.json_schema", TYPE, ({"type": "json_schema", "json_schema": []},)),
    ("response_format", IN_FORM, TYPE, [form(each) for each in ("{}", [1])]),
    ("response_format", IN_FORM, MISSING, ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {}})),
    ("response_format", f"{FORM}.type", MISSING, ({},)),
    ("response_format", f"{FORM}.type", VALUE, ({"type": "yaml"}, {"type": ["text"]})),
    ("response_format", FORM, VALUE, (form({"type": "nothing"}),)),
    ("response_format", IN_FORM, VALUE, [form({"$ref": each}) for each in ("#", "#/none", "https://example.com/a")]),
    ("guided_json", "guided_json", VALUE, ("{", {"type": "nothing"})),
    ("guided_regex", "guided_regex", VALUE, ("a{", "(" * 5000)),
    ("guided_grammar", "guided_grammar", VALUE, ("", "start: nothing", "root ::= 'a'", "\ud800", "a" * 140_000)),
    *(
        (name, name, UNSUPPORTED, (value,))
        for name, value in (("functions", [{"name": "f"}]), ("modalities", ["audio"]))
    ),
    ("logprobs", "logprobs", TYPE, (5, "true")),
    ("top_logprobs", "top_logprobs", VALUE, (3,)),  # without logprobs
    ("top_logprobs", "top_logprobs", LESS, (21, -1)),
]


def tool(name: object = "f", **own: object) -> dict:
    return {"type": "function", "function": {"name": name, **own}}


def schema(**own: object) -> dict:
    return {"tools": [tool(parameters={"type": "object", **own})], "tool_choice": "required"}


def deep(levels: int) -> dict:
    """A schema of many levels."""
    found: dict = {"type": "object"}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found}}
    return found


def called(call: object, **result: object) -> list:
    """A question, an answer with a call, and its result."""
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", **result}]


ONLY = "tools[0].function.parameters"
CALL = {"id": "1", **tool(arguments="{}")}
NAMED = {"type": "function", "function": {"name": "g"}}
#: Requests that are malformed or hostile in their tools, by the field and the code that the error names.
TOOLS: list[tuple[str, str, dict]] = [
    *(("tools", TYPE, {"tools": value}) for value in ("f", {"f": 1}, 3, True)),
    *(("tools[0]", TYPE, {"tools": [value]}) for value in (3, "f", [], None)),
    ("tools[0].type", MISSING, {"tools": [{}]}),
    *(
        ("tools[0].type", VALUE, {"tools": [{**tool(), "type": value}]})
        for value in ("web_search", 3, ["function"], {})
    ),
    ("tools[0].function", MISSING, {"tools": [{"type": "function"}]}),
    *(("tools[0].function", TYPE, {"tools": [{"type": "function", "function": value}]}) for value in ("f", [], 1)),
    ("tools[0].function.name", MISSING, {"tools": [tool(None)]}),
    *(("tools[0].function.name", TYPE, {"tools": [tool(value)]}) for value in (1, ["f"], True)),
    *(
        ("tools[0].function.name", VALUE, {"tools": [tool(value)]})
        for value in ("", "a b", "f" * 65, "\ud800", 'a"}', "\x1b[2J", "<|im_end|>", "é", "f\n")
    ),
    ("tools[1].function.name", MISSING, {"tools": [tool(), tool(None)]}),
    ("tools", VALUE, {"tools": [tool(), tool()]}),
    ("tools", LESS, {"tools": [tool(f"f{n}") for n in range(200)]}),
    ("tools[0].function.description", TYPE, {"tools": [tool(description=["x"])]}),
    ("tools[0].function.description", VALUE, {"tools": [tool(description="\udfff")]}),
    ("tools[0].function.strict", TYPE, {"tools": [tool(strict="yes")]}),
    *(("tools[0].function.parameters", TYPE, {"tools": [tool(parameters=value)]}) for value in ("{}", [], True)),
    *(
        ("tools[0].function.parameters", VALUE, {"tools": [tool(parameters=value)]})
        for value in (
            {"type": "array"},
            {"type": ["object"]},
            {"type": None, "a": deep(40)},
            deep(40),
            {"type": "object", "\ud800": 1},
            {"type": "object", "minimum": float("inf")},
        )
    ),
    *((ONLY, VALUE, schema(**own)) for own in ({"properties": 3}, {"properties": {"a": {"type": "nothing"}}})),
    *((ONLY, VALUE, schema(properties={"a": own})) for own in ({"$ref": "#/none"}, {"pattern": "("}, {"allOf": 1})),
    *((ONLY, VALUE, schema(required=[each], additionalProperties=False)) for each in ("a",)),
    (ONLY, VALUE, schema(properties={"a": {"$ref": "#"}}, required=["a"], additionalProperties=False)),
    *((ONLY, VALUE, schema(**{"$ref": each})) for each in ("#", "https://example.com/a")),
    (
        "tools[1].function.parameters",
        VALUE,
        {"tools": [tool("g", strict=True), tool(strict=True, parameters={"$ref": "#"})]},
    ),
    *(("tool_choice", VALUE, {"tools": [tool()], "tool_choice": value}) for value in ("any", 1, [], {}, NAMED, True)),
    *(
        ("tool_choice", VALUE, {"tools": [tool()], "tool_choice": {"type": "function", **v}})
        for v in ({}, {"function": 1})
    ),
    *(("tool_choice", VALUE, {"tool_choice": value}) for value in ("required", NAMED)),
    *(("parallel_tool_calls", TYPE, {"tools": [tool()], "parallel_tool_calls": value}) for value in ("no", 0)),
    *((name, VALUE, {"tools": [tool()], name: "a"}) for name in ("guided_json", "guided_regex", "guided_grammar")),
    *(
        ("messages[1].tool_calls", TYPE, {"messages": [USER, {**ASSISTANT, "tool_calls": v}, USER]})
        for v in ("f", {"a": 1})
    ),
    *(("messages[1].tool_calls[0]", TYPE, {"messages": called(value)}) for value in (1, "f", [])),
    ("messages[1].tool_calls[0].id", MISSING, {"messages": called({"function": {"name": "f"}})}),
    ("messages[1].tool_calls[0].id", TYPE, {"messages": called({**CALL, "id": 1})}),
    ("messages[1].tool_calls[0].type", VALUE, {"messages": called({**CALL, "type": "custom"})}),
    ("messages[1].tool_calls[0].function", MISSING, {"messages": called({"id": "1"})}),
    ("messages[1].tool_calls[0].function.name", MISSING, {"messages": called({"id": "1", "function": {}})}),
    ("messages[1].tool_calls[0].function.arguments", TYPE, {"messages": called({"id": "1", **tool(arguments={})})}),
    (
        "messages[1].tool_calls[0].function.arguments",
        VALUE,
        {"messages": called({"id": "1", **tool(arguments="\ud800")})},
    ),
    *(
        ("messages[2].content", code, {"messages": called(CALL, tool_call_id="1", content=v)})
        for code, v in ((MISSING, None), (TYPE, 1), (TYPE, {"a": 1}))
    ),
    *(
        ("messages[2].tool_call_id", VALUE, {"messages": called(CALL, content="x", tool_call_id=v)})
        for v in ("2", "", None)
    ),
    ("messages[2].tool_call_id", TYPE, {"messages": called(CALL, content="x", tool_call_id=1)}),
    ("messages[1].role", VALUE, {"messages": [USER, {"role": "tool", "content": "x"}]}),
    ("messages[1].role", VALUE, {"messages": called(CALL, content="x", tool_call_id="1")[:2]}),
    ("messages[3].role", VALUE, {"messages": [*called(CALL, content="x", tool_call_id="1"), {"role": "function"}]}),
    ("messages", FULL, {"tools": [tool(description="word " * 600)]}),
    (
        "messages",
        FULL,
        {"messages": called({"id": "1", **tool(arguments='"' + "a " * 900 + '"')}, content="x", tool_call_id="1")},
    ),
]
TEXTS = [
    ("prompt", "prompt", MISSING, (None, "", [""])),
    ("prompt", "prompt", VALUE, ([], ["a", "b"], [5, 6, 7], [[5, 6]], "a\ud800")),
    ("prompt", "prompt", TYPE, ({"text": "a"},)),
    ("prompt", "prompt", FULL, ("word " * 600, "a" * 20_000)),
    *((name, name, UNSUPPORTED, (value,)) for name, value in (("echo", True), ("suffix", "end"), ("best_of", 2))),
    ("logprobs", "logprobs", TYPE, (True, 1.5)),
    ("logprobs", "logprobs", LESS, (21, -1)),
]


@pytest.mark.parametrize(
    ("path", "name", "param", "code", "values"),
    [*((CHAT, *case) for case in CHATS), *((TEXT, *case) for case in TEXTS)],
    ids=lambda value: str(value)[:30],
)
def test_an_invalid_field_is_named(endpoint, path, name, param, code, values):
    for value in values:
        answered = post(endpoint, path, {"messages": [USER], "prompt": "Once", name: value})
        error = answered.json()["error"]
        assert answered.status_code == 400 and error["type"] == "invalid_request_error"
        assert (error["param"], error["code"]) == (param, code) and error["message"].isprintable()
        assert param.partition("[")[0].rstrip("s") in error["message"] or code == FULL
    after(endpoint, *[f"POST /v1/{path} 400"] * len(values))


@pytest.mark.parametrize(("param", "code", "fields"), TOOLS, ids=lambda value: str(value)[:60])
def test_tools_that_are_malformed_or_hostile_are_refused(tools_endpoint, param, code, fields):
    answered = post(tools_endpoint, CHAT, {"messages": [USER], "max_tokens": 4, "stream": True, **fields})
    error = answered.json()["error"]
    assert (answered.status_code, error["param"], error["code"]) == (400, param, code), error
    assert error["message"].isprintable() and len(error["message"]) < 1000 and " | " not in error["message"]
    no_traceback(tools_endpoint)


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        *((data, 400, "invalid_json") for data in (b"", b"{", b"\xff\xfe", b"messages=Hi&model=target")),
        *((data, 400, "invalid_json") for data in (b"[" * 100_000, b'{"messages":' * 50_000)),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
        *((data, 400, TYPE) for data in (b"[1]", b"null", b'"text"')),
        (b'{"model": "gpt-5", "messages": []}', 404, "model_not_found"),
        (b'{"model": "\\u001b[2J", "messages": []}', 404, "model_not_found"),
        (b" " * ((1 << 20) + 1), 413, "body_too_large"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_body_that_is_no_request_is_refused(endpoint, data, status, code):
    for path in (CHAT, TEXT):
        answered = post(endpoint, path, data)
        assert answered.status_code == status and answered.json()["error"]["code"] == code
        assert answered.json()["error"]["message"].isprintable()
    after(endpoint, *(f"POST /v1/{path} {status}" for path in (CHAT, TEXT)))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/%1b[2Jnowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
    ],
)
def test_an_unknown_route_is_refused_with_the_known_ones(endpoint, method, path, status):
    answered = httpx.request(method, f"http://127.0.0.1:{endpoint.port}{path}", timeout=TIMEOUT_S, verify=False)
    assert answered.status_code == status and answered.json()["error"]["code"] == "no_such_route"
    assert "GET /v1/models/{name}" in answered.json()["error"]["message"]
    after(endpoint, method)


def send(endpoint: Running, *parts: bytes, ends: bool = False) -> bytes:
    """Send parts over one connection, and return all that is answered after the last one."""
    answered = b""
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=TIMEOUT_S) as client:
        for part in parts[:-1]:
            client.sendall(part)
            answered += client.recv(1 << 16)
        client.sendall(parts[-1])
        if ends:
            client.shutdown(socket.SHUT_WR)
        answered += b"".join(iter(lambda: client.recv(1 << 16), b""))
    return answered


def no_traceback(endpoint: Running) -> None:
    """The log has none, and an ordinary request is answered."""
    good(endpoint)
    said = [endpoint.process.stderr.readline()]
    while " 200 in " not in said[-1]:
        said.append(endpoint.process.stderr.readline())
    assert not any("Traceback" in line or 'File "' in line for line in said)


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # as of a client with TLS
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bytes_that_are_no_http_end_their_connection_alone(endpoint, sent):
    answered = send(endpoint, sent, ends=True)
    assert b" 400 " in answered or not answered
    no_traceback(endpoint)


@pytest.mark.parametrize("name", ["length and chunks", "a folded field", "a signed length"])
def test_nothing_after_a_request_that_a_proxy_may_end_elsewhere_is_answered(endpoint, name):
    """All of them: ``tests/integration/server/test_edge.py``, on the same server."""
    answered = send(endpoint, REQUESTS[name] + SMUGGLED)
    assert answered.count(b"HTTP/1.1 ") == 1
    no_traceback(endpoint)


def test_a_broken_chunk_after_an_answer_ends_its_connection_without_a_traceback(endpoint):
    begun = b"POST /v1/nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    answered = send(endpoint, begun, b"0\r\n\n")
    assert answered.count(b"HTTP/1.1 404 ") == answered.count(b"HTTP/1.1 ") == 1
    no_traceback(endpoint)
