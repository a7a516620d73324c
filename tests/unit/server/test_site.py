"""Files over HTTP without a network: which bytes are sent, ranges, gzip, files that change, and who may download."""

from __future__ import annotations

import gzip
import os

import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from moa_server.web.site import ChangedError, Downloads, WebFile, zipped
from support.refusals import refused

DATA = bytes(range(100))
TEXT = b"the same words again and again, " * 100
KB = 1 << 10


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


@pytest.mark.parametrize(
    ("wanted", "part"),
    [("bytes=0-0", (0, 1)), ("bytes=10-19", (10, 20)), ("bytes=90-", (90, 100)), ("bytes=-1", (99, 100))],
)
def test_a_range_is_part_of_the_file(plain, wanted, part):
    answered = get(plain, range=wanted)
    start, stop = part
    assert (answered.status_code, answered.content) == (206, DATA[start:stop])
    assert answered.headers["content-range"] == f"bytes {start}-{stop - 1}/100"


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"range": "bytes=50-", "if_range": '"abc"'}, 206),
        ({"range": "bytes=50-", "if_range": '"other"'}, 200),
        ({"range": "bytes=50-", "if_range": 'W/"abc"'}, 200),
        ({"if_none_match": '"abc"'}, 304),
        ({"if_none_match": 'W/"abc"'}, 304),
        ({"if_none_match": '"x", "abc"'}, 304),
        ({"if_none_match": '"ab"'}, 200),
    ],
)
def test_conditions_compare_the_etag(plain, asked, status):
    answered = get(plain, **asked)
    content = {200: DATA, 206: DATA[50:], 304: b""}[status]
    assert (answered.status_code, answered.content) == (status, content)
    assert answered.headers["etag"] == '"abc"' and answered.headers["cache-control"] == "no-store"


def test_a_range_is_of_the_file_not_of_its_gzip(text):
    whole = get(text, accept_encoding="gzip")
    assert (whole.headers["etag"], whole.headers["vary"]) == ('"def-gzip"', "accept-encoding")
    answered = get(text, accept_encoding="gzip", range="bytes=10-19", if_range='"def"')
    assert (answered.status_code, answered.content) == (206, TEXT[10:20]) and "content-encoding" not in answered.headers
    assert get(text, range="bytes=10-19", if_range='"def-gzip"').status_code == 200


def test_gzip_is_reproducible_and_used_if_it_pays():
    small = zipped(TEXT)
    assert small is not None and len(small) < len(TEXT) / 10 and gzip.decompress(small) == TEXT
    assert small == zipped(TEXT) and zipped(b"short" * 10) is None and zipped(os.urandom(5000)) is None


@pytest.mark.parametrize("happens", ["replaced", "longer", "touched", "removed"])
def test_a_file_that_changed_is_not_sent(plain, tmp_path, happens):
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
        path.write_bytes(DATA + b"x")
    with refused("unreadable" if happens == "removed" else "changed", ChangedError):
        plain.response(Headers({}))


# -- downloads ---------------------------------------------------------------------------------------


class Slots:
    """Downloads of which four may run, with a clock of the test's own; ``ended`` has those that gave way."""

    def __init__(self) -> None:
        self.now, self.ended = 0.0, []
        self.downloads = Downloads(most=4, bytes_per_second=1000 * KB, clock=lambda: self.now)

    def begin(self, name: str, network: str = ""):
        return self.downloads.begin(network or name, lambda: self.ended.append(name))

    def read(self, download, rate: int, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.downloads.wait_s(download, rate)


@pytest.fixture
def slots():
    return Slots()


def test_downloads_have_a_limit_and_one_network_half_of_it(slots):
    running = [slots.begin(name) for name in "abcd"]
    assert all(running) and slots.begin("e") is None and len(slots.downloads) == 4 and not slots.ended
    for _ in range(2):  # again does no harm
        slots.downloads.over(running[0])
    assert slots.begin("e") and slots.begin("f") is None
    slots = Slots()
    assert slots.begin("a", "net") and slots.begin("b", "net") and slots.begin("c", "net") is None
    assert slots.begin("d") and slots.begin("e") and slots.begin("f") is None


def test_readers_that_stand_still_give_way_the_oldest_first(slots):
    first, _, quick = (slots.begin(name) for name in ("a", "b", "quick"))
    slots.now = 5.0
    slots.begin("new")
    assert slots.begin("early") is None
    slots.read(quick, 100 * KB, 6)
    assert slots.begin("another") and slots.ended == ["a"]
    slots.downloads.over(first)  # its own end comes later
    assert slots.begin("one more") and slots.ended == ["a", "b"]
    assert slots.begin("too many") is None  # the rest reads, or was not there for ten seconds
    slots = Slots()  # a crowded network gives way to itself alone
    for name, network in (("other", ""), ("a", "net"), ("b", "net")):
        slots.begin(name, network)
    slots.now = 10.0
    assert slots.begin("c", "net") and slots.ended == ["a"]


def test_a_slow_reader_that_filled_the_buffers_gives_way(slots):
    trickle, steady = slots.begin("trickle", "net"), slots.begin("steady", "net")
    for each in (trickle, steady):
        slots.downloads.wait_s(each, 4000 * KB)  # what the system takes of it
    for _ in range(22):
        slots.now += 1
        slots.downloads.wait_s(trickle, 8 * KB)
        slots.downloads.wait_s(steady, 40 * KB)
    assert slots.begin("next", "net") and slots.ended == ["trickle"]


def test_all_downloads_together_keep_a_pace(slots):
    a, b, wait_s = slots.begin("a"), slots.begin("b"), slots.downloads.wait_s
    assert wait_s(a, 125 * KB) == 0  # what was saved up
    assert wait_s(b, 500 * KB) == 0
    assert wait_s(a, 1) == pytest.approx(0.5)
    slots.now = 100.0
    assert wait_s(b, 1) == 0
