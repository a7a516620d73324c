"""The page and its bundle over HTTP: their headers, what is not served, and where the files come from."""

from __future__ import annotations

import gzip
import socket

import httpx
import pytest

from integration.server.test_pages import TOKEN, bearer, connect, hello, raw, refusal
from moa_runtime.bundle import MANIFEST_FILE, Fingerprints, sha256_of
from moa_runtime.errors import MoaError
from moa_server.settings import Settings
from moa_server.web import setup as web_setup
from moa_server.web.setup import POLICY, bundle_files, find_bundle, page_files
from support.refusals import refused
from support.server.running import TIMEOUT_S, Verifier, serving
from support.server.web_site import GRAPH, SCRIPT, WRITER, get, site, write_page, write_web_bundle
from support.toy_engine import PRINTS, ToyEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="module")
def files(folder):
    return site(folder)


@pytest.fixture(scope="module")
def verifier(files):
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
def test_files_are_open_and_have_their_headers(verifier, folder, path, media_type, caching):
    answered, headers = get(verifier, path), get(verifier, path).headers
    bundled = path.startswith("/bundle")
    file = folder / (path[1:] if bundled else "page/" + (path.strip("/") or "index.html"))
    assert (answered.status_code, answered.content) == (200, file.read_bytes())
    assert (headers["content-type"], headers["cache-control"]) == (media_type, caching)
    assert headers["x-content-type-options"] == "nosniff"
    if bundled:
        tag = f'"{sha256_of(file)}"'
        assert headers["etag"] in (tag, f'{tag[:-1]}-gzip"')
        part = get(verifier, path, range="bytes=5-9", if_range=tag)
        assert (part.status_code, part.content) == (206, file.read_bytes()[5:10])
        return
    assert headers["content-security-policy"] == POLICY and headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert get(verifier, path, if_none_match=headers["etag"]).status_code == 304


def test_the_policy_lets_the_page_run_nothing_else():
    allowed = dict(part.split(" ", 1) for part in POLICY.split("; "))
    assert allowed["default-src"] == "'none'" and allowed["script-src"] == "'self' 'wasm-unsafe-eval'"
    assert "unsafe-inline" not in POLICY and "'unsafe-eval'" not in POLICY and "*" not in POLICY


def test_text_comes_in_gzip_and_graphs_do_not(verifier, folder):
    assert get(verifier, "/bundle/tokenizer.json", accept_encoding="gzip").headers["content-encoding"] == "gzip"
    assert "content-encoding" not in get(verifier, "/bundle/tokenizer.json", accept_encoding="identity").headers
    assert "content-encoding" not in get(verifier, f"/bundle/{GRAPH}", accept_encoding="gzip").headers
    with httpx.stream("GET", f"http://127.0.0.1:{verifier.port}/{SCRIPT}", headers={"accept-encoding": "gzip"}) as raw:
        sent = b"".join(raw.iter_raw())
    assert gzip.decompress(sent) == (folder / "page" / SCRIPT).read_bytes()
    assert int(raw.headers["content-length"]) == len(sent)


@pytest.mark.parametrize("path", ["/", f"/bundle/{GRAPH}", f"/{SCRIPT}"])
def test_head_is_get_without_the_body(verifier, path):
    # As HTTP has it, a range is only of a GET.
    head, whole = get(verifier, path, "HEAD", range="bytes=0-1"), get(verifier, path, accept_encoding="gzip, deflate")
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
def test_what_is_not_in_the_table_is_not_found(verifier, path):
    """Sent as it is written: a client would tidy it up."""
    with socket.create_connection(("127.0.0.1", verifier.port), TIMEOUT_S) as connected:
        connected.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connected.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404 ") and answer.endswith(b"\r\n\r\nNot Found")


def test_files_are_only_read_and_the_verifiers_own_paths_stay(verifier):
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"):
        answered = get(verifier, "/index.html", method)
        assert (answered.status_code, answered.headers["allow"]) == (405, "GET, HEAD")
        assert get(verifier, "/nothing", method).status_code == 404
    assert get(verifier, f"/bundle/{GRAPH}", range="bytes=9999999-").status_code == 416
    assert len(get(verifier, f"/bundle/{GRAPH}", range="bytes=0-0," * 500 + "5-6").content) == 300_000
    assert get(verifier, "/healthz").json() == {"status": "ok"}
    assert get(verifier, "/v1/status").status_code == 401 and get(verifier, "/metrics").status_code == 401
    text = verifier.http("GET", "/metrics").text
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


