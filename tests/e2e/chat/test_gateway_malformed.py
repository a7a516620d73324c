"""Requests that cannot be meant, sent to ``moa-chat --serve`` as users run it: each is refused in a sentence that names
what is wrong, costs one line of the log, and harms no other."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("uvicorn")

from support.chat.pooled_chat import ASSISTANT, USER
from support.chat.programs import Running, gateway, verifier
from support.malformed_framing import REQUESTS, SMUGGLED

CHAT, TEXT = "chat/completions", "completions"
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def endpoint(onnx_bundle: Path, tiny_target: Path, tiny_drafter: Path) -> Iterator[Running]:
    with verifier(tiny_target, tiny_drafter) as server, gateway(onnx_bundle, server.url) as running:
        yield running


def after(endpoint: Running, request: str) -> None:
    """The log has one line for it, and an ordinary request is answered as ever."""
    good = httpx.post(f"{endpoint.url}/{CHAT}", json={"messages": [USER], "max_tokens": 1}, timeout=TIMEOUT_S)
    assert good.status_code == 200 and good.json()["choices"][0]["finish_reason"] == "length"
    refused, answered = (endpoint.process.stderr.readline() for _ in range(2))
    assert refused.startswith(f"moa-chat: {request} ") and refused.strip().isprintable()
    assert answered.startswith(f"moa-chat: POST /v1/{CHAT} 200 ")


def user(content: object) -> dict:
    return {"role": "user", "content": content}


CHATS = [
    ({"messages": None}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "messages is empty"),
    ({"messages": "Hi"}, "messages", "must be a list, not a text"),
    ({"messages": {"0": USER}}, "messages", "must be a list, not an object"),
    ({"messages": [3]}, "messages[0]", "must be an object, not a whole number"),
    ({"messages": [None]}, "messages[0]", "must be an object, not null"),
    ({"messages": [USER] * 600}, "messages", "messages are 600; the target's context holds 512 tokens"),
    ({"messages": [user("a" * 20_000)]}, "messages", "20000 characters; the target's context holds 512 tokens"),
    ({"messages": [user("word " * 600)]}, "messages", "conversation would have"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "one of system, developer, user, assistant, not None"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "one of system, developer, user"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "one of system, developer, user"),
    ({"messages": [{"role": {}, "content": "x"}]}, "messages[0].role", "one of system, developer, user"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a text or a list of parts, not null"),
    ({"messages": [user({"text": "x"})]}, "messages[0].content", "must be a text or a list of parts, not an object"),
    ({"messages": [user([{"type": "image_url"}])]}, "messages[0].content", "only hold parts"),
    ({"messages": [user([{"type": "text", "text": 3}])]}, "messages[0].content", "only hold parts"),
    ({"messages": [user("\ud800")]}, "messages[0].content", "half of a surrogate pair"),
    ({"messages": [user([{"type": "text", "text": "\udfff"}])]}, "messages[0].content", "half of a surrogate pair"),
    ({"messages": [USER, ASSISTANT]}, "messages[1].role", "must be the user's"),
    ({"messages": [{**ASSISTANT, "tool_calls": [{}]}, USER]}, "messages[0].tool_calls", "not supported"),
    ({"model": 3}, "model", "must be a text, not a whole number"),
    ({"temperature": "hot"}, "temperature", "temperature must be a number, not a text"),
    ({"temperature": True}, "temperature", "not true or false"),
    ({"temperature": 3}, "temperature", "between 0 and 2, not 3"),
    ({"temperature": -0.1}, "temperature", "between 0 and 2, not -0.1"),
    ({"temperature": float("nan")}, "temperature", "between 0 and 2, not nan"),
    ({"top_p": 0}, "top_p", "above 0 and at most 1, not 0"),
    ({"top_p": float("inf")}, "top_p", "above 0 and at most 1, not inf"),
    ({"seed": 1.5}, "seed", "must be a whole number, not a number"),
    ({"max_tokens": 0}, "max_tokens", "at least 1, not 0"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens", "must be a whole number"),
    ({"stop": ["a"] * 5}, "stop", "up to 4"),
    ({"stop": ""}, "stop", "none empty"),
    ({"stop": [1]}, "stop", "must be a text or up to 4 of them"),
    ({"stream": "yes"}, "stream", "must be true or false, not a text"),
    ({"stream_options": []}, "stream_options", "must be an object, not a list"),
    ({"stream_options": {"include_usage": 1}}, "include_usage", "must be true or false"),
    ({"n": 0}, "n", "between 1 and 8, not 0"),
    ({"n": 9}, "n", "between 1 and 8, not 9"),
    ({"n": True}, "n", "must be a whole number"),
    ({"offline": "perhaps"}, "offline", "one of writer, drafter, off, not 'perhaps'"),
    ({"offline": True}, "offline", "must be a text"),
]
UNSUPPORTED = {
    "top_k": 40,
    "min_p": 0.05,
    "typical_p": 0.9,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "logit_bias": {"5": 100},
    "guided_json": {},
    "min_tokens": 4,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "response_format": {"type": "json_object"},
    "logprobs": True,
    "top_logprobs": 3,
    "modalities": ["audio"],
}
TEXTS = [
    ({"prompt": None}, "prompt", "prompt is missing: the text that the target is to write on"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": [""]}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "a text, or a list of one"),
    ({"prompt": ["a", "b"]}, "prompt", "several texts, are not understood here"),
    ({"prompt": [5, 6, 7]}, "prompt", "token ids, or several texts, are not understood here"),
    ({"prompt": [[5, 6]]}, "prompt", "token ids, or several texts, are not understood here"),
    ({"prompt": {"text": "a"}}, "prompt", "must be a text or a list, not an object"),
    ({"prompt": "a\ud800"}, "prompt", "half of a surrogate pair"),
    ({"prompt": "word " * 600}, "prompt", "the text would have"),
    ({"prompt": "a" * 20_000}, "prompt", "20000 characters; the target's context holds 512 tokens"),
    ({"echo": True}, "echo", "not supported here"),
    ({"suffix": "end"}, "suffix", "not supported here"),
    ({"best_of": 2}, "best_of", "not supported here"),
    ({"logprobs": 0}, "logprobs", "not supported here"),
    ({"logprobs": 5}, "logprobs", "not supported here"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        *((CHAT, *case) for case in CHATS),
        *((CHAT, {name: value}, name, f"{name} is not supported here") for name, value in UNSUPPORTED.items()),
        *((TEXT, *case) for case in TEXTS),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_field_that_cannot_be_meant_is_named(endpoint, path, fields, param, said):
    body = {"messages": [USER], **fields} if path == CHAT else {"prompt": "Once", **fields}
    answered = httpx.post(f"{endpoint.url}/{path}", content=json.dumps(body), timeout=TIMEOUT_S)
    error = answered.json()["error"]
    assert answered.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and said in error["message"] and error["message"].isprintable()
    after(endpoint, f"POST /v1/{path} 400")


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (b"", 400, "the body is not JSON"),
        (b"{", 400, "the body is not JSON"),
        (b"[1]", 400, "must be a JSON object, not a list"),
        (b"null", 400, "must be a JSON object, not null"),
        (b'"text"', 400, "must be a JSON object, not a text"),
        (b"\xff\xfe", 400, "the body is not JSON"),
        (b"[" * 100_000, 400, "the body is not JSON"),
        (b'{"messages":' * 50_000, 400, "the body is not JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "the body is not JSON"),
        (b"messages=Hi&model=target", 400, "the body is not JSON"),
        (b'{"model": "gpt-5", "messages": []}', 404, "there is no model 'gpt-5' here, only 'target'"),
        (b'{"model": "\\u001b[2J", "messages": []}', 404, "there is no model '\\x1b[2J' here"),
        (b" " * ((1 << 20) + 1), 413, "the body is larger than 1 MiB"),
    ],
    ids=lambda value: repr(value)[:30],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_body_that_is_no_request(endpoint, path, data, status, said):
    answered = httpx.post(f"{endpoint.url}/{path}", content=data, timeout=TIMEOUT_S)
    assert answered.status_code == status and said in answered.json()["error"]["message"]
    after(endpoint, f"POST /v1/{path} {status}")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/v1/%1b[2Jnowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
    ],
)
def test_what_is_not_there_says_what_there_is(endpoint, method, path, status):
    answered = httpx.request(method, f"http://127.0.0.1:{endpoint.port}{path}", timeout=TIMEOUT_S)
    assert answered.status_code == status
    assert "there is GET /v1/models, GET /v1/models/{name}, POST /v1/chat" in answered.json()["error"]["message"]
    after(endpoint, method)


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
def test_what_is_no_http_ends_its_connection_alone(endpoint, sent):
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=TIMEOUT_S) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        answered = client.recv(1 << 16)
    assert b" 400 " in answered or not answered
    and_no_traceback(endpoint)


def and_no_traceback(endpoint: Running) -> None:
    """The log has none, and an ordinary request is answered as ever."""
    body = {"messages": [USER], "max_tokens": 1}
    assert httpx.post(f"{endpoint.url}/{CHAT}", json=body, timeout=TIMEOUT_S).status_code == 200
    said = [endpoint.process.stderr.readline()]
    while " 200 in " not in said[-1]:
        said.append(endpoint.process.stderr.readline())
    assert not any("Traceback" in line or 'File "' in line for line in said)


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.parametrize("sent", REQUESTS.values(), ids=REQUESTS)
def test_what_a_proxy_may_end_elsewhere_is_refused_and_nothing_behind_it_answered(endpoint, sent):
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=TIMEOUT_S) as client:
        client.sendall(sent + SMUGGLED)
        answered = read_all(client)
    assert b" 400 " in answered and answered.count(b"HTTP/1.1 ") == 1
    and_no_traceback(endpoint)


def test_a_broken_chunk_behind_an_answer_ends_its_connection_without_a_traceback(endpoint):
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=TIMEOUT_S) as client:
        client.sendall(b"POST /v1/nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        answered = client.recv(1 << 16)
        client.sendall(b"0\r\n\n")
        answered += read_all(client)
    assert answered.count(b"HTTP/1.1 404 ") == answered.count(b"HTTP/1.1 ") == 1
    and_no_traceback(endpoint)
