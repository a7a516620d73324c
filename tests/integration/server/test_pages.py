"""Web pages and apps with a web view: their token in a subprotocol, their origins, no token in a log; and the page and
its bundle over HTTP: their headers, what is not served, and where the files come from."""

from __future__ import annotations

import base64
import gzip
import socket

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from moa_runtime.bundle import Bundle
from moa_runtime.checked_file import sha256_of
from moa_runtime.errors import MoaError
from moa_runtime.manifest import MANIFEST_FILE, Fingerprints
from moa_runtime.session.handshake import PROTOCOL_VERSION
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.auth import new_token
from moa_server.edge.connection_limits import EdgeLimits
from moa_server.settings import Settings
from moa_server.web import setup as web_setup
from moa_server.web.setup import POLICY, bundle_files, find_bundle, page_files
from support.refusals import refused
from support.server.running import TIMEOUT_S, Verifier, serving
from support.server.web_site import GRAPH, SCRIPT, WRITER, get, site, write_page, write_web_bundle
from support.toy_engine import PRINTS, ToyEngine

TOKEN = "s3cret-token"
#: What web views of apps send, and pages of files; `*` is tested with the gateway.
ORIGINS = ["https://app.example", "capacitor://localhost", "ionic://localhost", "http://localhost", "https://localhost"]
ORIGINS += ["file://", "null"]
#: Refused connections end soon: raw clients read to their end.
HASTY = EdgeLimits(close_seconds=0.1)


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
    with serving(ToyEngine(), Settings(token=TOKEN, origins=tuple(ORIGINS[:1])), limits=HASTY) as running:
        yield running


def connect(verifier: Verifier, *subprotocols: str, header: str | None = None, **options):
    """As a page does, which has no headers of its own; ``header`` is an ``Authorization``."""
    page = Verifier(verifier.server, verifier.port, header.removeprefix("Bearer ") if header else "")
    return page.connect(subprotocols=list(subprotocols) or None, **options)


def refusal(verifier: Verifier, *subprotocols: str, **options) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as denied:
        connect(verifier, *subprotocols, **options)
    response = denied.value.response
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


@pytest.mark.parametrize(
    ("status", "header"),
    [(400, f"moa.v1, {bearer()}=="), (401, f"moa.v1 {bearer()}"), (401, f"moa.v1, {TOKEN}/\xff"), (401, "")],
)
def test_a_header_without_a_token_is_refused_and_not_repeated(verifier, status, header):
    answer = raw(verifier, f"Sec-WebSocket-Protocol: {header}")
    assert answer.startswith(b"HTTP/1.1 %d " % status)
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
        denied = verifier.http("GET", "/v1/status", headers={"Origin": origin})
        assert denied.status_code == 401 and denied.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("origin", [*ORIGINS[1:], "https://app.example:8443", "https://app.example.evil", ""])
def test_other_origins_are_refused(verifier, origin):
    assert refusal(verifier, "moa.v1", bearer(), origin=origin)[0] == 403
    page = {"Origin": origin, "Authorization": f"Bearer {TOKEN}"}
    assert verifier.http("GET", "/v1/status", headers=page).status_code == 403
    preflight = {"Origin": origin, "Access-Control-Request-Method": "GET"}
    answered = verifier.http("OPTIONS", "/v1/status", headers=preflight)
    assert answered.status_code == 400 and "access-control-allow-origin" not in answered.headers


# -- the page and its bundle -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="module")
def files(folder):
    return site(folder)


@pytest.fixture(scope="module")
def served(files):
    with serving(ToyEngine(), Settings(token=TOKEN), files=files) as running:
        yield running


LASTING = "public, max-age=31536000, immutable"


