"""Files over HTTP without a network: conditions, ranges, gzip."""

from __future__ import annotations

import gzip
import os

import pytest

from moa_server.web.files import ChangedError, InMemory, OnDisk, WebFile, zipped

DATA = bytes(range(100))
TEXT = b"the same words again and again, " * 100
PLAIN = WebFile(InMemory(DATA), "application/octet-stream", "abc", {"cache-control": "no-store"})
ZIPPED = WebFile(InMemory(TEXT), "text/plain; charset=utf-8", "def", {}, zipped(TEXT))


def body(reply) -> bytes:
    return reply.content.read(reply.start, reply.stop - reply.start)


def test_a_plain_request_gets_all_of_it():
    reply = PLAIN.reply({})
    assert (reply.status, body(reply)) == (200, DATA)
    assert reply.headers == {
        "cache-control": "no-store",
        "etag": '"abc"',
        "content-type": "application/octet-stream",
        "accept-ranges": "bytes",
        "content-length": "100",
    }


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=10-19", (10, 20)),
        ("bytes=90-", (90, 100)),
        ("bytes=90-1000", (90, 100)),
        ("bytes=99-99", (99, 100)),
        ("bytes=-1", (99, 100)),
        ("bytes=-100", (0, 100)),
        ("bytes=-1000", (0, 100)),
        ("BYTES=5-", (5, 100)),
    ],
)
def test_a_range(wanted, part):
    reply = PLAIN.reply({"range": wanted, "accept-encoding": "gzip"})
    start, stop = part
    assert (reply.status, body(reply)) == (206, DATA[start:stop])
    assert reply.headers["content-range"] == f"bytes {start}-{stop - 1}/100"
    assert reply.headers["content-length"] == str(stop - start)


@pytest.mark.parametrize("wanted", ["bytes=100-", "bytes=100-200", "bytes=-0", "bytes=999999999999999999-"])
def test_a_range_that_does_not_exist(wanted):
    reply = PLAIN.reply({"range": wanted})
    assert (reply.status, reply.content, reply.headers["content-range"]) == (416, None, "bytes */100")


@pytest.mark.parametrize(
    "wanted",
    [
        "",
        "bytes",
        "bytes=",
        "bytes=-",
        "bytes=5-4",
        "bytes=0-1,5-6",
        "lines=0-1",
        "bytes=a-b",
        "bytes=--5",
        "bytes=+1-2",
        "bytes=1-2-3",
        "bytes= 1 - 2",
        "bytes=\u0661-\u0662",
        "bytes=0x1-0x2",
        "bytes=" + "9" * 5000 + "-",
        "bytes=1.5-2",
    ],
    ids=lambda wanted: ascii(wanted[:20]),
)
def test_ranges_that_are_ignored(wanted):
    reply = PLAIN.reply({"range": wanted})
    assert (reply.status, body(reply)) == (200, DATA) and "content-range" not in reply.headers


def test_an_empty_file():
    empty = WebFile(InMemory(b""), "text/plain", "e")
    assert (empty.reply({}).status, empty.reply({}).headers["content-length"]) == (200, "0")
    assert {empty.reply({"range": wanted}).status for wanted in ("bytes=0-", "bytes=-5")} == {416}


@pytest.mark.parametrize(
    ("if_range", "status"),
    [('"abc"', 206), ('"other"', 200), ('W/"abc"', 200), ("Wed, 25 Nov 2026 00:00:00 GMT", 200), ("", 200)],
)
def test_a_part_only_of_what_the_client_has(if_range, status):
    assert PLAIN.reply({"range": "bytes=50-", "if-range": if_range}).status == status


@pytest.mark.parametrize(
    ("held", "status"),
    [
        ('"abc"', 304),
        ('W/"abc"', 304),
        ('"x", "abc"', 304),
        ('"a,b" ,W/"abc"', 304),
        ("*", 304),
        ('"ab"', 200),
        ("abc", 200),
        ('"abc', 200),
        ("", 200),
    ],
)
def test_who_has_it_gets_no_bytes(held, status):
    reply = PLAIN.reply({"if-none-match": held, "range": "bytes=0-" if status == 304 else ""})
    assert reply.status == status
    if status == 304:
        assert reply.content is None and reply.headers == {"cache-control": "no-store", "etag": '"abc"'}


@pytest.mark.parametrize(("held", "status"), [('"abc"', 200), ("*", 200), ('W/"abc"', 412), ('"x"', 412), ("", 412)])
def test_who_wants_no_other_one(held, status):
    assert PLAIN.reply({"if-match": held}).status == status


@pytest.mark.parametrize(
    ("takes", "coding"),
    [
        ("gzip", "gzip"),
        ("gzip, deflate, br, zstd", "gzip"),
        ("br;q=1.0, GZIP;q=0.5", "gzip"),
        ("*", "gzip"),
        ("x-gzip", "gzip"),
        ("identity", None),
        ("gzip;q=0", None),
        ("gzip;q=0.000, *", None),
        ("*;q=0", None),
        ("", None),
        ("gzip;q=abc", None),
    ],
)
def test_gzip_for_those_that_take_it(takes, coding):
    reply = ZIPPED.reply({"accept-encoding": takes})
    sent = body(reply)
    assert reply.headers.get("content-encoding") == coding and reply.headers["vary"] == "accept-encoding"
    assert (gzip.decompress(sent) if coding else sent) == TEXT
    assert reply.headers["content-length"] == str(len(sent))
    assert reply.headers["etag"] == ('"def-gzip"' if coding else '"def"')
    assert ZIPPED.reply({"accept-encoding": takes, "if-none-match": reply.headers["etag"]}).status == 304


def test_a_range_is_of_the_bytes_themselves():
    reply = ZIPPED.reply({"accept-encoding": "gzip", "range": "bytes=10-19", "if-range": '"def"'})
    assert (reply.status, body(reply)) == (206, TEXT[10:20]) and "content-encoding" not in reply.headers
    # The tag of the gzip answer names other bytes, of which it would be no part.
    assert ZIPPED.reply({"range": "bytes=10-19", "if-range": '"def-gzip"'}).status == 200


def test_gzip_where_it_pays():
    assert zipped(TEXT).size < len(TEXT) / 10 and zipped(TEXT)._data == zipped(TEXT)._data
    assert zipped(b"short" * 10) is None and zipped(os.urandom(5000)) is None


def test_a_file_on_disk_is_read_in_parts(tmp_path):
    path = tmp_path / "graph"
    path.write_bytes(DATA)
    content = OnDisk(path)
    assert content.size == 100 and content.read(90, 10) == DATA[90:] and content.read(0, 5) == DATA[:5]


@pytest.mark.parametrize("happens", ["replaced", "longer", "shorter", "touched", "removed"])
def test_a_file_that_is_no_longer_the_same(tmp_path, happens):
    path = tmp_path / "graph"
    path.write_bytes(DATA)
    content = OnDisk(path)
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
        content.read(0, 1)
