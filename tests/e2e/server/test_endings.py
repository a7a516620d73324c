"""The end of a verifier: received frames are answered, last frames arrive, and all clients continue elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from moa_runtime.manifest import Fingerprints
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Origin, Sampling
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.app import LEAVING
from moa_server.connection import GOING_AWAY, NORMAL, REFUSED
from moa_server.edge.connection_limits import EdgeLimits
from moa_server.settings import Settings
from support.server.edge_running import edge, eventually, secured
from support.server.running import TIMEOUT_S, Client, Verifier, after_steps, moa_serve, serving
from support.toy_engine import PRINTS, STOP, ToyEngine
from support.toy_engine import plain as toy_plain

TESTS = Path(__file__).parents[2]
CLIENTS, COUNT = 30, 24
PROMPTS = [[5 + number, 6, 7] for number in range(CLIENTS)]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")


class Leaver(Client):
    """A client that asks until the verifier goes away.

    Attributes:
        code: of the close frame, once there was one.
        unanswered: frames sent on the last connection without an answer.
    """

    code: int | None = None
    unanswered = 0

    def send(self) -> None:
        for frame in self.session.frames_to_send():
            self.socket.send(frame)
            self.unanswered += 1

    def take(self) -> None:
        self.events += self.session.receive(self.socket.recv(2 * TIMEOUT_S))
        self.unanswered -= 1

    def until_closed(self, drafted: list[int]) -> None:
        """Rounds, one frame after the other, until the verifier closes the connection; ``drafted`` is the answer."""
        try:
            while self.session.answering:
                self.take()
                if self.session.answering and not self.session.awaiting_verdict:
                    at = len(self.session.tokens)
                    self.session.extend(drafted[at : at + 2], Origin.DRAFTED)
                    self.session.propose()
                    self.send()
            while True:  # memory rows may come after the last verdict
                self.take()
        except ConnectionClosed as closed:
            self.code = closed.rcvd.code if closed.rcvd else None
        self.session.disconnected()


def leavers(verifier: Verifier, engine: ToyEngine) -> list[Leaver]:
    """A client for each prompt, with its question sent."""
    clients = [Leaver(verifier, engine) for _ in PROMPTS]
    for client, prompt in zip(clients, PROMPTS, strict=True):
        client.connect()
        client.session.prompt(prompt, Sampling(), COUNT)
        client.send()
    return clients


# -- a process ------------------------------------------------------------------------------------


#: moa-serve with a toy. What an engine leaves behind says so where Python takes it apart, and where it ends in order.
TOY = """
import atexit, os, sys
import moa_server.cli as cli
import moa_server.offered_bundles as offered
from support.toy_engine import ToyEngine

offered.bundles_to_offer = lambda served, *_: offered.OfferedBundles.of([], served)  # it would make one

class Left:
    def __del__(self):
        os.write(2, b"taken apart ")

def load(options, progress):
    global left
    left = Left()
    atexit.register(print, "in order", end="")
    return ToyEngine()

cli.load_engine = load
sys.exit(cli.main())
"""


def test_a_second_signal_ends_at_once():
    with moa_serve("--no-drafts", "--drain-seconds", 1000, program=TOY, cwd=TESTS) as (running, ready):
        client = Leaver(Verifier(None, ready["port"], ""), ToyEngine())
        client.connect()
        with client.verifier.connect() as idle:  # says nothing, not even Hello
            # Again and again: of two that come before the first is handled, the system keeps one.
            eventually(lambda: running.send_signal(signal.SIGTERM) or running.poll() is not None)
            assert running.returncode == 0
            with pytest.raises(ConnectionClosed):
                idle.recv(TIMEOUT_S)
        out, err = running.communicate()
    assert (out, after_steps(err)) == ("in order", "")


def test_python_does_not_take_apart_what_has_served():
    with moa_serve("--no-drafts", "--drain-seconds", 1000, program=TOY, cwd=TESTS) as (process, ready):
        assert Verifier(None, ready["port"], "").decode([5], 3, Sampling())
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=2 * TIMEOUT_S)
    assert (process.returncode, out, after_steps(err)) == (0, "in order", "")


# -- an engine that is held up --------------------------------------------------------------------


class Held(ToyEngine):
    """A toy whose steps wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    async def step(self, requests):
        while not self.go.is_set():
            await asyncio.sleep(0.005)
        return await super().step(requests)


@pytest.fixture
def toy_answers() -> list[list[int]]:
    return [[*prompt, *toy_plain(ToyEngine(), prompt, COUNT)] for prompt in PROMPTS]