@pytest.mark.parametrize(
    ("path", "media_type", "caching"),
    [
        ("/", "text/html; charset=utf-8", "no-cache"),
        ("/index.html", "text/html; charset=utf-8", "no-cache"),
        ("/sw.js", "text/javascript; charset=utf-8", "no-cache"),
        ("/manifest.webmanifest", "application/manifest+json", "no-cache"),
        ("/icon.svg", "image/svg+xml", "no-cache"),
        (f"/{SCRIPT}", "text/javascript; charset=utf-8", LASTING),
        ("/assets/ort-3d4e5f.wasm", "application/wasm", LASTING),
        (f"/bundle/{MANIFEST_FILE}", "application/json", "no-cache"),
        ("/bundle/tokenizer.json", "application/json", "no-cache"),
        ("/bundle/chat_template.jinja", "text/plain; charset=utf-8", "no-cache"),
        (f"/bundle/{GRAPH}", "application/octet-stream", "no-store"),
        (f"/bundle/{WRITER}", "application/octet-stream", "no-store"),
    ],
)
def test_files_are_open_and_have_their_headers(served, folder, path, media_type, caching):
    answered, headers = get(served, path), get(served, path).headers
    bundled = path.startswith("/bundle")
    file = folder / (path[1:] if bundled else "page/" + (path.strip("/") or "index.html"))
    assert (answered.status_code, answered.content) == (200, file.read_bytes())
    assert (headers["content-type"], headers["cache-control"]) == (media_type, caching)
    assert headers["x-content-type-options"] == "nosniff"
    if bundled:
        tag = f'"{sha256_of(file)}"'
        assert headers["etag"] in (tag, f'{tag[:-1]}-gzip"')
        part = get(served, path, range="bytes=5-9", if_range=tag)
        assert (part.status_code, part.content) == (206, file.read_bytes()[5:10])
        return
    assert headers["content-security-policy"] == POLICY and headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert get(served, path, if_none_match=headers["etag"]).status_code == 304


def test_the_policy_lets_the_page_run_nothing_else():
    allowed = dict(part.split(" ", 1) for part in POLICY.split("; "))
    assert allowed["default-src"] == "'none'" and allowed["script-src"] == "'self' 'wasm-unsafe-eval'"
    assert "unsafe-inline" not in POLICY and "'unsafe-eval'" not in POLICY and "*" not in POLICY


def test_text_comes_in_gzip_and_graphs_do_not(served, folder):
    assert get(served, "/bundle/tokenizer.json", accept_encoding="gzip").headers["content-encoding"] == "gzip"
    assert "content-encoding" not in get(served, "/bundle/tokenizer.json", accept_encoding="identity").headers
    assert "content-encoding" not in get(served, f"/bundle/{GRAPH}", accept_encoding="gzip").headers
    with httpx.stream("GET", f"http://127.0.0.1:{served.port}/{SCRIPT}", headers={"accept-encoding": "gzip"}) as raw:
        sent = b"".join(raw.iter_raw())
    assert gzip.decompress(sent) == (folder / "page" / SCRIPT).read_bytes()
    assert int(raw.headers["content-length"]) == len(sent)


@pytest.mark.parametrize("path", ["/", f"/bundle/{GRAPH}", f"/{SCRIPT}"])
def test_head_is_get_without_the_body(served, path):
    # As HTTP has it, a range is only of a GET.
    head, whole = get(served, path, "HEAD", range="bytes=0-1"), get(served, path, accept_encoding="gzip, deflate")
    assert (head.status_code, head.content) == (200, b"")
    ours = {name: text for name, text in head.headers.items() if name != "date"}
    assert ours == {name: text for name, text in whole.headers.items() if name != "date"} or "vary" in ours
    assert head.headers["content-length"] != "0"


ABSENT = r"""
/nothing /assets /assets/nothing.js /bundle /bundle/device_half.onnx /bundle/page/index.html /.hidden
/assets/.hidden/too /../bundle/manifest.json /bundle/../../bundle/manifest.json /bundle/%2e%2e/manifest.json
/bundle/..%2f..%2fbundle%2fmanifest.json /bundle/manifest.json%00 /bundle/..\manifest.json /bundle//manifest.json
//etc/passwd /%2fetc%2fpasswd /INDEX.HTML /index.html/x /ca.crt
"""


@pytest.mark.parametrize("path", [*ABSENT.split(), "/" + "a" * 5000])
def test_what_is_not_in_the_table_is_not_found(served, path):
    """Sent as it is written: a client would tidy it up."""
    with socket.create_connection(("127.0.0.1", served.port), TIMEOUT_S) as connected:
        connected.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connected.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404 ") and answer.endswith(b"\r\n\r\nNot Found")


