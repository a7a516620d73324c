"""Web pages and apps with a web view: their token in a subprotocol, their origins, and nothing told to a log."""

from __future__ import annotations

import base64
import socket

import pytest
from websockets.exceptions import InvalidStatus

from moa_runtime.session.handshake import PROTOCOL_VERSION
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.auth import new_token
from moa_server.settings import Settings
from support.server.running import TIMEOUT_S, Verifier, serving
from support.toy_engine import ToyEngine

TOKEN = "s3cret-token"
#: What web views of apps send, and pages of files; `*` is tested with the gateway.
ORIGINS = ["https://app.example", "capacitor://localhost", "ionic://localhost", "http://localhost", "https://localhost"]
ORIGINS += ["file://", "null"]


def bearer(token: str = TOKEN) -> str:
    return "moa.bearer." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")


def hello() -> bytes:
    prints = ToyEngine.fingerprints
    told = wire.Hello(protocol_version=PROTOCOL_VERSION, newest_version=PROTOCOL_VERSION)
    told.fingerprints.target, told.fingerprints.tokenizer = prints.target, prints.tokenizer
    told.fingerprints.drafter = prints.drafter
    return wire.ClientMessage(hello=told).SerializeToString()


@pytest.fixture
def verifier():
    with serving(ToyEngine(), Settings(token=TOKEN, origins=tuple(ORIGINS[:1]))) as running:
        yield running


def connect(verifier: Verifier, *subprotocols: str, header: str | None = None, **options):
    """As a page does, which has no headers of its own; ``header`` is an ``Authorization``."""
    page = Verifier(verifier.server, verifier.port, header.removeprefix("Bearer ") if header else "")
    return page.connect(subprotocols=list(subprotocols) or None, **options)


def refusal(verifier: Verifier, *subprotocols: str, **options) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as refused:
        connect(verifier, *subprotocols, **options)
    response = refused.value.response
    assert TOKEN not in str(response) and bearer() not in f"{response.headers} {response.body!r}"
    return response.status_code, response.body.decode()


@pytest.mark.parametrize("offered", [["moa.v1", bearer()], [bearer(), "moa.v1"], ["other", "moa.v1", bearer()]])
def test_the_token_may_be_a_subprotocol(verifier, offered):
    with connect(verifier, *offered) as socket:
        assert socket.subprotocol == "moa.v1"
        assert bearer() not in str(socket.response.headers)
        socket.send(hello())
        assert wire.ServerMessage.FromString(socket.recv(TIMEOUT_S)).WhichOneof("event") == "welcome"
    with connect(verifier, header=f"Bearer {TOKEN}") as socket:  # clients with headers need none
        assert socket.subprotocol is None


@pytest.mark.parametrize("token", ["a", "ab", "abc", "ünïcödé?>~", ""])
def test_any_token_fits_into_a_subprotocol(token):
    token = token or new_token("alice")[0]
    with serving(ToyEngine(), Settings(token=token)) as verifier:
        with connect(verifier, "moa.v1", bearer(token)):
            pass
        assert refusal(verifier, "moa.v1", bearer(token + "x"))[0] == 401


@pytest.mark.parametrize(
    ("offered", "status"),
    [
        (["moa.v1"], 401),
        (["moa.v1", bearer("another")], 401),
        (["moa.v1", TOKEN], 401),
        ([bearer()], 400),
        (["moa.v2", bearer()], 400),
        (["moa.v1", bearer(), bearer("another")], 400),
        (["moa.v1", "moa.bearer."], 400),
        (["moa.v1", "moa.bearer.abcde"], 400),
        (["moa.v1", "moa.bearer._w"], 400),  # no UTF-8
        (["moa.v1", f"{bearer()}.x"], 400),
    ],
)
def test_unclear_subprotocols_and_tokens_elsewhere_are_refused(verifier, offered, status):
    assert refusal(verifier, *offered)[0] == status
    assert refusal(verifier, "moa.v1", bearer(), header=f"Bearer {TOKEN}")[0] == 400  # a token comes once
    in_url = f"/v1/status?token={TOKEN}&authorization=Bearer%20{TOKEN}"
    assert verifier.http("GET", in_url, headers={}).status_code == 401


def raw(verifier: Verifier, *headers: str) -> bytes:
    """The answer to an upgrade request with these headers."""
    told = ["GET /v1/session HTTP/1.1", "Host: localhost", "Connection: Upgrade", "Upgrade: websocket"]
    told += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==", *headers]
    with socket.create_connection(("127.0.0.1", verifier.port), timeout=TIMEOUT_S) as connected:
        connected.sendall("\r\n".join([*told, "", ""]).encode())
        connected.settimeout(TIMEOUT_S)
        return b"".join(iter(lambda: connected.recv(4096), b""))


@pytest.mark.parametrize("header", [f"moa.v1, {bearer()}==", f"moa.v1 {bearer()}", f"moa.v1, {TOKEN}/\xff", ""])
def test_a_header_that_is_no_list_is_not_repeated(verifier, header):
    answer = raw(verifier, f"Sec-WebSocket-Protocol: {header}")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert TOKEN.encode() not in answer and bearer().encode() not in answer


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_named_origin_may_use_all_of_the_verifier(origin):
    with serving(ToyEngine(), Settings(token=TOKEN, origins=(origin,))) as verifier:
        with connect(verifier, "moa.v1", bearer(), origin=origin) as connected:
            assert connected.subprotocol == "moa.v1"
        asks = {"Origin": origin, "Access-Control-Request-Headers": "authorization,content-type"}
        page = {"Origin": origin, "Authorization": f"Bearer {TOKEN}"}
        for method, path in [("POST", "/v1/decode"), ("GET", "/v1/status"), ("GET", "/metrics"), ("GET", "/healthz")]:
            preflight = verifier.http("OPTIONS", path, headers={**asks, "Access-Control-Request-Method": method})
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
            body = {"json": {"tokens": [1], "max_new_tokens": 1}} if method == "POST" else {}
            answered = verifier.http(method, path, headers=page, **body)
            assert answered.status_code == 200
            assert {each.headers["access-control-allow-origin"] for each in (preflight, answered)} == {origin}
        # A page does not learn why its WebSocket was refused; here it does.
        refused = verifier.http("GET", "/v1/status", headers={"Origin": origin})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("origin", [*ORIGINS[1:], "https://app.example:8443", "https://app.example.evil", ""])
def test_other_origins_are_refused(verifier, origin):
    assert refusal(verifier, "moa.v1", bearer(), origin=origin)[0] == 403
    page = {"Origin": origin, "Authorization": f"Bearer {TOKEN}"}
    assert verifier.http("GET", "/v1/status", headers=page).status_code == 403
    preflight = {"Origin": origin, "Access-Control-Request-Method": "GET"}
    answered = verifier.http("OPTIONS", "/v1/status", headers=preflight)
    assert answered.status_code == 400 and "access-control-allow-origin" not in answered.headers