@pytest.mark.parametrize("in_time", [True, False])
def test_received_frames_get_their_verdicts_or_are_given_up(toy_answers, caplog, in_time):
    engine = Held()
    with serving(engine, Settings(), drain_seconds=2 * TIMEOUT_S if in_time else 0.3) as verifier:
        clients = leavers(verifier, engine)
        eventually(lambda: len(verifier.parts.worker) == CLIENTS)
        verifier.server.handle_exit(signal.SIGTERM, None)
        if in_time:
            eventually(lambda: verifier.http("GET", "/readyz").status_code != 200)
            with pytest.raises(InvalidStatus) as refused:
                verifier.connect().__enter__()
            assert refused.value.response.status_code == 503
            engine.go.set()
        for client in clients:
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    client.take()
            client.session.disconnected()
            assert closed.value.rcvd.code == GOING_AWAY
        assert [client.unanswered for client in clients] == [0 if in_time else 1] * CLIENTS
        engine.go.set()  # a step is never broken off
    assert engine.steps and not caplog.records
    with serving(ToyEngine(), Settings()) as elsewhere:
        for client, answer in zip(clients, toy_answers, strict=True):
            if client.session.answering:
                client.connect(elsewhere)
                client.rounds(lambda tokens, answer=answer: answer[len(tokens) : len(tokens) + 3])
                client.socket.close()
            assert not client.faults and client.session.committed == answer


def test_a_stream_that_does_not_end_in_time_is_broken_off(caplog):
    engine = Held()
    with serving(engine, Settings(), drain_seconds=0.3) as verifier:
        body = {"tokens": [5], "stream": True}
        with httpx.stream(
            "POST", f"http://127.0.0.1:{verifier.port}/v1/decode", json=body, timeout=TIMEOUT_S
        ) as answer:
            assert answer.status_code == 200
            verifier.server.handle_exit(signal.SIGTERM, None)
            assert LEAVING in answer.read().decode()
        engine.go.set()
    assert not caplog.records


@pytest.mark.parametrize("streamed", [False, True], ids=["drafted", "streamed"])
def test_chats_that_have_finished_their_answers_are_not_waited_for(streamed):
    engine = ToyEngine()
    with serving(engine, Settings(), drain_seconds=100 * TIMEOUT_S) as verifier:
        clients = [Client(verifier, engine) for _ in range(4)]
        for number, client in enumerate(clients):
            client.connect()
            client.session.prompt([5 + number, 6, 7], Sampling(), COUNT)
            if streamed:
                client.session.grant_credit(COUNT + 3)
            client.rounds(lambda tokens: [])
            assert client.finished
        verifier.server.handle_exit(signal.SIGTERM, None)
        eventually(lambda: verifier.server.should_exit)


# -- last frames -----------------------------------------------------------------------------------

#: Longer than any test takes: no peer is given up.
PATIENT = EdgeLimits(close_seconds=10 * TIMEOUT_S)

TLS = pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])


class Writer:
    """A client that reads only when it is told to, through a small buffer. A write that fails fails the test."""

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

    def send(self, session: ClientSession) -> None:
        for frame in session.frames_to_send():
            self.write(frame)

    def ping(self) -> None:
        self.protocol.send_ping(b"")
        self._flush()

    def write_on(self) -> None:
        """Write what no app is told of, for long enough that a server which just closes is seen to."""
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            self.protocol.send_pong(b"")
            self._flush()
            time.sleep(0.01)

    def read(self) -> list[bytes]:
        """The next messages, at least one."""
        while not (messages := self._messages(100)):
            pass
        return messages

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


def greeted(port: int, session: ClientSession, tls: bool = False) -> Writer:
    """A connection of a session that has sent its Hello."""
    writer = Writer(port, "/v1/session", tls)
    session.connect()
    writer.send(session)
    return writer


# -- why a session ends ----------------------------------------------------------------------------


def drain(verifier: Verifier, writer: Writer, session: ClientSession) -> None:
    """Ask; a verdict is due from then on."""
    session.prompt([5, 6, 7], Sampling(), COUNT)
    writer.send(session)
    eventually(lambda: verifier.parts.engine.steps)


def refusal(verifier: Verifier, *_: object) -> None:
    eventually(lambda: "moa_refusals_total{" in verifier.parts.metrics.text().decode())


def silence(verifier: Verifier, *_: object) -> None:
    eventually(lambda: not verifier.server.slots.busy)


def goodbye(verifier: Verifier, writer: Writer, session: ClientSession) -> None:
    writer.write(wire.ClientMessage(bye=wire.Bye()).SerializeToString())
    silence(verifier)