def test_files_are_only_read_and_the_verifiers_own_paths_stay(served):
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"):
        answered = get(served, "/index.html", method)
        assert (answered.status_code, answered.headers["allow"]) == (405, "GET, HEAD")
        assert get(served, "/nothing", method).status_code == 404
    assert get(served, f"/bundle/{GRAPH}", range="bytes=9999999-").status_code == 416
    assert len(get(served, f"/bundle/{GRAPH}", range="bytes=0-0," * 500 + "5-6").content) == 300_000
    assert get(served, "/healthz").json() == {"status": "ok"}
    assert get(served, "/v1/status").status_code == 401 and get(served, "/metrics").status_code == 401
    text = served.http("GET", "/metrics").text
    assert "moa_downloads 0.0" in text and "moa_download_bytes_total " in text


def test_without_the_option_there_is_no_page():
    with serving(ToyEngine(), Settings(token=TOKEN)) as plain:
        assert {get(plain, path).status_code for path in ("/", "/index.html", "/bundle/manifest.json")} == {404}
        assert refusal(plain, "moa.v1", bearer(), origin=f"http://127.0.0.1:{plain.port}")[0] == 403


def test_a_page_or_bundle_that_does_not_fit_is_refused(tmp_path):
    with refused("page_missing"):
        page_files(tmp_path)
    folder = write_web_bundle(tmp_path / "bundle", 1000)
    with refused("other_target"):
        bundle_files(folder, Fingerprints("other", PRINTS.tokenizer, PRINTS.drafter))
    (folder / GRAPH).write_bytes(b"x" * 1000)
    with pytest.raises(MoaError) as changed:
        bundle_files(folder, PRINTS)
    assert GRAPH in str(changed.value)


def test_which_bundle_is_served(tmp_path, monkeypatch, tiny_target):
    made = []
    monkeypatch.setattr(web_setup, "make_bundle", lambda folder, *said: made.append((folder, *said)))
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MOA_EDGE_BUNDLE", raising=False)
    own = tmp_path / "cache" / "bundles" / "web"
    with refused("no_bundle"):
        find_bundle(None, default_target=False)
    assert find_bundle(None, default_target=True) == own and made == [(own, "web", "moa-serve --web")]
    write_web_bundle(own, 1000)
    assert find_bundle(None, default_target=False) == own
    default = write_web_bundle(tmp_path / "cache" / "bundles" / "default", 1000, targets=("onnx",))
    assert find_bundle(None, default_target=True) == own
    with refused("no_web_graph"):
        find_bundle(default, default_target=True)
    both = write_web_bundle(tmp_path / "both", 1000)
    assert find_bundle(both, default_target=True) == both
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(both))
    assert find_bundle(None, default_target=True) == both
    with pytest.raises(MoaError):
        find_bundle(tmp_path / "none", default_target=True)
    plain = find_bundle(None, default_target=False, plain=str(tiny_target))
    assert find_bundle(plain, default_target=False) == plain
    served = bundle_files(plain, Bundle.open(plain).manifest.fingerprints)
    names = ("manifest.json", "tokenizer.json", "chat_template.jinja", "licenses/target/LICENSE")
    assert set(served) == {f"/bundle/{name}" for name in names}
    assert len(made) == 1


def test_the_files_are_those_of_the_start(tmp_path):
    write_page(tmp_path)
    with serving(ToyEngine(), Settings(), files=page_files(tmp_path)) as served:
        before = get(served, "/").content
        for name in ("index.html", "new.js"):
            (tmp_path / name).write_text("another build")
        assert get(served, "/").content == before and get(served, "/new.js").status_code == 404


# -- origins ---------------------------------------------------------------------------------------


def origin_of(served: Verifier) -> str:
    return f"http://127.0.0.1:{served.port}"


