"""The verifier's last frames arrive, whatever its client still writes and however late it reads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from websockets.client import ClientProtocol
from websockets.frames import Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from e2e.server.test_drain import CLIENTS, COUNT, PROMPTS, asking
from moa_runtime.bundle import Fingerprints
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Sampling
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.connection import GOING_AWAY, NORMAL, REFUSED
from moa_server.edge.connection_limits import EdgeLimits
from moa_server.edge.websocket import EdgeWebSocket
from moa_server.settings import Settings
from support.server.edge_running import TIMEOUT_S, edge, eventually, secured
from support.server.running import Verifier, serving
from support.toy_engine import PRINTS, STOP, ToyEngine
from support.toy_engine import plain as toy_plain

#: Longer than any test takes: no peer is given up.
PATIENT = EdgeLimits(close_seconds=10 * TIMEOUT_S)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")


TLS = pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])


class Writer:
    """A client that reads only when it is told to, through a small buffer. A write of it that fails fails the test."""

    def __init__(self, port: int, path: str, tls: bool) -> None:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(TIMEOUT_S)
        raw.connect(("127.0.0.1", port))
        self.socket: socket.socket | ssl.SSLSocket = secured(raw) if tls else raw
        self.ended = False
        self.protocol = ClientProtocol(parse_uri(f"ws://127.0.0.1:{port}{path}"), max_size=None)
        self.protocol.send_request(self.protocol.connect())
        self._flush()
        while self.protocol.state is State.CONNECTING:
            self.protocol.receive_data(self.socket.recv(1))
        self.protocol.events_received()

    def write(self, message: bytes, count: int = 1) -> None:
        """So many times the same message."""
        for _ in range(count):
            self.protocol.send_binary(message)
        self._flush()

    def ping(self) -> None:
        self.protocol.send_ping(b"")
        self._flush()

    def write_on(self) -> None:
        """Write what no app is told of, for long enough that a server which just closes is seen to."""
        until = time.monotonic() + 1
        while time.monotonic() < until:
            self.protocol.send_pong(b"")
            self._flush()
            time.sleep(0.01)

    def read(self) -> bytes:
        """The next message."""
        while not (messages := self._messages(100)):
            pass
        return messages[0]

    def rest(self, *, to_end: bool = False) -> tuple[list[bytes], int | None]:
        """Return all messages that still come, and the code of the close frame after them; then close, or before that
        wait until the server has closed."""
        with self.socket:
            messages = []
            while not (self.ended or (self.protocol.close_rcvd and not to_end)):
                messages += self._messages()
            return messages, self.protocol.close_rcvd.code if self.protocol.close_rcvd else None

    def _messages(self, size: int = 65536) -> list[bytes]:
        """The messages that what is read next ends."""
        received = self.socket.recv(size)
        self.ended = not received
        self.protocol.receive_data(received) if received else self.protocol.receive_eof()
        self._flush()
        return [bytes(event.data) for event in self.protocol.events_received() if event.opcode is Opcode.BINARY]

    def _flush(self) -> None:
        for data in self.protocol.data_to_send():
            self.socket.sendall(data) if data else None


# -- why a session ends ----------------------------------------------------------------------------


@dataclass
class Ending:
    """A client's session that ends.

    Attributes:
        said: an event among the verifier's last messages; None where there need be none.
        code: of its close frame.
    """

    said: str | None
    code: int
    end: Callable[[Verifier, Writer, ClientSession], None]
    prints: Fingerprints = PRINTS
    settings: Settings = field(default_factory=Settings)


def drain(verifier: Verifier, writer: Writer, session: ClientSession) -> None:
    """Ask; a verdict is due from then on."""
    session.prompt([5, 6, 7], Sampling(), COUNT)
    for frame in session.frames_to_send():
        writer.write(frame)
    eventually(lambda: verifier.parts.engine.steps)


def refusal(verifier: Verifier, writer: Writer, session: ClientSession) -> None:
    eventually(lambda: "moa_refusals_total" in verifier.parts.metrics.text().decode())


def silence(verifier: Verifier, writer: Writer, session: ClientSession) -> None:
    eventually(lambda: not verifier.server.slots.busy)


def pings(verifier: Verifier, writer: Writer, session: ClientSession) -> None:
    for _ in range(300):
        writer.ping()
    silence(verifier, writer, session)


def goodbye(verifier: Verifier, writer: Writer, session: ClientSession) -> None:
    writer.write(wire.ClientMessage(bye=wire.Bye()).SerializeToString())
    silence(verifier, writer, session)


ENDINGS = {
    "drain": Ending("verdict", GOING_AWAY, drain),
    "fault": Ending("fault", REFUSED, refusal, prints=Fingerprints("another", "tokenizer", "drafter")),
    "idle": Ending("fault", GOING_AWAY, silence, settings=Settings(idle_seconds=0.5)),
    "limit": Ending(None, REFUSED, pings),
    "normal": Ending(None, NORMAL, goodbye),
}


@TLS
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_client_that_writes_while_the_verifier_ends_gets_the_last_frames(ending, secure, tls, caplog):
    with serving(
        ToyEngine(), ending.settings, limits=PATIENT, tls=tls if secure else None, drain_seconds=TIMEOUT_S
    ) as verifier:
        writer, session = Writer(verifier.port, "/v1/session", secure), ClientSession(ending.prints, stop_tokens=[STOP])
        session.connect()
        for frame in session.frames_to_send():
            writer.write(frame)
        if ending.prints == PRINTS:
            session.receive(writer.read())
        ending.end(verifier, writer, session)
        verifier.server.handle_exit(signal.SIGTERM, None)
        writer.write_on()
        messages, code = writer.rest()
        assert code == ending.code
        if ending.said is not None:
            assert ending.said in [wire.ServerMessage.FromString(each).WhichOneof("event") for each in messages]
        eventually(lambda: not verifier.server.server_state.connections)  # long before the deadline of its peer
    assert not caplog.records


@TLS
def test_a_client_that_writes_gets_a_large_message_and_the_close_frame_after_it(secure, tls):
    with edge(PATIENT, tls if secure else None, graceful_s=10 * TIMEOUT_S) as running:
        writer = Writer(running.port, "/ws", secure)
        writer.write(b"flood1000000")
        writer.write(b"close")
        eventually(lambda: running.ended)
        running.server.should_exit = True
        writer.write_on()
        assert writer.rest() == ([b"y" * 1_000_000], 4000)
        assert not running.complaints()


def test_over_tls_a_connection_ends_once_its_client_has_closed(tls):
    """A client waits for that, and only over TLS the close frame alone says so."""
    with edge(PATIENT, tls) as running:
        writer = Writer(running.port, "/ws", tls=True)
        writer.write(b"close")
        eventually(lambda: running.ended)
        writer.write(b"a message after it")
        assert writer.rest(to_end=True) == ([], 4000)
        eventually(lambda: len(running.slots) == 0)
        assert not running.complaints()


@TLS
def test_what_comes_after_the_close_frame_is_dropped_unparsed(secure, tls, monkeypatch):
    parsed = []
    handle_bytes = EdgeWebSocket.handle_bytes

    def counting(self, event) -> None:
        parsed.append(event)
        handle_bytes(self, event)

    monkeypatch.setattr(EdgeWebSocket, "handle_bytes", counting)
    with edge(PATIENT, tls if secure else None) as running:
        writer = Writer(running.port, "/ws", secure)
        writer.write(b"close")
        eventually(lambda: running.ended)
        for _ in range(100):
            writer.write(b"m", 1000)
        assert writer.rest()[1] == 4000
        eventually(lambda: len(running.slots) == 0)
        assert len(parsed) < 1000, "of a hundred thousand"
        assert not running.complaints()


# -- processes -------------------------------------------------------------------------------------


@contextlib.contextmanager
def python(program: str, *arguments: object) -> Iterator[subprocess.Popen]:
    """One of the programs of ``tests/support/server``."""
    tests = Path(__file__).parents[2]
    paths = os.pathsep.join([str(tests), *sys.path])
    command = [sys.executable, str(tests / "support" / "server" / program), *map(str, arguments)]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def test_clients_of_a_process_that_stood_still_while_the_verifier_ended():
    with (
        python("verifier_process.py", PATIENT.close_seconds) as verifier,
        python("writing_clients.py", int(verifier.stdout.readline()), CLIENTS) as clients,
    ):
        assert clients.stdout.readline() == "ready\n"
        clients.send_signal(signal.SIGSTOP)
        verifier.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            verifier.wait(2)  # as one that does not wait for its peers has ended long before
        clients.send_signal(signal.SIGCONT)
        told, complaints = clients.communicate(timeout=TIMEOUT_S)
        committed, faults = verifier.communicate(timeout=TIMEOUT_S)
    assert (complaints, faults, verifier.returncode) == ("", "", 0)
    assert json.loads(told) == {"codes": [GOING_AWAY] * CLIENTS, "tokens": int(committed)}


@pytest.mark.parametrize("processes", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_every_client_of_processes_that_end_gets_its_last_verdict_and_the_close_frame(processes):
    answers = [[*prompt, *toy_plain(ToyEngine(), prompt, COUNT)] for prompt in PROMPTS]
    codes: list[int | None] = []
    lost = 0
    for _ in range(processes):
        with (
            python("verifier_process.py", PATIENT.close_seconds) as running,
            asking(Verifier(None, int(running.stdout.readline()), ""), ToyEngine(), answers) as clients,
        ):
            running.send_signal(signal.SIGTERM)
            committed, faults = running.communicate(timeout=60 + TIMEOUT_S)
        assert (faults, running.returncode) == ("", 0)
        codes += [client.code for client in clients]
        told = sum(len(each.session.committed) for each in clients) - sum(map(len, PROMPTS))
        lost += int(committed) - told
    assert (codes, lost) == ([GOING_AWAY] * CLIENTS * processes, 0)
