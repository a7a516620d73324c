"""Requests that a proxy in front of the verifier may end elsewhere: refused, and nothing behind them is answered."""

from __future__ import annotations

import pytest

from moa_server.edge.connection_limits import EdgeLimits
from support.malformed_framing import REQUESTS, SMUGGLED
from support.server.edge_running import Edge, edge, error_of, read_all, status_of

CHUNKED = b"POST /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def running():
    with edge(EdgeLimits(close_seconds=0.5)) as served:
        yield served


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_it_is_refused_and_nothing_behind_it_is_answered(running: Edge, request_: bytes, cut: bool) -> None:
    sent = request_ + SMUGGLED
    with running.open(b"" if cut else sent) as connected:
        for at in range(len(sent) if cut else 0):
            connected.sendall(sent[at : at + 1])
        answer = read_all(connected)
    assert status_of(answer) in (400, 501) and answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in answer.lower()
    assert not running.complaints()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("length and chunks", "a request has either Transfer-Encoding or Content-Length"),
        ("a folded encoding", "a header field stands in one line"),
        ("a line feed behind a field", "a line ends in a carriage return and a line feed"),
        ("a line feed behind a trailer", "a line ends in a carriage return and a line feed"),
        ("an encoding in HTTP/1.0", "Transfer-Encoding needs HTTP/1.1"),
    ],
)
def test_the_answer_says_what_is_wrong(running: Edge, name: str, says: str) -> None:
    assert error_of(running.ask(REQUESTS[name])) == says


def test_a_request_behind_an_answered_one_is_refused_as_well(running: Edge) -> None:
    first = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    answer = running.ask(first + REQUESTS["length and chunks"] + SMUGGLED)
    assert answer.count(b"HTTP/1.1 200 ") == answer.count(b"HTTP/1.1 400 ") == 1 and answer.count(b"HTTP/1.1 ") == 2


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "byte by byte"])
def test_chunks_with_and_without_trailers_are_taken(running: Edge, cut: bool) -> None:
    for end in (b"\r\n", b"X-A: b\r\nX-C: d\r\n\r\n"):
        sent = CHUNKED + b"5;name=value\r\n1\n2\r\n\r\nC\r\n\r\n\n\n12345 67\r\n0\r\n" + end
        with running.open(b"" if cut else sent) as connected:
            for at in range(len(sent) if cut else 0):
                connected.sendall(sent[at : at + 1])
            answer = read_all(connected)
        assert status_of(answer) == 200 and answer.endswith(b"\r\n\r\n17")
