"""Who may open sessions where a page is served: the page itself with a token, no other origin. No log has a token."""

from __future__ import annotations

import pytest

from integration.server.test_pages import TOKEN, bearer, connect, hello, refusal
from moa_server.settings import Settings
from support.server.running import TIMEOUT_S, Verifier, serving
from support.server.web_site import GRAPH, get, site
from support.toy_engine import ToyEngine


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def verifier(files):
    with serving(ToyEngine(), Settings(token=TOKEN), files=files) as running:
        yield running


def origin_of(verifier: Verifier) -> str:
    return f"http://127.0.0.1:{verifier.port}"


def test_sessions_from_the_page_need_the_token_and_no_option(verifier):
    with connect(verifier, "moa.v1", bearer(), origin=origin_of(verifier)) as opened:
        opened.send(hello())
        assert opened.recv(TIMEOUT_S)
    assert refusal(verifier, "moa.v1", origin=origin_of(verifier))[0] == 401
    posted = get(verifier, "/v1/decode", "POST", origin=origin_of(verifier), authorization=f"Bearer {TOKEN}")
    assert posted.status_code == 400  # no JSON, but let in


@pytest.mark.parametrize(
    "origin", ["http://127.0.0.1", "http://127.0.0.1:1", "http://localhost:{port}", "null", "file://"]
)
def test_other_pages_stay_refused(verifier, origin):
    assert refusal(verifier, "moa.v1", bearer(), origin=origin.format(port=verifier.port))[0] == 403
    assert (
        get(verifier, "/v1/status", origin="https://evil.example", authorization=f"Bearer {TOKEN}").status_code == 403
    )


def asked_as(verifier: Verifier, host: str, origin: str, token: str = "") -> int:
    """The status of ``/v1/status`` for a page that was loaded from ``host``."""
    headers = {"Host": host, "Origin": origin, **({"Authorization": f"Bearer {token}"} if token else {})}
    return verifier.http("GET", "/v1/status", headers=headers).status_code


def test_a_name_that_was_made_to_resolve_here_opens_nothing(files):
    """DNS rebinding: the page of evil.example has the origin of what answers under its name."""
    evil, proxied = ("evil.example:8765", "http://evil.example:8765"), ("moa.example", "https://moa.example")
    with serving(ToyEngine(), Settings(token=TOKEN), files=files) as local:
        assert asked_as(local, *evil, TOKEN) == 421
        assert get(local, "/", host=evil[0]).status_code == 421
    with serving(ToyEngine(), Settings(loopback=False, token=TOKEN), files=files) as public:
        assert asked_as(public, *evil) == 401  # it has no token, for what a browser stores belongs to an origin
        assert asked_as(public, *proxied, TOKEN) == 200
        assert asked_as(public, "moa.example", "https://moa.example:8443", TOKEN) == 403
    with serving(ToyEngine(), Settings(loopback=False, hosts=("moa.example",)), files=files) as without_token:
        assert asked_as(without_token, *evil) == 403
        assert asked_as(without_token, *proxied) == 200
        for host in ("192.168.1.20:8765", "[fd00::1]:8765", "127.0.0.1:8765"):
            assert asked_as(without_token, host, f"http://{host}") == 200


def test_an_app_that_may_use_the_verifier_may_load_the_bundle(files):
    app = "capacitor://localhost"
    with serving(ToyEngine(), Settings(token=TOKEN, origins=(app,)), files=files) as verifier:
        answered = get(verifier, "/bundle/manifest.json", origin=app)
        assert answered.headers["access-control-allow-origin"] == app
        asks = {"access_control_request_method": "GET", "access_control_request_headers": "range"}
        assert get(verifier, f"/bundle/{GRAPH}", "OPTIONS", origin=app, **asks).status_code == 200
        assert "access-control-allow-origin" not in get(verifier, "/", origin="https://evil.example").headers


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_log_has_a_token(files, log, form):
    stream = log(form, "debug")
    with serving(ToyEngine(), Settings(token=TOKEN), files=files) as verifier:
        for path in (f"/?token={TOKEN}", f"/{TOKEN}", f"/index.html?token={TOKEN}", f"/bundle/{TOKEN}"):
            get(verifier, path, referer=f"http://localhost/#token={TOKEN}")
            get(verifier, path, "POST", host="evil.example")
        with connect(verifier, "moa.v1", bearer(), origin=origin_of(verifier)) as opened:
            opened.send(hello())
            opened.recv(TIMEOUT_S)
        assert refusal(verifier, "moa.v1", bearer(), origin="https://evil.example")[0] == 403
    logged = stream.getvalue()
    assert "refused: web pages of https://evil.example" in logged
    assert TOKEN not in logged and bearer() not in logged and "Traceback" not in logged
