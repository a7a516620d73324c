"""SIGTERM under load: received frames are answered, and all clients continue elsewhere without a loss."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from moa_runtime.session.events import Origin, Sampling
from moa_server.app import LEAVING
from moa_server.engine.baseline import decode
from moa_server.settings import Settings
from support.server.edge_running import eventually
from support.server.running import TIMEOUT_S, Client, Verifier, moa_serve, serving
from support.toy_engine import ToyEngine
from support.toy_engine import plain as toy_plain

CLIENTS, COUNT = 30, 24
PROMPTS = [[5 + number, 6, 7] for number in range(CLIENTS)]
GOING_AWAY = 1001

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")


class Leaver(Client):
    """A client that asks until the verifier goes away.

    Attributes:
        code: of the close frame, once there was one.
        unanswered: frames sent on the last connection without an answer.
    """

    code: int | None = None
    unanswered = 0

    def begin(self, prompt: list[int]) -> None:
        self.connect()
        self.session.prompt(prompt, Sampling(), COUNT)
        self.send()

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


@contextlib.contextmanager
def asking(verifier: Verifier, engine, answers: list[list[int]]) -> Iterator[list[Leaver]]:
    """Clients that draft their answers in threads; after the block, all connections must end."""
    clients = [Leaver(verifier, engine) for _ in PROMPTS]
    for client, prompt in zip(clients, PROMPTS, strict=True):
        client.begin(prompt)
    threads = [
        threading.Thread(target=client.until_closed, args=(answer,))
        for client, answer in zip(clients, answers, strict=True)
    ]
    for thread in threads:
        thread.start()
    yield clients
    for thread in threads:
        thread.join(TIMEOUT_S)


def rest_of(clients: list[Leaver], elsewhere: Verifier, answers: list[list[int]]) -> None:
    """Let everybody finish at another verifier; the texts must be the target's own."""
    for client, answer in zip(clients, answers, strict=True):
        if client.session.answering:
            client.connect(elsewhere)
            client.rounds(lambda tokens, answer=answer: answer[len(tokens) : len(tokens) + 3])
            client.socket.close()
        assert not client.faults and client.session.committed == answer


# -- a process ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(transformers_engine) -> list[list[int]]:
    """Each prompt with the target's own answer."""
    return [
        [*prompt, *(token.token for token in decode(transformers_engine, prompt, Sampling(), COUNT))]
        for prompt in PROMPTS
    ]


@pytest.fixture
def model(tiny_target, tiny_drafter) -> tuple[str, ...]:
    return "--model", str(tiny_target), "--drafter", str(tiny_drafter)


def test_sigterm_under_load_loses_no_token(transformers_engine, model, answers):
    with (
        moa_serve(*model, "--drain-seconds", 60) as (running, ready),
        asking(Verifier(None, ready["port"], ""), transformers_engine, answers) as clients,
    ):
        eventually(lambda: clients[-1].session.committed[len(PROMPTS[-1]) :])  # all of them have begun
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=60 + TIMEOUT_S)
    assert (running.returncode, out, err) == (0, "", "")
    assert [client.code for client in clients] == [GOING_AWAY] * CLIENTS
    with serving(transformers_engine, Settings()) as elsewhere:
        rest_of(clients, elsewhere, answers)


def test_a_second_signal_ends_at_once(transformers_engine, model):
    with moa_serve(*model, "--drain-seconds", 1000) as (running, ready):
        client = Leaver(Verifier(None, ready["port"], ""), transformers_engine)
        client.connect()
        with client.verifier.connect() as idle:  # says nothing, not even Hello
            # Again and again: of two that come before the first is handled, the system keeps one.
            eventually(lambda: running.send_signal(signal.SIGTERM) or running.poll() is not None)
            assert running.returncode == 0
            with pytest.raises(ConnectionClosed):
                idle.recv(TIMEOUT_S)
        assert running.communicate() == ("", "")