def test_the_page_itself_may_open_sessions_with_a_token_and_no_other_page(served):
    with connect(served, "moa.v1", bearer(), origin=origin_of(served)) as opened:
        opened.send(hello())
        assert opened.recv(TIMEOUT_S)
    assert refusal(served, "moa.v1", origin=origin_of(served))[0] == 401
    posted = get(served, "/v1/decode", "POST", origin=origin_of(served), authorization=f"Bearer {TOKEN}")
    assert posted.status_code == 400  # no JSON, but let in
    for origin in ("http://127.0.0.1", "http://127.0.0.1:1", f"http://localhost:{served.port}", "null", "file://"):
        assert refusal(served, "moa.v1", bearer(), origin=origin)[0] == 403
    asked = get(served, "/v1/status", origin="https://evil.example", authorization=f"Bearer {TOKEN}")
    assert asked.status_code == 403


def asked_as(served: Verifier, host: str, origin: str, token: str = "") -> int:
    """The status of ``/v1/status`` for a page that was loaded from ``host``."""
    headers = {"Host": host, "Origin": origin, **({"Authorization": f"Bearer {token}"} if token else {})}
    return served.http("GET", "/v1/status", headers=headers).status_code


def test_a_name_that_was_made_to_resolve_here_opens_nothing(files):
    """DNS rebinding: the page of evil.example has the origin of what answers under its name."""
    evil, proxied = ("evil.example:8765", "http://evil.example:8765"), ("moa.example", "https://moa.example")
    with serving(ToyEngine(), Settings(token=TOKEN), files=files) as local:
        assert asked_as(local, *evil, TOKEN) == 421
        refusal = get(local, "/", host=evil[0])
        assert refusal.status_code == 421 and "--allow-host evil.example would" in refusal.text  # without the port
    with serving(ToyEngine(), Settings(loopback=False, token=TOKEN), files=files) as public:
        assert asked_as(public, *evil) == 401  # it has no token, for what a browser stores belongs to an origin
        assert asked_as(public, *proxied, TOKEN) == 200
        assert asked_as(public, "moa.example", "https://moa.example:8443", TOKEN) == 403
    with serving(ToyEngine(), Settings(loopback=False, hosts=("moa.example",)), files=files) as without_token:
        assert asked_as(without_token, *evil) == 403
        assert asked_as(without_token, *proxied) == 200
        for host in ("192.168.1.20:8765", "[fd00::1]:8765", "127.0.0.1:8765"):
            assert asked_as(without_token, host, f"http://{host}") == 200


def test_a_named_app_may_load_the_bundle(files):
    app = "capacitor://localhost"
    with serving(ToyEngine(), Settings(token=TOKEN, origins=(app,)), files=files) as served:
        assert get(served, f"/bundle/{GRAPH}", origin=app).headers["access-control-allow-origin"] == app
        asks = {"access_control_request_method": "GET", "access_control_request_headers": "range"}
        assert get(served, f"/bundle/{GRAPH}", "OPTIONS", origin=app, **asks).status_code == 200
        assert "access-control-allow-origin" not in get(served, "/", origin="https://evil.example").headers


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_log_has_a_token(files, log, form):
    stream, offered = log(form, "debug"), "Sec-WebSocket-Protocol: moa.v1, "
    with serving(ToyEngine(), Settings(token=TOKEN), files=files, limits=HASTY) as served:
        for path in (f"/?token={TOKEN}", f"/{TOKEN}", f"/index.html?token={TOKEN}", f"/bundle/{TOKEN}"):
            get(served, path, referer=f"http://localhost/#token={TOKEN}")
            get(served, path, "POST", host="evil.example")
        with connect(served, "moa.v1", bearer(), origin=origin_of(served)) as opened:
            opened.send(hello())
            opened.recv(TIMEOUT_S)
        assert refusal(served, "moa.v1", bearer(), origin="https://evil.example")[0] == 403
        assert refusal(served, "moa.v1", bearer() + "A", origin=origin_of(served))[0] in (400, 401)
        assert refusal(served, bearer(), origin=origin_of(served))[0] == 400
        raw(served, f"{offered}{bearer()}==")
        raw(served, f"{offered}{bearer()}", "Sec-WebSocket-Key: broken")
        raw(served, f"{offered}{'x' * 9000}{bearer()}")
    logged = stream.getvalue()
    assert "https://evil.example" in logged
    assert TOKEN not in logged and bearer() not in logged and "Traceback" not in logged