def test_which_bundle_is_served(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(web_setup, "make_bundle", lambda folder, *said: made.append((folder, *said)))
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MOA_EDGE_BUNDLE", raising=False)
    own = tmp_path / "cache" / "bundles" / "web"
    with refused("bundle_missing"):
        find_bundle(None, default_target=False)
    assert find_bundle(None, default_target=True) == own and made == [(own, "web", "moa-serve --web", "some minutes")]
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
    assert len(made) == 1


def test_the_files_are_those_of_the_start(tmp_path):
    write_page(tmp_path)
    with serving(ToyEngine(), Settings(), files=page_files(tmp_path)) as verifier:
        before = get(verifier, "/").content
        for name in ("index.html", "new.js"):
            (tmp_path / name).write_text("another build")
        assert get(verifier, "/").content == before and get(verifier, "/new.js").status_code == 404


# -- origins ---------------------------------------------------------------------------------------


def origin_of(verifier: Verifier) -> str:
    return f"http://127.0.0.1:{verifier.port}"


def test_the_page_itself_may_open_sessions_with_a_token_and_no_other_page(verifier):
    with connect(verifier, "moa.v1", bearer(), origin=origin_of(verifier)) as opened:
        opened.send(hello())
        assert opened.recv(TIMEOUT_S)
    assert refusal(verifier, "moa.v1", origin=origin_of(verifier))[0] == 401
    posted = get(verifier, "/v1/decode", "POST", origin=origin_of(verifier), authorization=f"Bearer {TOKEN}")
    assert posted.status_code == 400  # no JSON, but let in
    for origin in ("http://127.0.0.1", "http://127.0.0.1:1", f"http://localhost:{verifier.port}", "null", "file://"):
        assert refusal(verifier, "moa.v1", bearer(), origin=origin)[0] == 403
    asked = get(verifier, "/v1/status", origin="https://evil.example", authorization=f"Bearer {TOKEN}")
    assert asked.status_code == 403


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


def test_a_named_app_may_load_the_bundle(files):
    app = "capacitor://localhost"
    with serving(ToyEngine(), Settings(token=TOKEN, origins=(app,)), files=files) as verifier:
        assert get(verifier, f"/bundle/{GRAPH}", origin=app).headers["access-control-allow-origin"] == app
        asks = {"access_control_request_method": "GET", "access_control_request_headers": "range"}
        assert get(verifier, f"/bundle/{GRAPH}", "OPTIONS", origin=app, **asks).status_code == 200
        assert "access-control-allow-origin" not in get(verifier, "/", origin="https://evil.example").headers


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_log_has_a_token(files, log, form):
    stream, offered = log(form, "debug"), "Sec-WebSocket-Protocol: moa.v1, "
    with serving(ToyEngine(), Settings(token=TOKEN), files=files) as verifier:
        for path in (f"/?token={TOKEN}", f"/{TOKEN}", f"/index.html?token={TOKEN}", f"/bundle/{TOKEN}"):
            get(verifier, path, referer=f"http://localhost/#token={TOKEN}")
            get(verifier, path, "POST", host="evil.example")
        with connect(verifier, "moa.v1", bearer(), origin=origin_of(verifier)) as opened:
            opened.send(hello())
            opened.recv(TIMEOUT_S)
        assert refusal(verifier, "moa.v1", bearer(), origin="https://evil.example")[0] == 403
        assert refusal(verifier, "moa.v1", bearer() + "A", origin=origin_of(verifier))[0] in (400, 401)
        assert refusal(verifier, bearer(), origin=origin_of(verifier))[0] == 400
        raw(verifier, f"{offered}{bearer()}==")
        raw(verifier, f"{offered}{bearer()}", "Sec-WebSocket-Key: broken")
        raw(verifier, f"{offered}{'x' * 9000}{bearer()}")
    logged = stream.getvalue()
    assert "https://evil.example" in logged
    assert TOKEN not in logged and bearer() not in logged and "Traceback" not in logged
