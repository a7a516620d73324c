"""Until its whole Hello a connection costs little and keeps nobody out; an engine that hangs is told of in time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from websockets.exceptions import ConnectionClosed

from moa_runtime.session.events import Sampling
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.connection import MAX_HELLO_BYTES
from moa_server.edge.connection_limits import ALL_BUSY, EdgeLimits
from moa_server.settings import Settings
from support.server.edge_running import eventually
from support.server.raw import Target
from support.server.running import TIMEOUT_S, Client, serving
from support.toy_engine import PRINTS, VOCAB, ToyEngine

TARGET = Target(0, (PRINTS.target, PRINTS.tokenizer, PRINTS.drafter), VOCAB, 1000)


def receive(socket) -> wire.ServerMessage:
    return wire.ServerMessage.FromString(socket.recv(TIMEOUT_S))


def test_a_hello_must_be_short_and_later_frames_need_not_be():
    engine = ToyEngine(max_context=10_000)
    with serving(engine, Settings()) as verifier, verifier.connect() as socket:
        longest = TARGET.hello("t" * 1000)
        longest.hello.resume.token += "t" * (MAX_HELLO_BYTES - len(longest.SerializeToString()))
        socket.send(longest.SerializeToString())
        assert receive(socket).welcome.resume_token
        prompt = wire.Prompt(epoch=1, tokens=[1] * 8000, sampling=wire.Sampling(top_p=1.0), max_length=8001)
        socket.send(wire.ClientMessage(prompt=prompt).SerializeToString())
        assert receive(socket).verdict.tokens == [engine.choice([1] * 8000)]

        longest.hello.resume.token += "t"
        with verifier.connect() as other:
            other.send(longest.SerializeToString())
            fault = receive(other).fault
            assert fault.code == wire.FAULT_CODE_TOO_LARGE
            assert fault.text == f"a first frame of {MAX_HELLO_BYTES + 1} bytes; this verifier takes {MAX_HELLO_BYTES}"
            with pytest.raises(ConnectionClosed) as closed:
                other.recv(TIMEOUT_S)
            assert closed.value.rcvd.code == 1008


def test_a_crowd_that_never_says_hello_keeps_no_session_out():
    engine = ToyEngine()
    with serving(engine, Settings(), limits=EdgeLimits(connections=16)) as verifier, contextlib.ExitStack() as crowd:
        for _ in range(15):
            crowd.enter_context(verifier.connect())
        client = Client(verifier, engine)
        client.connect()
        client.session.prompt([1, 2], Sampling(), 2)
        client.rounds(lambda tokens: [])
        assert client.finished and verifier.server.slots.busy == 1
        client.socket.close()


def test_whose_hello_comes_when_all_are_busy_is_told_when_to_come_back():
    engine = ToyEngine()
    with serving(engine, Settings(), limits=EdgeLimits(connections=8)) as verifier, contextlib.ExitStack() as others:
        late = others.enter_context(verifier.connect())
        clients = [Client(verifier, engine) for _ in range(verifier.server.slots.most_busy)]
        for client in clients:
            client.connect()
        late.send(TARGET.hello().SerializeToString())
        fault = receive(late).fault
        assert (fault.code, fault.text) == (wire.FAULT_CODE_BUSY, ALL_BUSY) and fault.retry_after_ms > 0
        with pytest.raises(ConnectionClosed) as closed:
            late.recv(TIMEOUT_S)
        assert closed.value.rcvd.code == 1013
        clients[0].socket.close()
        eventually(lambda: verifier.server.slots.busy < len(clients))
        again = Client(verifier, engine)
        again.connect()
        assert not again.faults
        for client in [*clients[1:], again]:
            client.socket.close()


def test_an_engine_that_hangs_is_told_of_in_time_and_the_session_goes_on(monkeypatch):
    engine, hangs = ToyEngine(), asyncio.Event()
    step = engine.step

    async def hanging(requests):
        await hangs.wait()
        return await step(requests)

    monkeypatch.setattr(engine, "step", hanging)
    with serving(engine, Settings(answer_seconds=0.2)) as verifier:
        client = Client(verifier, engine)
        client.connect()
        client.session.prompt([1, 2], Sampling(), 2)
        for frame in client.session.frames_to_send():
            client.socket.send(frame)
        fault = receive(client.socket).fault
        assert fault.code == wire.FAULT_CODE_BUSY and "no verdict within 0.2 seconds" in fault.text
        monkeypatch.setattr(engine, "step", step)
        verifier.server._loop.call_soon_threadsafe(hangs.set)
        client.drop()
        client.connect()
        while not client.finished:  # a slow machine may need more than 0.2 s, and say so again
            client.events.clear()
            client.rounds(lambda tokens: [])
        client.socket.close()
