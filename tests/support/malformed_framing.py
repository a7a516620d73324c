"""Requests that two HTTP programs may end at different bytes, so that a proxy in front may pass on a second one unseen.
Each has :data:`SMUGGLED` behind it in tests."""

from __future__ import annotations

SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"

_POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"
_LENGTH, _CHUNKED = b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"
_BODY, _CHUNKS = b"12345", b"5\r\n12345\r\n0\r\n"

REQUESTS = {
    "length and chunks": _POST + _LENGTH + _CHUNKED + b"\r\n0\r\n\r\n",
    "chunks and length": _POST + _CHUNKED + b"Content-Length: 4\r\n\r\n" + _CHUNKS + b"\r\n",
    "length and chunks, other cases": _POST + b"content-LENGTH:5\r\ntransfer-ENCODING:chunked\r\n\r\n0\r\n\r\n",
    "length and a folded encoding": _POST + _LENGTH + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "an encoding folded into another field": _POST + b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n",
    "a folded encoding": _POST + b"Transfer-Encoding:\r\n\tchunked\r\n\r\n" + _CHUNKS + b"\r\n",
    "a folded length": _POST + b"Content-Length:\r\n 5\r\n\r\n" + _BODY,
    "a folded field": _POST + b"X: a\r\n b\r\n\r\n",
    "a fold behind the request line": b"GET / HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "an encoding in HTTP/1.0": _POST.replace(b"1.1", b"1.0") + _CHUNKED + b"\r\n" + _CHUNKS + b"\r\n",
    "an encoding in HTTP/0.9": _POST.replace(b"1.1", b"0.9") + _CHUNKED + b"\r\n" + _CHUNKS + b"\r\n",
    "an encoding in HTTP/2.0": _POST.replace(b"1.1", b"2.0") + _CHUNKED + b"\r\n" + _CHUNKS + b"\r\n",
    "an encoding of two, the last not chunked": _POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + _CHUNKS,
    "a line feed in a chunk's extension": _POST + _CHUNKED + b"\r\n5;a=\n\r\n12345\r\n0\r\n\r\n",
    "two encodings": _POST + _CHUNKED + _CHUNKED + b"\r\n" + _CHUNKS + b"\r\n",
    "an encoding that is none": _POST + b"Transfer-Encoding: xchunked\r\n\r\n" + _CHUNKS + b"\r\n",
    "an encoding of two": _POST + b"Transfer-Encoding: identity, chunked\r\n\r\n" + _CHUNKS + b"\r\n",
    "a space before the colon": _POST + b"Transfer-Encoding : chunked\r\n\r\n" + _CHUNKS + b"\r\n",
    "a vertical tab": _POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + _CHUNKS + b"\r\n",
    "two lengths": _POST + _LENGTH + b"Content-Length: 6\r\n\r\n" + _BODY,
    "a signed length": _POST + b"Content-Length: +5\r\n\r\n" + _BODY,
    "line feeds alone": b"GET / HTTP/1.1\nHost: localhost\n\n",
    "a line feed behind the request line": b"GET / HTTP/1.1\nHost: localhost\r\n\r\n",
    "a line feed behind a field": _POST + b"X: a\nContent-Length: 5\r\n\r\n" + _BODY,
    "a line feed at the end of the head": b"GET / HTTP/1.1\r\nHost: localhost\r\n\n",
    "a line feed before the end of the head": b"GET / HTTP/1.1\r\nHost: localhost\n\r\n",
    "a line feed in a field that two readers end apart": _POST + b"X: a\n\nGET /v1/models HTTP/1.1\r\n\r\n",
    "a carriage return alone": _POST + b"X: a\rContent-Length: 5\r\n\r\n",
    "a line feed before the request": b"\nGET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a line feed behind the last chunk": _POST + _CHUNKED + b"\r\n" + _CHUNKS + b"\n",
    "a line feed behind a trailer": _POST + _CHUNKED + b"\r\n" + _CHUNKS + b"X: a\n\r\n",
    "a line feed at the end of the trailers": _POST + _CHUNKED + b"\r\n" + _CHUNKS + b"X: a\r\n\n",
    "a line feed behind a chunk": _POST + _CHUNKED + b"\r\n5\r\n12345\n0\r\n\r\n",
    "a line feed behind the size of a chunk": _POST + _CHUNKED + b"\r\n5\n12345\r\n0\r\n\r\n",
}
