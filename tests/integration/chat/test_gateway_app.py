"""The OpenAI-compatible endpoint over HTTP, with chats that play scripts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from moa_chat.gateway.app import LOOPBACK_NAMES, Access, create_app
from moa_chat.gateway.pool import ChatPool
from moa_runtime.chat import ChatError, ContextFullError
from moa_runtime.transport import ConnectError
from support.chat.fake_chat import HANG, finished, update
from support.chat.pooled_chat import DEFAULTS, USER, PooledChat


def client(*scripts, token: str = "", allow: tuple[str, ...] = (), lines: list[str] | None = None) -> TestClient:
    async def connect(needs_verifier: bool) -> PooledChat:
        return PooledChat(*scripts)

    say = lines.append if lines is not None else lambda line: None
    app = create_app(ChatPool(connect), ChatPool(connect), DEFAULTS, Access(token, allow, LOOPBACK_NAMES), say)
    return TestClient(app, base_url="http://127.0.0.1:11435")


def ask(client: TestClient, **fields):
    headers = fields.pop("headers", {})
    return client.post("/v1/chat/completions", json={"messages": [USER], **fields}, headers=headers)


def events_of(answered) -> list[dict]:
    """Of a stream that has come to its end."""
    events = answered.text.removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]" and all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_models():
    app = client()  # one: another would have been created in another second
    models = app.get("/v1/models").json()
    assert models["object"] == "list" and [model["id"] for model in models["data"]] == ["tiny"]
    assert app.get("/v1/models/tiny").json() == models["data"][0]
    assert app.get("/v1/models/other").status_code == 404


def test_a_stream_is_a_series_of_events():
    lines: list[str] = []
    answered = ask(client([update("a\n"), finished("a\nb")], lines=lines), stream=True)
    assert answered.headers["content-type"].startswith("text/event-stream")
    chunks = events_of(answered)
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a\n"}, {"content": "b"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert not any("usage" in chunk for chunk in chunks) and chunks[-1]["moa"] == {"offline": False}
    (line,) = lines
    assert line.startswith("POST /v1/chat/completions 200 in ") and "stop, 3 tokens | tau" in line


def test_a_text_is_gone_on_with():
    whole = client([finished("b c")]).post("/v1/completions", json={"prompt": "a"}).json()
    [choice] = whole["choices"]
    assert whole["object"] == "text_completion" and whole["id"].startswith("cmpl-")
    assert choice == {"index": 0, "text": "b c", "logprobs": None, "finish_reason": "stop"}
    assert whole["usage"]["completion_tokens"] == 3 and whole["usage"]["moa"]["offline"] is False
    body = {"prompt": ["a"], "stream": True, "stream_options": {"include_usage": True}}
    *chunks, figures = events_of(client([update("b"), finished("b c")]).post("/v1/completions", json=body))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["b", " c", ""]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"} and figures["choices"] == []
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and figures["usage"]["total_tokens"] == 8


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_several_answers_have_an_index_and_seeds_of_their_own(path):
    chats: list[PooledChat] = []
    texts = ["a", "bc", "def"]

    async def connect(needs_verifier: bool) -> PooledChat:
        text = texts[len(chats) % 3]
        chats.append(PooledChat([update(text[0]), finished(text)]))
        return chats[-1]

    def post(**fields):
        pool = ChatPool(connect)
        app = create_app(pool, pool, DEFAULTS, Access("", (), LOOPBACK_NAMES), lines.append)
        body = {"messages": [USER], "prompt": "a", "n": 3, "temperature": 1, "seed": 2**64 - 2, **fields}
        return TestClient(app, base_url="http://127.0.0.1:11435").post(path, json=body)

    lines: list[str] = []
    whole = post().json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice.get("text") or choice["message"]["content"] for choice in whole["choices"]] == texts
    assert [chat.sampling[0].seed for chat in chats] == [2**64 - 2, 2**64 - 1, 0]
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 6, 11)
    assert [each["tokens"] for each in usage["moa"]["choices"]] == [1, 2, 3] and usage["moa"]["offline"] is False
    assert lines[0].count("stop, ") == 3 and "stop, 3 tokens" in lines[0]
    *chunks, figures = events_of(post(stream=True, stream_options={"include_usage": True}))
    streamed, ends = ["", "", ""], []
    for chunk in chunks:
        [choice] = chunk["choices"]
        streamed[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert streamed == texts and sorted(ends) == [0, 1, 2] and figures["usage"]["completion_tokens"] == 6


def test_one_of_several_answers_that_fails_ends_them_all():
    scripts = iter([[update("a"), HANG], [update("b"), 0.05, ChatError("REPLACED")]] * 2)
    chats: list[PooledChat] = []

    async def connect(needs_verifier: bool) -> PooledChat:
        chats.append(PooledChat(next(scripts)))
        return chats[-1]

    pool = ChatPool(connect, size=3)
    app = create_app(pool, pool, DEFAULTS, Access("", (), LOOPBACK_NAMES), lambda line: None)
    http = TestClient(app, base_url="http://127.0.0.1:11435")
    assert ask(http, n=2).status_code == 502 and [chat.stopped for chat in chats] == [1, 1]
    assert ask(http, n=4).status_code == 429


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextFullError("too long"), 400, "context_length_exceeded"),
        (ChatError("REPLACED"), 502, "verifier_refused"),
        (ConnectError("no verifier answers", final=False, code="unreachable"), 503, "verifier_unavailable"),
    ],
)
def test_errors_have_a_status_until_text_was_sent(error, status, code):
    for stream in (False, True):
        answered = ask(client([error]), stream=stream)
        assert answered.status_code == status and answered.json()["error"]["code"] == code
        assert ("Retry-After" in answered.headers) == (status == 503)
    events = ask(client([update("a"), error]), stream=True).text.removesuffix("\n\n").split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == str(error)


def test_an_answer_that_fails_unforeseen_is_an_error_not_a_wait():
    """Whoever reads would wait for ever."""
    for stream in (False, True):
        answered = ask(client([IndexError("list index out of range")]), stream=stream)
        assert answered.status_code == 500 and "IndexError" in answered.json()["error"]["message"]


def test_a_verifier_that_is_away_at_the_start_is_said():
    async def connect(needs_verifier: bool) -> PooledChat:
        raise ConnectError("no verifier answers at ws://here", final=False, code="unreachable")

    lines: list[str] = []
    pool = ChatPool(connect)
    app = create_app(pool, pool, DEFAULTS, Access("", (), LOOPBACK_NAMES), lines.append)
    with TestClient(app, base_url="http://127.0.0.1:11435") as started:
        assert started.get("/v1/models").status_code == 200
    assert lines[0].startswith("warning: no verifier answers at ws://here; requests that need it are refused")


def test_what_is_not_there_is_an_error_object_too():
    lines: list[str] = []
    answered = client(lines=lines).get("/v1/%1b[2Jnowhere")
    assert answered.status_code == 404 and "Not Found" in answered.json()["error"]["message"]
    assert "there is GET /v1/models" in answered.json()["error"]["message"]
    assert client().get("/v1/chat/completions").status_code == 405
    assert all(line.isprintable() for line in lines) and lines


@pytest.mark.parametrize(("context", "mib"), [(512, 1), (1 << 15, 2), (1 << 20, 4)])
def test_a_body_may_have_what_a_full_context_takes(context, mib):
    pool = ChatPool(lambda needs_verifier: None)
    app = create_app(pool, pool, replace(DEFAULTS, max_context=context), Access("", (), None), lambda line: None)
    for size, status in ((mib << 20, 400), ((mib << 20) + 1, 413)):
        answered = TestClient(app).post("/v1/completions", content=b" " * size)
        assert answered.status_code == status
    assert answered.json()["error"]["message"].endswith(f"{mib} MiB")


def test_a_token_is_asked_for_where_one_is_set():
    guarded = client([finished("yes")], token="sesame")
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
        refused = ask(guarded, headers=given)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert ask(guarded, headers={"Authorization": "Bearer sesame"}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:11435", "127.0.0.1.evil.example", "[::1].evil.example:1", ""]
)
def test_another_host_name_is_refused(host):
    refused = ask(client([finished("yes")]), headers={"Host": host})
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["127.0.0.1:11435", "LocalHost", "localhost:1", "[::1]:11435", "[::1]"])
def test_this_machines_names_are_not(host):
    assert ask(client([finished("yes")]), headers={"Host": host}).status_code == 200


def test_web_pages_are_refused_unless_allowed():
    page = {"Origin": "http://localhost:3000"}
    assert ask(client([finished("yes")]), headers=page).json()["error"]["code"] == "origin_not_allowed"
    preflight = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert client(token="t").options("/v1/chat/completions", headers=preflight).status_code == 403
    opened = client([finished("yes")], token="t", allow=("http://localhost:3000",))
    granted = opened.options("/v1/chat/completions", headers=preflight)
    assert granted.status_code == 200 and granted.headers["access-control-allow-origin"] == page["Origin"]
    assert ask(opened, headers=page).status_code == 401
    answered = ask(opened, headers={**page, "Authorization": "Bearer t"})
    assert answered.status_code == 200 and answered.headers["access-control-allow-origin"] == page["Origin"]
    assert ask(opened, headers={"Origin": "null", "Authorization": "Bearer t"}).status_code == 403
    assert ask(client([finished("yes")], allow=("*",)), headers={"Origin": "null"}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["null", "file://", "capacitor://localhost", "ionic://localhost", "https://localhost"]
)
def test_web_views_of_apps_are_pages_too(origin):
    assert ask(client([finished("yes")]), headers={"Origin": origin}).status_code == 403
    answered = ask(client([finished("yes")], allow=(origin,)), headers={"Origin": origin})
    assert answered.status_code == 200 and answered.headers["access-control-allow-origin"] == origin