OTHERS = Fingerprints("another", "tokenizer", "drafter")


@TLS
@pytest.mark.parametrize(
    ("said", "code", "end", "prints", "settings"),
    [
        ("verdict", GOING_AWAY, drain, PRINTS, Settings()),
        ("fault", REFUSED, refusal, OTHERS, Settings()),
        ("fault", GOING_AWAY, silence, PRINTS, Settings(idle_seconds=0.5)),
        (None, NORMAL, goodbye, PRINTS, Settings()),
    ],
    ids=["drain", "fault", "idle", "normal"],
)
def test_a_client_that_writes_while_the_verifier_ends_gets_the_last_frames(
    said, code, end, prints, settings, secure, tls, caplog
):
    """``said`` is an event among the last messages; None if there need be none."""
    with serving(
        ToyEngine(), settings, limits=PATIENT, tls=tls if secure else None, drain_seconds=TIMEOUT_S
    ) as verifier:
        session = ClientSession(prints, stop_tokens=[STOP])
        writer = greeted(verifier.port, session, secure)
        if prints == PRINTS:
            session.receive(*writer.read())
        end(verifier, writer, session)
        verifier.server.handle_exit(signal.SIGTERM, None)
        writer.write_on()
        messages, closed_with = writer.rest()
        assert closed_with == code
        assert said in [None, *(wire.ServerMessage.FromString(each).WhichOneof("event") for each in messages)]
        eventually(lambda: not verifier.server.guard.tasks)  # long before the deadline of its peer
    assert not caplog.records


@TLS
def test_a_client_that_writes_gets_a_large_message_and_the_close_frame_after_it(secure, tls):
    with edge(PATIENT, tls if secure else None) as running:
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
def test_what_comes_after_the_close_frame_is_dropped_unparsed(secure, tls):
    with edge(PATIENT, tls if secure else None) as running:
        writer = Writer(running.port, "/ws", secure)
        writer.write(b"close")
        eventually(lambda: running.ended)
        for _ in range(100):
            writer.write(b"m", 1000)
        assert writer.rest()[1] == 4000
        eventually(lambda: len(running.slots) == 0)
        assert not running.complaints()


# -- processes -------------------------------------------------------------------------------------


@contextlib.contextmanager
def counting() -> Iterator[tuple[subprocess.Popen, int]]:
    """A process that serves and prints the number of tokens it has committed; and its port."""
    program = "from support.server.verifier_process import main; main()"
    with moa_serve(program=program, cwd=TESTS) as (running, ready):
        yield running, ready["port"]


def committed_by(running: subprocess.Popen) -> int:
    """The count of a process that ends in order."""
    out, err = running.communicate(timeout=60 + TIMEOUT_S)
    assert (err, running.returncode) == ("", 0)
    return int(out)


def test_a_process_waits_for_clients_that_stood_still_while_it_ended():
    told: list[wire.ServerMessage] = []
    with counting() as (running, port):
        writers = []
        for number in range(3):
            session = ClientSession(PRINTS, stop_tokens=[STOP])
            writer = greeted(port, session)
            session.receive(*writer.read())
            session.prompt([5 + number, 6, 7], Sampling(), 900)
            session.grant_credit(900)
            writer.send(session)
            told += map(wire.ServerMessage.FromString, writer.read())
            writers.append(writer)
        running.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(1)  # as one that does not wait for its peers has ended long before
        for writer in writers:
            writer.write_on()
            messages, code = writer.rest()
            told += map(wire.ServerMessage.FromString, messages)
            assert code == GOING_AWAY
        assert sum(len(each.verdict.tokens) for each in told) == committed_by(running)


@pytest.mark.parametrize("processes", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_every_client_of_processes_that_end_gets_its_last_verdict_and_the_close_frame(toy_answers, processes):
    codes: list[int | None] = []
    lost = 0
    for _ in range(processes):
        with counting() as (running, port):
            clients = leavers(Verifier(None, port, ""), ToyEngine())
            threads = [
                threading.Thread(target=client.until_closed, args=(answer,))
                for client, answer in zip(clients, toy_answers, strict=True)
            ]
            for thread in threads:
                thread.start()
            running.send_signal(signal.SIGTERM)
            committed = committed_by(running)
            for thread in threads:
                thread.join(TIMEOUT_S)
        codes += [client.code for client in clients]
        lost += committed - sum(len(each.session.committed) for each in clients) + sum(map(len, PROMPTS))
    assert (codes, lost) == ([GOING_AWAY] * CLIENTS * processes, 0)
