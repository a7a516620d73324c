"""The page and its bundle over HTTP: what is served with which headers, and what is not; where they come from."""

from __future__ import annotations

import gzip
import socket

import httpx
import pytest

from integration.server.test_pages import TOKEN, bearer, refusal
from moa_runtime.bundle import MANIFEST_FILE, Fingerprints, sha256_of
from moa_runtime.errors import MoaError
from moa_server.settings import Settings
from moa_server.web import setup as web_setup
from moa_server.web.setup import POLICY, bundle_files, find_bundle, page_files
from support.server.running import TIMEOUT_S, serving
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


@pytest.mark.parametrize(
    ("path", "media_type", "caching"),
    [
        ("/", "text/html; charset=utf-8", "no-cache"),
        ("/index.html", "text/html; charset=utf-8", "no-cache"),
        ("/sw.js", "text/javascript; charset=utf-8", "no-cache"),
        ("/manifest.webmanifest", "application/manifest+json", "no-cache"),
        ("/icon.svg", "image/svg+xml", "no-cache"),
        (f"/{SCRIPT}", "text/javascript; charset=utf-8", "public, max-age=31536000, immutable"),
        ("/assets/ort-3d4e5f.wasm", "application/wasm", "public, max-age=31536000, immutable"),
    ],
)
def test_the_page_is_open_to_everybody(verifier, folder, path, media_type, caching):
    answered = get(verifier, path)
    assert answered.status_code == 200
    assert answered.content == (folder / "page" / (path.strip("/") or "index.html")).read_bytes()
    headers = answered.headers
    assert (headers["content-type"], headers["cache-control"]) == (media_type, caching)
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert get(verifier, path, if_none_match=headers["etag"]).status_code == 304


def test_the_policy_lets_the_page_run_nothing_else():
    allowed = dict(part.split(" ", 1) for part in POLICY.split("; "))
    assert allowed["default-src"] == "'none'" and allowed["script-src"] == "'self' 'wasm-unsafe-eval'"
    assert "unsafe-inline" not in POLICY and "'unsafe-eval'" not in POLICY and "*" not in POLICY


@pytest.mark.parametrize(
    ("name", "media_type", "caching"),
    [
        (MANIFEST_FILE, "application/json", "no-cache"),
        ("tokenizer.json", "application/json", "no-cache"),
        ("chat_template.jinja", "text/plain; charset=utf-8", "no-cache"),
        (GRAPH, "application/octet-stream", "no-store"),
        (WRITER, "application/octet-stream", "no-store"),
    ],
)
def test_the_bundle_is_what_a_browser_needs_of_it(verifier, folder, name, media_type, caching):
    path = folder / "bundle" / name
    answered = get(verifier, f"/bundle/{name}")
    assert (answered.status_code, answered.content) == (200, path.read_bytes())
    headers = answered.headers
    assert (headers["content-type"], headers["cache-control"]) == (media_type, caching)
    assert headers["x-content-type-options"] == "nosniff"
    tag = f'"{sha256_of(path)}"'
    assert headers["etag"] in (tag, f'{tag[:-1]}-gzip"')
    part = get(verifier, f"/bundle/{name}", range="bytes=5-9", if_range=tag)
    assert (part.status_code, part.content) == (206, path.read_bytes()[5:10])


def test_text_comes_in_gzip_and_graphs_do_not(verifier, folder):
    assert get(verifier, "/bundle/tokenizer.json", accept_encoding="gzip").headers["content-encoding"] == "gzip"
    assert "content-encoding" not in get(verifier, "/bundle/tokenizer.json", accept_encoding="identity").headers
    assert "content-encoding" not in get(verifier, f"/bundle/{GRAPH}", accept_encoding="gzip").headers
    with httpx.stream("GET", f"http://127.0.0.1:{verifier.port}/{SCRIPT}", headers={"accept-encoding": "gzip"}) as raw:
        sent = b"".join(raw.iter_raw())
    assert gzip.decompress(sent) == (folder / "page" / SCRIPT).read_bytes() and int(
        raw.headers["content-length"]
    ) == len(sent)


def test_a_download_that_broke_off_goes_on_where_it_was(verifier, folder):
    whole = (folder / "bundle" / GRAPH).read_bytes()
    with httpx.stream("GET", f"http://127.0.0.1:{verifier.port}/bundle/{GRAPH}") as broken:
        first = next(broken.iter_raw(100_000))
        tag = broken.headers["etag"]
    rest = get(verifier, f"/bundle/{GRAPH}", range=f"bytes={len(first)}-", if_range=tag)
    assert rest.status_code == 206 and first + rest.content == whole
    assert rest.headers["content-range"] == f"bytes {len(first)}-{len(whole) - 1}/{len(whole)}"


