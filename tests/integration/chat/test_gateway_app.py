"""The OpenAI-compatible endpoint over HTTP, with chats that play scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

pytest.importorskip("granian")

from starlette.testclient import TestClient

from moa_chat.gateway.app import Access, create_app
from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.pool import ChatPool
from moa_chat.gateway.serve import RequestLines
from moa_runtime.chat import ChatError, ContextFullError
from moa_runtime.grammar.matcher import GrammarError
from moa_runtime.manifest import Fingerprints
from moa_runtime.transport import ConnectError
from moa_server.edge.server import EdgeServer
from support.chat.fake_chat import HANG, finished, update
from support.chat.pooled_chat import DEFAULTS, USER, PooledChat
from support.server.attacks import STRANGERS, Victim, keep_up
from support.server.running import in_thread

HERE = "http://127.0.0.1:11435"


async def compiles(request) -> None:
    pass


def app_of(connect, *, size=8, token="", allow=(), say=lambda line: None, grammar=compiles, **defaults):
    pool, access = ChatPool(connect, size), Access(token, allow)
    return create_app(pool, pool, replace(DEFAULTS, **defaults), access, say, compile_grammar=grammar)


def client(*scripts, lines: list[str] | None = None, chats: list[PooledChat] | None = None, **options) -> TestClient:
    """The endpoint; its chats play these scripts, or each the next script if they are listed in ``chats``."""

    async def connect(needs_verifier: bool) -> PooledChat:
        if chats is None:
            return PooledChat(*scripts)
        chats.append(PooledChat(scripts[len(chats) % len(scripts)]))
        return chats[-1]

    say = lines.append if lines is not None else lambda line: None
    return TestClient(app_of(connect, say=say, **options), base_url=HERE)


def ask(client: TestClient, headers: dict[str, str] | None = None, path: str = "/v1/chat/completions", **fields):
    return client.post(path, json={"messages": [USER], "prompt": "a", **fields}, headers=headers or {})


def events_of(answered) -> list[dict]:
    """Events of a stream that has come to its end."""
    events = answered.text.removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]" and all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_models_are_listed():
    models = client().get("/v1/models").json()
    assert models["object"] == "list" and [model["id"] for model in models["data"]] == ["tiny"]
    assert client().get("/v1/models/tiny").json()["id"] == "tiny"
    assert client().get("/v1/models/other").status_code == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_several_answers_have_an_index_and_seeds_of_their_own(path):
    texts, chats, lines = ["a", "bc", "def"], [], []
    scripts = [[update(text[0]), finished(text)] for text in texts]
    body = {"path": path, "n": 3, "temperature": 1, "seed": 2**64 - 2}
    whole = ask(client(*scripts, chats=chats, lines=lines), **body).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice.get("text") or choice["message"]["content"] for choice in whole["choices"]] == texts
    assert [chat.sampling[0].seed for chat in chats] == [2**64 - 2, 2**64 - 1, 0]
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 6, 11)
    assert [each["tokens"] for each in usage["moa"]["choices"]] == [1, 2, 3] and usage["moa"]["offline"] is False
    assert lines[0].count("stop, ") == 3 and "stop, 3 tokens" in lines[0]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, figures = events_of(ask(client(*scripts, chats=[]), **body))
    streamed, ends = ["", "", ""], []
    for chunk in chunks:
        [choice] = chunk["choices"]
        streamed[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert streamed == texts and sorted(ends) == [0, 1, 2] and figures["usage"]["completion_tokens"] == 6


def test_one_of_several_answers_that_fails_ends_them_all():
    chats: list[PooledChat] = []
    http = client([update("a"), HANG], [update("b"), 0.05, ChatError("REPLACED", code="refused")], chats=chats, size=3)
    assert ask(http, n=2).status_code == 502 and [chat.stopped for chat in chats] == [1, 1]
    assert ask(http, n=4).status_code == 429


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextFullError("FULL", code="refused"), 400, "context_length_exceeded"),
        (ChatError("REPLACED", code="refused"), 502, "verifier_refused"),
        (ConnectError("AWAY", final=False, code="unreachable"), 503, "verifier_unavailable"),
        (IndexError("DEFECT"), 500, "internal_error"),  # not a wait without end
    ],
)
def test_errors_have_a_status_until_text_was_sent(error, status, code):
    for stream in (False, True):
        answered = ask(client([error]), stream=stream)
        assert answered.status_code == status and answered.json()["error"]["code"] == code
        assert ("Retry-After" in answered.headers) == (status == 503)
    events = ask(client([update("a"), error]), stream=True).text.removesuffix("\n\n").split("\n\n")
    sent = json.loads(events[-1].removeprefix("data: "))["error"]
    assert sent["code"] == code and str(error) in sent["message"]


def test_a_full_pool_refuses_a_request_before_it_is_read():
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        answered = client(size=0).post(path, content=b"{")
        assert answered.status_code == 429 and "Retry-After" in answered.headers


def test_a_grammar_that_does_not_compile_reaches_no_verifier():
    async def broken(request) -> None:
        raise GrammarError("BROKEN", code="invalid_grammar")

    chats: list[PooledChat] = []
    refused = ask(client([finished("a")], chats=chats, grammar=broken), guided_regex="a")
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "guided_regex", "invalid_value")
    assert not chats


def cancelled() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("end", "code"), [((), "verifier_unavailable"), ((cancelled,), "internal_error")], ids=["closed", "cancelled"]
)
def test_a_stream_whose_answer_ends_without_an_end_is_not_waited_for(end, code):
    lines: list[str] = []
    *_, last = ask(client([update("a"), *end], lines=lines), stream=True).text.strip().split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == code and error["message"] in lines[0]


async def test_a_client_that_leaves_frees_its_place_and_the_log_says_when():
    async def connect(needs_verifier: bool) -> PooledChat:
        return PooledChat([update("a"), HANG])

    lines: list[str] = []
    pool, left, asked = ChatPool(connect, 1), asyncio.Event(), [json.dumps({"messages": [USER], "stream": True})]

    async def receive() -> dict:
        if asked:
            return {"type": "http.request", "body": asked.pop().encode()}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message) -> None:
        if b'"content": "a"' in message.get("body", b""):
            left.set()
            await asyncio.Event().wait()  # takes no more

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "scheme": "http"}
    scope |= {"headers": [(b"host", b"localhost")], "asgi": {"version": "3.0", "spec_version": "2.3"}}
    app = create_app(pool, pool, DEFAULTS, Access(""), lines.append)
    await asyncio.wait_for(app(scope, receive, send), 60)
    while True:
        await asyncio.sleep(0)
        with contextlib.suppress(ApiError):
            pool.check_room()
            break
    assert "not finished" in lines[0]


def test_a_verifier_that_is_away_at_the_start_is_logged():
    async def connect(needs_verifier: bool) -> PooledChat:
        raise ConnectError("AWAY", final=False, code="unreachable")

    lines: list[str] = []
    with TestClient(app_of(connect, say=lines.append), base_url=HERE) as started:
        assert started.get("/v1/models").status_code == 200
    assert lines[0].startswith("warning: AWAY")


@pytest.mark.parametrize(("context", "mib"), [(512, 1), (1 << 15, 2), (1 << 20, 4)])
def test_a_body_may_be_as_large_as_a_full_context(context, mib):
    for size, status in ((mib << 20, 400), ((mib << 20) + 1, 413)):
        answered = client(max_context=context).post("/v1/completions", content=b" " * size)
        assert answered.status_code == status
    assert f"{mib} MiB" in answered.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 403) for name in ("evil.example:11435", "127.0.0.1.evil.example", "[::1].evil.example:1", "")),
        *((name, 200) for name in ("127.0.0.1:11435", "LocalHost", "localhost:1", "[::1]:11435", "[::1]")),
    ],
)
def test_only_names_of_this_machine_are_answered(host, status):
    answered = ask(client([finished("yes")]), {"Host": host})
    assert answered.status_code == status
    assert status == 200 or answered.json()["error"]["code"] == "host_not_allowed"


def test_a_token_is_asked_for_if_one_is_set():
    guarded = client([finished("yes")], token="sesame")
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
        refused = ask(guarded, given)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    for scheme in ("Bearer", "bearer"):  # RFC 9110: in any case
        admitted = client([finished("yes")], token="sesame")
        assert ask(admitted, {"Authorization": f"{scheme} sesame"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://localhost:3000", "null", "capacitor://localhost", "https://localhost"])
def test_web_pages_and_web_views_are_refused_unless_allowed(origin):
    page = {"Origin": origin}
    assert ask(client([finished("yes")]), page).json()["error"]["code"] == "origin_not_allowed"
    preflight = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight |= {"Access-Control-Request-Private-Network": "true"}
    assert client(token="t").options("/v1/chat/completions", headers=preflight).status_code == 403
    opened = client([finished("yes")], token="t", allow=(origin,))
    granted = opened.options("/v1/chat/completions", headers=preflight)
    assert granted.status_code == 200 and granted.headers["access-control-allow-origin"] == origin
    assert granted.headers["access-control-allow-private-network"] == "true"
    assert ask(opened, page).status_code == 401
    answered = ask(opened, {**page, "Authorization": "Bearer t"})
    assert answered.status_code == 200 and answered.headers["access-control-allow-origin"] == origin
    assert ask(opened, {"Origin": "http://evil.example", "Authorization": "Bearer t"}).status_code == 403
    assert ask(client([finished("yes")], allow=("*",)), page).status_code == 200


@pytest.mark.parametrize("name", ["1-byte chunks", "slow bodies", "header byte by byte"])
def test_a_stranger_stalls_no_answer(name):
    started = threading.Event()

    async def connect(needs_verifier: bool) -> PooledChat:
        return PooledChat(*[[update("a"), finished("ab")]] * 10_000)

    class Server(EdgeServer):
        async def startup(self) -> None:
            await super().startup()
            started.set()

    with in_thread(Server(app_of(connect)), started) as (port, _), ThreadPoolExecutor(8) as pool:
        victim = Victim(port, Fingerprints("", "", ""), path="/v1/completions")
        attacking = [pool.submit(keep_up, STRANGERS[name], victim, 1.0) for _ in range(8)]
        while not all(each.done() for each in attacking):
            answered = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"}, timeout=60)
            assert answered.json()["choices"][0]["text"] == "ab"


def test_a_flood_of_requests_does_not_flood_the_log(capsys):
    now = [0.0]
    lines = RequestLines(lambda: now[0])
    for _ in range(1000):
        lines("GET / 404")
    now[0] = 1.0
    lines("GET / 200")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 201 and said[0] == "moa-chat: GET / 404" and "(and 800 more" in said[-1]
