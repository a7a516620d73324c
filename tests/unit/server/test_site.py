"""Files over HTTP without a network: which bytes are sent, ranges, gzip, and files that change."""

from __future__ import annotations

import gzip
import os

import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from moa_server.web.site import ChangedError, WebFile, zipped

DATA = bytes(range(100))
TEXT = b"the same words again and again, " * 100


@pytest.fixture
def plain(tmp_path):
    (tmp_path / "graph").write_bytes(DATA)
    return WebFile(tmp_path / "graph", "application/octet-stream", "abc", {"cache-control": "no-store"})


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    return WebFile(tmp_path / "text", "text/plain; charset=utf-8", "def", {}, zipped(TEXT))


def get(file, **headers):
    async def app(scope, receive, send):
        await file.response(Headers(scope=scope))(scope, receive, send)

    asked = {name.replace("_", "-"): value for name, value in headers.items()}
    return TestClient(app).get("/", headers={"accept-encoding": "identity", **asked})


def test_a_plain_request_gets_all_of_it(plain):
    answered = get(plain)
    assert (answered.status_code, answered.content) == (200, DATA)
    expected = {
        "cache-control": "no-store",
        "etag": '"abc"',
        "content-type": "application/octet-stream",
        "accept-ranges": "bytes",
        "content-length": "100",
    }
    assert answered.headers.items() >= expected.items()


@pytest.mark.parametrize(
    ("wanted", "part"),
    [("bytes=0-0", (0, 1)), ("bytes=10-19", (10, 20)), ("bytes=90-", (90, 100)), ("bytes=-1", (99, 100))],
)
def test_a_range(plain, wanted, part):
    answered = get(plain, range=wanted)
    start, stop = part
    assert (answered.status_code, answered.content) == (206, DATA[start:stop])
    assert answered.headers["content-range"] == f"bytes {start}-{stop - 1}/100"


@pytest.mark.parametrize(("if_range", "status"), [('"abc"', 206), ('"other"', 200), ('W/"abc"', 200)])
def test_a_part_only_of_what_the_client_has(plain, if_range, status):
    assert get(plain, range="bytes=50-", if_range=if_range).status_code == status


@pytest.mark.parametrize(("held", "status"), [('"abc"', 304), ('W/"abc"', 304), ('"x", "abc"', 304), ('"ab"', 200)])
def test_a_client_that_has_it_gets_no_bytes(plain, held, status):
    answered = get(plain, if_none_match=held)
    assert (answered.status_code, answered.content) == (status, b"" if status == 304 else DATA)
    assert answered.headers["etag"] == '"abc"' and answered.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("takes", ["gzip, deflate, br, zstd", "identity"])
def test_gzip_for_clients_that_take_it(text, takes):
    answered = get(text, accept_encoding=takes)
    coded = takes != "identity"
    assert answered.content == TEXT and answered.headers["vary"] == "accept-encoding"
    assert answered.headers.get("content-encoding") == ("gzip" if coded else None)
    assert answered.headers["content-length"] == str(len(zipped(TEXT) if coded else TEXT))
    tag = answered.headers["etag"]
    assert tag == ('"def-gzip"' if coded else '"def"')
    assert get(text, accept_encoding=takes, if_none_match=tag).status_code == 304


def test_a_range_is_of_the_bytes_themselves(text):
    answered = get(text, accept_encoding="gzip", range="bytes=10-19", if_range='"def"')
    assert (answered.status_code, answered.content) == (206, TEXT[10:20]) and "content-encoding" not in answered.headers
    # The tag of the gzip answer names other bytes, of which it would be no part.
    assert get(text, range="bytes=10-19", if_range='"def-gzip"').status_code == 200


def test_bytes_need_no_file():
    answered = get(WebFile(DATA, "application/x-x509-ca-cert", "abc"))
    assert (answered.content, answered.headers["content-length"]) == (DATA, "100")


def test_gzip_if_it_pays():
    small = zipped(TEXT)
    assert small is not None and len(small) < len(TEXT) / 10 and gzip.decompress(small) == TEXT
    assert small == zipped(TEXT), "the same bytes each time, as the same ETag says"
    assert zipped(b"short" * 10) is None and zipped(os.urandom(5000)) is None


@pytest.mark.parametrize("happens", ["replaced", "longer", "shorter", "touched", "removed"])
def test_a_file_that_is_no_longer_the_same(plain, tmp_path, happens):
    path = tmp_path / "graph"
    if happens == "replaced":
        (tmp_path / "new").write_bytes(DATA)
        os.utime(tmp_path / "new", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        (tmp_path / "new").replace(path)
    elif happens == "removed":
        path.unlink()
    elif happens == "touched":
        os.utime(path, ns=(1, 1))
    else:
        path.write_bytes(DATA + b"x" if happens == "longer" else DATA[:-1])
    with pytest.raises(ChangedError, match=r"start moa-serve again|start it again"):
        plain.response(Headers({}))


def test_gzip_in_memory_is_that_of_the_start(text, tmp_path):
    (tmp_path / "text").write_bytes(b"another build")
    assert get(text, accept_encoding="gzip").content == TEXT
    with pytest.raises(ChangedError):
        text.response(Headers({}))