#: moa-serve with a toy. What an engine leaves behind says so where Python takes it apart, and where it ends in order.
TOY = """
import atexit, os, sys
import moa_server.cli as cli
from support.toy_engine import ToyEngine

class Left:
    def __del__(self):
        os.write(2, b"taken apart ")

def load(options):
    global left
    left = Left()
    atexit.register(print, "in order", end="")
    return ToyEngine()

cli.load_engine = load
sys.exit(cli.main())
"""


def test_python_does_not_take_apart_what_has_served():
    beside_toys = Path(__file__).parents[2]
    options = ("--no-drafts", "--drain-seconds", 1000)
    with moa_serve(*options, program=TOY, cwd=beside_toys) as (process, ready):
        assert Verifier(None, ready["port"], "").decode([5], 3, Sampling())
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=2 * TIMEOUT_S)
    assert (process.returncode, out, err) == (0, "in order", "")


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


def begun(verifier: Verifier, engine: Held) -> list[Leaver]:
    """Thirty clients, each with a frame that the verifier has received."""
    clients = [Leaver(verifier, engine) for _ in range(CLIENTS)]
    for client, prompt in zip(clients, PROMPTS, strict=True):
        client.begin(prompt)
    eventually(lambda: len(verifier.parts.worker) == CLIENTS)
    return clients


def closed(client: Leaver) -> int | None:
    """Take what still comes; the code of the close frame behind it."""
    with pytest.raises(ConnectionClosed) as end:
        while True:
            client.take()
    client.session.disconnected()
    return end.value.rcvd.code if end.value.rcvd else None


@pytest.fixture
def toy_answers() -> list[list[int]]:
    return [[*prompt, *toy_plain(ToyEngine(), prompt, COUNT)] for prompt in PROMPTS]


@pytest.mark.parametrize("in_time", [True, False])
def test_received_frames_get_their_verdicts_or_are_given_up(toy_answers, caplog, in_time):
    engine = Held()
    with serving(engine, Settings(), drain_seconds=2 * TIMEOUT_S if in_time else 0.3) as verifier:
        clients = begun(verifier, engine)
        verifier.server.handle_exit(signal.SIGTERM, None)
        if in_time:
            eventually(lambda: verifier.http("GET", "/readyz").status_code != 200)
            with pytest.raises(InvalidStatus) as refused:
                verifier.connect().__enter__()
            assert refused.value.response.status_code == 503
            engine.go.set()
        assert [closed(client) for client in clients] == [GOING_AWAY] * CLIENTS
        assert [client.unanswered for client in clients] == [0 if in_time else 1] * CLIENTS
        engine.go.set()  # a step is never broken off
    assert engine.steps and not caplog.records
    with serving(ToyEngine(), Settings()) as elsewhere:
        rest_of(clients, elsewhere, toy_answers)


def test_clients_that_are_streamed_to_go_on_elsewhere(caplog):
    """They wait for no frame: the token that is being decided is still sent, and nothing after it."""
    engine, length = ToyEngine(delay_s=(0.01, 0.0)), 900
    answers = [[*prompt, *toy_plain(engine, prompt, length)] for prompt in PROMPTS]
    with serving(engine, Settings(), drain_seconds=TIMEOUT_S) as verifier:
        clients = [Leaver(verifier, engine) for _ in range(CLIENTS)]
        for client, prompt in zip(clients, PROMPTS, strict=True):
            client.connect()
            client.session.prompt(prompt, Sampling(), length)
            client.session.grant_credit(1000)
            client.send()
        for client in clients:
            while len(client.session.committed) < 10:
                client.take()
        verifier.server.handle_exit(signal.SIGTERM, None)
        assert [closed(client) for client in clients] == [GOING_AWAY] * CLIENTS
        assert any(client.session.answering for client in clients)
    with serving(ToyEngine(), Settings()) as elsewhere:
        rest_of(clients, elsewhere, answers)
    assert not caplog.records


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