@pytest.mark.parametrize("path", ["/", f"/bundle/{GRAPH}", f"/{SCRIPT}"])
def test_head_is_get_without_the_body(verifier, path):
    # As HTTP has it, a range is only of a GET.
    head, whole = get(verifier, path, "HEAD", range="bytes=0-1"), get(verifier, path, accept_encoding="gzip, deflate")
    assert (head.status_code, head.content) == (200, b"")
    ours = {name: text for name, text in head.headers.items() if name != "date"}
    assert ours == {name: text for name, text in whole.headers.items() if name != "date"} or "vary" in ours
    assert head.headers["content-length"] != "0"


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/assets",
        "/assets/nothing.js",
        "/bundle",
        "/bundle/device_half.onnx",
        "/bundle/page/index.html",
        "/.hidden",
        "/assets/.hidden/too",
        "/../bundle/manifest.json",
        "/bundle/../../bundle/manifest.json",
        "/bundle/..%2f..%2fbundle%2fmanifest.json",
        "/bundle/%2e%2e/manifest.json",
        "/bundle/manifest.json%00",
        "/bundle/..\\manifest.json",
        "/bundle//manifest.json",
        "//etc/passwd",
        "/%2fetc%2fpasswd",
        "/INDEX.HTML",
        "/index.html/x",
        "/ca.crt",
        "/" + "a" * 5000,
    ],
)
def test_what_is_not_in_the_table_is_not_found(verifier, path):
    """Sent as it is written: a client would tidy it up."""
    with socket.create_connection(("127.0.0.1", verifier.port), TIMEOUT_S) as connected:
        connected.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connected.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404 ") and answer.endswith(b"\r\n\r\nNot Found")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"])
def test_files_are_only_read(verifier, method):
    answered = get(verifier, "/index.html", method)
    assert (answered.status_code, answered.headers["allow"]) == (405, "GET, HEAD")
    assert get(verifier, "/nothing", method).status_code == 404


def test_a_bad_range_is_no_fault_of_ours(verifier):
    assert get(verifier, f"/bundle/{GRAPH}", range="bytes=9999999-").status_code == 416
    assert len(get(verifier, f"/bundle/{GRAPH}", range="bytes=0-0," * 500 + "5-6").content) == 300_000


def test_without_the_option_there_is_no_page():
    with serving(ToyEngine(), Settings(token=TOKEN)) as plain:
        assert {get(plain, path).status_code for path in ("/", "/index.html", "/bundle/manifest.json")} == {404}
        own = f"http://127.0.0.1:{plain.port}"
        assert refusal(plain, "moa.v1", bearer(), origin=own)[0] == 403


def test_the_verifiers_own_paths_stay_what_they_were(verifier):
    assert get(verifier, "/healthz").json() == {"status": "ok"}
    assert get(verifier, "/v1/status").status_code == 401 and get(verifier, "/metrics").status_code == 401
    text = verifier.http("GET", "/metrics").text
    assert "moa_downloads 0.0" in text and "moa_download_bytes_total " in text


def test_a_folder_without_a_page(tmp_path):
    with pytest.raises(MoaError, match=r"has no index\.html"):
        page_files(tmp_path)


def test_a_bundle_that_is_damaged_or_anothers(tmp_path):
    folder = write_web_bundle(tmp_path / "bundle", 1000)
    with pytest.raises(MoaError, match="another target or drafter than this verifier's"):
        bundle_files(folder, Fingerprints("other", PRINTS.tokenizer, PRINTS.drafter))
    (folder / GRAPH).write_bytes(b"x" * 1000)
    with pytest.raises(MoaError, match=f"{GRAPH} in the bundle .* was changed"):
        bundle_files(folder, PRINTS)


def test_which_bundle_is_served(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(web_setup, "make_bundle", lambda folder, *said: made.append((folder, *said)))
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MOA_EDGE_BUNDLE", raising=False)
    own = tmp_path / "cache" / "bundles" / "web"
    with pytest.raises(MoaError, match="moa-export --target web --model NAME"):
        find_bundle(None, default_target=False)
    assert find_bundle(None, default_target=True) == own and made == [(own, "web", "moa-serve --web", "some minutes")]
    write_web_bundle(own, 1000)
    assert find_bundle(None, default_target=False) == own
    default = write_web_bundle(tmp_path / "cache" / "bundles" / "default", 1000, targets=("onnx",))
    assert find_bundle(None, default_target=True) == own
    with pytest.raises(MoaError, match="no graph for browsers: export it again with --target web"):
        find_bundle(default, default_target=True)
    both = write_web_bundle(tmp_path / "both", 1000)
    assert find_bundle(both, default_target=True) == both
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(both))
    assert find_bundle(None, default_target=True) == both
    with pytest.raises(MoaError, match="is no bundle"):
        find_bundle(tmp_path / "none", default_target=True)
    assert len(made) == 1


def test_the_files_are_those_of_the_start(tmp_path):
    write_page(tmp_path)
    with serving(ToyEngine(), Settings(), files=page_files(tmp_path)) as verifier:
        before = get(verifier, "/").content
        (tmp_path / "index.html").write_text("another build")
        (tmp_path / "new.js").write_text("new")
        assert get(verifier, "/").content == before and get(verifier, "/new.js").status_code == 404
