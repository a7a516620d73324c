"""The edge over TLS: a handshake counts and has a deadline like everything before the first request."""

from __future__ import annotations

import contextlib

import pytest

from moa_server.edge.connection_limits import EdgeLimits
from support.server.edge_running import edge, eventually, is_closed, read_all, secured, status_of

PATIENT = EdgeLimits(connections=20, per_address=1000, header_seconds=60)
HASTY = EdgeLimits(header_seconds=1, close_seconds=0.5)


@pytest.fixture
def clients():
    with contextlib.ExitStack() as stack:
        yield lambda connected: stack.enter_context(connected)


def test_connections_in_a_tls_handshake_count_and_give_way(clients, tls):
    with edge(PATIENT, tls) as running:
        idle = [clients(running.open(b"\x16\x03" if number % 2 else b"")) for number in range(40)]
        with secured(running.open(b"")) as connected:
            connected.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert status_of(read_all(connected)) == 200
        eventually(lambda: sum(is_closed(each) for each in idle) >= 20)
        assert len(running.slots) <= 20
        assert not running.complaints()


def test_slow_and_broken_tls_is_closed_without_a_word_in_the_log(clients, tls):
    with edge(HASTY, tls) as running:
        clients(running.open())
        clients(running.open(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"))
        clients(running.open(bytes.fromhex("16030100c8010000c40303")))
        silent = secured(clients(running.open()))
        assert read_all(silent) == b""
        slow = secured(running.open())
        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert status_of(read_all(slow)) == 408
        slow.close()
        eventually(lambda: len(running.slots) == 0)
        assert not running.complaints()
