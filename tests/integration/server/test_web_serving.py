"""Downloads beside sessions: slow readers, crowds, readers that leave, files that change."""

from __future__ import annotations

import contextlib
import logging
import os
import socket

import httpx
import pytest

from moa_runtime.session.events import Sampling
from moa_server.edge.connection_limits import EdgeLimits
from moa_server.settings import Settings
from moa_server.web import site as web_site
from support.server.edge_running import eventually, is_closed
from support.server.running import TIMEOUT_S, Client, Verifier, serving
from support.server.web_site import GRAPH, site
from support.toy_engine import ToyEngine

BYTES = 16 << 20  # more than the system buffers for a reader
PATH = f"/bundle/{GRAPH}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="module")
def files(folder):
    return site(folder, BYTES)


@pytest.fixture
def opened():
    """A function that asks for a path and reads nothing."""
    with contextlib.ExitStack() as stack:

        def opening(verifier: Verifier, path: str = PATH) -> socket.socket:
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.settimeout(TIMEOUT_S)
            reader.connect(("127.0.0.1", verifier.port))
            reader.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            return reader

        yield opening


@pytest.fixture
def complaints():
    """Of all loggers, from warnings on."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


def running(verifier: Verifier) -> int:
    return len(verifier.parts.website.downloads)


def whole(verifier: Verifier) -> bytes:
    return httpx.get(f"http://127.0.0.1:{verifier.port}{PATH}", timeout=TIMEOUT_S).content


def converse(verifier: Verifier, engine: ToyEngine) -> None:
    """A drafted answer, which is what the target would have written alone."""
    prompt, sampling = [5, 6, 7], Sampling(temperature=0.8, seed=3)
    expected = verifier.decode(prompt, 40, sampling)
    client = Client(verifier, engine)
    client.connect()
    client.session.prompt(prompt, max_new_tokens=40, sampling=sampling)
    client.rounds(lambda tokens: [*expected[len(tokens) - len(prompt) :][:3], 1])
    assert client.session.tokens[len(prompt) :] == expected and client.finished
    client.drop()


def test_sessions_go_on_beside_readers_that_stand_still(files, opened, complaints, monkeypatch):
    monkeypatch.setattr(web_site, "_SPAN_S", float("inf"))  # however long this takes
    engine = ToyEngine()
    with serving(engine, Settings(), files=files, limits=EdgeLimits(connections=64, send_seconds=1000)) as verifier:
        most = verifier.parts.website.downloads.most // 2  # of one address
        readers = [opened(verifier) for _ in range(most)]
        eventually(lambda: running(verifier) == most)
        converse(verifier, engine)
        refused = httpx.get(f"http://127.0.0.1:{verifier.port}{PATH}")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert httpx.get(f"http://127.0.0.1:{verifier.port}/healthz").status_code == 200
        assert not any(is_closed(reader) for reader in readers) and running(verifier) == most
        assert not complaints


def test_a_reader_that_stands_still_gives_way(files, folder, opened, complaints, monkeypatch):
    monkeypatch.setattr(web_site, "_SPAN_S", 0.0)
    with serving(ToyEngine(), Settings(), files=files, limits=EdgeLimits(connections=64)) as verifier:
        most = verifier.parts.website.downloads.most // 2
        readers = [opened(verifier) for _ in range(most)]
        eventually(lambda: running(verifier) == most)
        assert whole(verifier) == (folder / "bundle" / GRAPH).read_bytes()
        # The oldest one's connection was reset, with what it had not read.
        with contextlib.suppress(ConnectionError):
            while readers[0].recv(1 << 20):
                pass
        eventually(lambda: running(verifier) == most - 1)
        assert not any(is_closed(reader) for reader in readers[1:]) and not complaints


@pytest.mark.parametrize("leaves", [False, True])
def test_a_reader_that_leaves_or_reads_nothing_is_cut_off(files, opened, complaints, leaves):
    with serving(ToyEngine(), Settings(), files=files, limits=EdgeLimits(send_seconds=1)) as verifier:
        reader = opened(verifier)
        if leaves:
            assert reader.recv(1000)
            reader.close()
        else:
            eventually(lambda: running(verifier) == 1)
        eventually(lambda: running(verifier) == 0 and len(verifier.server.slots) == 0)
        assert verifier.parts.website._bytes < BYTES and not complaints


def test_few_connections_leave_fewer_downloads(files):
    with serving(ToyEngine(), Settings(), files=files, limits=EdgeLimits(connections=16)) as verifier:
        assert verifier.parts.website.downloads.most == 4


def test_a_graph_that_changes_is_not_sent_to_its_end(tmp_path, opened, complaints):
    files = site(tmp_path, BYTES)
    with serving(ToyEngine(), Settings(), files=files) as verifier:
        reader = opened(verifier)
        eventually(lambda: running(verifier) == 1)
        os.utime(tmp_path / "bundle" / GRAPH, ns=(1, 1))  # as if it had been exported again
        received = 0
        with contextlib.suppress(ConnectionError):
            while part := reader.recv(1 << 20):
                received += len(part)
        assert received < BYTES
        refused = httpx.get(f"http://127.0.0.1:{verifier.port}{PATH}")
        assert refused.status_code == 503
        assert {str(tmp_path / "bundle" / GRAPH) in each.getMessage() for each in complaints} == {True}
