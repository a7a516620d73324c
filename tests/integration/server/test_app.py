"""The verifier over a real WebSocket and HTTP: committed tokens equal plain decoding, and nothing breaks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading

import httpx
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from moa_runtime.manifest import Fingerprints
from moa_runtime.session.events import Resumed, Sampling, Welcomed
from moa_runtime.session.handshake import PROTOCOL_VERSION
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.auth import new_token
from moa_server.connection import MAX_HELLO_BYTES
from moa_server.edge.connection_limits import ALL_BUSY, EdgeLimits
from moa_server.engine.base import Capabilities, new_sequence
from moa_server.engine.baseline import BlockingEngine, decode
from moa_server.scheduling.verify_job import Job
from moa_server.settings import Settings
from support.server import in_memory
from support.server.edge_running import eventually
from support.server.running import TIMEOUT_S, Client, serving
from support.toy_engine import ToyEngine

PROMPT = random.Random(8).sample(range(3, 512), 16)
SEEDED = Sampling(1.0, 0.95, 6)
COUNT = 40


def plain(engine, prefix, sampling=SEEDED, count=COUNT) -> list[int]:
    return [step.token for step in decode(engine, prefix, sampling, count)]


@pytest.fixture(scope="module", params=["transformers", "toy", "toy that schedules itself"])
def engine(request):
    if request.param == "transformers":
        return request.getfixturevalue("transformers_engine")
    itself = request.param != "toy"
    capabilities = Capabilities(trees=not itself, max_draft_tokens=64, schedules_itself=itself)
    return ToyEngine(capabilities=capabilities, vocab_size=512, max_context=512, preempts=0.1)


@pytest.fixture(scope="module")
def verifier(engine):
    with serving(engine, Settings(token="secret", max_frame_bytes=4096)) as running:
        yield running


@pytest.fixture(scope="module")
def answer(engine) -> list[int]:
    return plain(engine, PROMPT)


@pytest.fixture
def writer(answer):
    """Drafts of four tokens, each wrong one time out of three."""
    right, rng = [*PROMPT, *answer], random.Random(1)

    def write(tokens):
        following = right[len(tokens) : len(tokens) + 4]
        return [token if rng.random() < 2 / 3 else rng.randrange(3, 512) for token in following]

    return write


def receive(socket) -> wire.ServerMessage:
    return wire.ServerMessage.FromString(socket.recv(TIMEOUT_S))


def hello(engine, **fields) -> bytes:
    prints = fields.pop("fingerprints", engine.fingerprints)
    message = wire.Hello(
        protocol_version=fields.pop("protocol_version", PROTOCOL_VERSION),
        fingerprints=wire.Fingerprints(target=prints.target, tokenizer=prints.tokenizer, drafter=prints.drafter),
        row_encoding=wire.ROW_ENCODING_INT8,
        **fields,
    )
    return wire.ClientMessage(hello=message).SerializeToString()


def fault_code(message: wire.ServerMessage) -> str:
    assert message.WhichOneof("event") == "fault", message
    return wire.FaultCode.Name(message.fault.code)


def start(verifier, engine, **options) -> Client:
    client = Client(verifier, engine, **options)
    client.connect()
    client.session.prompt(PROMPT, SEEDED, COUNT)
    return client


# -- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED])
def test_answers_are_those_of_plain_decoding_turn_after_turn(verifier, engine, writer, sampling):
    client = Client(verifier, engine)
    client.connect()
    history = [*PROMPT, *plain(engine, PROMPT, sampling)]
    for turn, expected, write in (
        (PROMPT, history, writer),
        ([5, 6, 7], [*history, 5, 6, 7, *plain(engine, [*history, 5, 6, 7], sampling)], lambda tokens: []),
    ):
        client.session.prompt(turn, sampling, COUNT)
        client.rounds(write)
        assert client.session.committed == expected
    client.socket.close()
    assert history == [*PROMPT, *verifier.decode(PROMPT, COUNT, sampling)]
    assert len(client.finished) == 2


def test_memory_rows_are_those_of_the_committed_tokens(verifier, engine, writer):
    client = start(verifier, engine)
    client.rounds(writer)
    client.settle()
    client.socket.close()
    tokens = client.session.committed
    starts = [event.start for event in client.rows]
    ends = [event.start + len(event.keys) for event in client.rows]
    assert starts == [0, *ends[:-1]] and ends[-1] == client.session.rows == len(tokens) - 1  # a bonus token has none
    blocking = BlockingEngine(engine)
    rows = blocking.run(Job(new_sequence(), tokens[:-1], None, rows_from=0)).rows
    blocking.close()
    assert rows.start == 0
    for half, expected in (("keys", rows.keys), ("values", rows.values)):
        got = np.concatenate([getattr(event, half) for event in client.rows])
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3)


# -- connections -------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["connection", "cache", "verifier"])
def test_a_session_outlives_what_is_lost(verifier, engine, writer, answer, lost):
    client = start(verifier, engine)
    client.rounds(writer, 3)
    client.drop()
    if lost == "cache":
        eventually(lambda: not len(verifier.parts.worker))  # the last frame's work is dropped with its connection
        for conversation in verifier.parts.store._conversations.values():
            engine.release(conversation.sequence)
    restarted = serving(engine, Settings()) if lost == "verifier" else contextlib.nullcontext(verifier)
    with restarted as other:
        client.connect(other)
        client.rounds(writer)
        client.socket.close()
    assert [e.resumed for e in client.events if isinstance(e, Welcomed)] == [False, lost != "verifier"]
    replays = [event.replayed for event in client.events if isinstance(event, Resumed)]
    assert lost != "verifier" or (len(replays) == 1 and replays[0] > len(PROMPT))
    assert client.session.committed == [*PROMPT, *answer]


def test_a_late_hello_takes_nothing_over(verifier, engine, writer, answer):
    client = start(verifier, engine)
    client.session.disconnected()
    client.session.connect()
    [late] = client.session.frames_to_send()  # of a connection that the client drops at once
    client.session.disconnected()
    client.connect()
    with verifier.connect() as socket:
        socket.send(late)
        assert fault_code(receive_last(socket)) == "FAULT_CODE_REPLACED"
    client.rounds(writer)
    client.socket.close()
    assert client.session.committed == [*PROMPT, *answer]


def receive_last(socket) -> wire.ServerMessage:
    """The last message before the other side closes."""
    last = b""
    with contextlib.suppress(ConnectionClosed):
        while True:
            last = socket.recv(TIMEOUT_S)
    return wire.ServerMessage.FromString(last)


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer secret2"}])
def test_a_wrong_token_is_refused_before_the_upgrade(verifier, headers, monkeypatch):
    monkeypatch.setattr(type(verifier), "headers", headers)
    with pytest.raises(InvalidStatus, match="401"):
        verifier.connect()
    assert verifier.http("POST", "/v1/decode", json={"tokens": [1]}).status_code == 401


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (b"\x0c\xff", "PROTOCOL"),
        (b"", "PROTOCOL"),
        ("text", "PROTOCOL"),
        (wire.ClientMessage(bye=wire.Bye()).SerializeToString(), "PROTOCOL"),
        ({"protocol_version": 99}, "VERSION_MISMATCH"),
        ({"fingerprints": Fingerprints("feed" * 8, "", "")}, "FINGERPRINT_MISMATCH"),
    ],
    ids=repr,
)
def test_a_connection_must_begin_with_a_fitting_hello(verifier, engine, first, code):
    with verifier.connect() as socket:
        socket.send(hello(engine, **first) if isinstance(first, dict) else first)
        refused = receive_last(socket)
    assert fault_code(refused) == f"FAULT_CODE_{code}"
    if code == "FINGERPRINT_MISMATCH":
        assert "feed" * 8 in refused.fault.text and engine.fingerprints.target in refused.fault.text


def test_bad_frames_and_a_failing_engine_are_faults_and_the_session_continues(
    verifier, engine, writer, answer, monkeypatch, caplog
):
    client = start(verifier, engine)
    client.rounds(writer, 2)
    client.settle()
    ahead = wire.ClientMessage(draft=wire.Draft(epoch=9, base_len=400)).SerializeToString()
    unknown = wire.ClientMessage(prompt=wire.Prompt(epoch=9, tokens=[512])).SerializeToString()
    bad = [("text", "PROTOCOL"), (b"\x0c\xff\x00", "PROTOCOL"), (bytes(5000), "TOO_LARGE")]
    for frame, code in [*bad, (hello(engine), "PROTOCOL"), (ahead, "OUT_OF_SYNC"), (unknown, "PROTOCOL")]:
        client.socket.send(frame)
        assert fault_code(receive(client.socket)) == f"FAULT_CODE_{code}", frame
    with monkeypatch.context() as broken:
        broken.setattr(type(engine), "step", lambda *_: 1 / 0)
        client.rounds(writer)
    assert [fault.code for fault in client.faults] == ["INTERNAL"] and "ZeroDivisionError" in caplog.text
    client.events.clear()
    assert client.session.resend()
    client.rounds(writer)
    client.socket.close()
    assert client.session.committed == [*PROMPT, *answer]


def test_more_sessions_than_allowed_are_told_to_wait(engine):
    with serving(engine, Settings(max_sessions=1)) as verifier, verifier.connect() as first:

        def greeted() -> wire.ServerMessage:
            with verifier.connect() as socket:
                socket.send(hello(engine))
                return receive(socket)

        first.send(hello(engine))
        welcome = receive(first).welcome
        busy = greeted()
        assert fault_code(busy) == "FAULT_CODE_BUSY" and busy.fault.retry_after_ms > 0
        first.close()
        # A conversation without a connection makes room.
        answered = eventually(lambda: (it := greeted()).WhichOneof("event") == "welcome" and it)
        assert answered.welcome.resume_token != welcome.resume_token


# -- greetings -----------------------------------------------------------------------------------


def closed_with(socket) -> int:
    with pytest.raises(ConnectionClosed) as closed:
        socket.recv(TIMEOUT_S)
    return closed.value.rcvd.code


def test_a_hello_must_be_short_and_later_frames_need_not_be():
    engine = ToyEngine(max_context=10_000)
    with serving(engine, Settings()) as verifier, verifier.connect() as socket:
        longest = in_memory.hello("t" * 1000)
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
            assert fault.code == wire.FAULT_CODE_TOO_LARGE and str(MAX_HELLO_BYTES + 1) in fault.text
            assert closed_with(other) == 1008


def test_a_client_that_comes_when_all_are_busy_is_told_when_to_come_back():
    engine = ToyEngine()
    with serving(engine, Settings(), limits=EdgeLimits(connections=8)) as verifier:
        clients = [Client(verifier, engine) for _ in range(verifier.server.slots.most_busy)]
        for client in clients:
            client.connect()
        with pytest.raises(InvalidStatus) as refused:
            verifier.connect().__enter__()
        answer = refused.value.response
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5" and ALL_BUSY in answer.body.decode()
        clients[0].socket.close()
        eventually(lambda: verifier.server.slots.busy < len(clients))
        again = Client(verifier, engine)
        again.connect()
        assert not again.faults
        for client in [*clients[1:], again]:
            client.socket.close()


def test_an_engine_that_hangs_is_reported_in_time_and_the_session_continues(monkeypatch):
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
        assert fault.code == wire.FAULT_CODE_BUSY and "0.2" in fault.text
        monkeypatch.setattr(engine, "step", step)
        verifier.server._loop.call_soon_threadsafe(hangs.set)
        client.drop()
        client.connect()
        while not client.finished:  # a slow machine may need more than 0.2 s, and say so again
            client.events.clear()
            client.rounds(lambda tokens: [])
        client.socket.close()


# -- http --------------------------------------------------------------------------------------


def test_health_is_open_and_what_the_verifier_does_needs_a_token(verifier, engine):
    assert verifier.http("GET", "/healthz", headers={}).json() == {"status": "ok"}
    assert verifier.http("GET", "/readyz", headers={}).json() == {"status": "ready"}
    for path in ("/v1/status", "/metrics"):
        assert verifier.http("GET", path, headers={}).status_code == 401
        assert verifier.http("GET", path).status_code == 200
    status = verifier.http("GET", "/v1/status").json()
    assert status["fingerprints"] == vars(engine.fingerprints) and status["forwards"] == engine.forwards
    assert status["target_pass"] == engine.facts.target_pass != ""
    assert status["capabilities"]["trees"] == engine.capabilities.trees
    assert {"sessions", "version", "uptime_s"} <= status.keys()
    assert status["step_cost"].keys() >= {"1", "32", "256"} and all(ms > 0 for ms in status["step_cost"].values())
    assert all(len(status["acceptance"][kind]) == 20 for kind in ("offered", "verified", "accepted"))


#: Bad bodies by a value that the answer names.
BAD_BODIES = {
    "": ["{", "[" * 4000, "[]"],
    "tokens": ['{"tokens": []}'],
    "512": ['{"tokens": [512]}', '{"tokens": [512], "stream": true}', '{"tokens": [1.5]}'],
    "temperature": [
        '{"tokens": [1], "temprature": 1}',
        '{"tokens": [1], "temperature": NaN}',
        '{"tokens": [1], "temperature": 1%s}' % ("0" * 400),
    ],
    "521": ['{"tokens": [%s]}' % ("1," * 520 + "1")],
    "4096": [" " * 5000],
}
BAD_BODIES |= {
    name: [f'{{"tokens": [1], "{name}": {value}}}']
    for name, value in (("top_p", 0), ("seed", -1), ("max_new_tokens", 0), ("stream", 1))
}


@pytest.mark.parametrize(("value", "body"), [(value, body) for value, each in BAD_BODIES.items() for body in each])
def test_decode_refuses_bad_input_and_names_the_value(verifier, body, value):
    answered = verifier.http("POST", "/v1/decode", content=body)
    assert answered.status_code == (413 if len(body) == 5000 else 400)
    assert value in answered.json()["error"]


def test_an_exception_in_reading_ends_the_connection_at_once(verifier, engine, monkeypatch, caplog):
    with verifier.connect() as socket, monkeypatch.context() as broken:
        socket.send(hello(engine))
        receive(socket)
        broken.setattr("moa_server.connection.parse_client_message", lambda *_: 1 / 0)
        socket.send(b"anything")
        assert fault_code(receive_last(socket)) == "FAULT_CODE_INTERNAL"
    assert "ZeroDivisionError" in caplog.text and "Traceback" not in caplog.text


# -- plain decoding ------------------------------------------------------------------------------


def events(response: httpx.Response) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED])
def test_a_stream_brings_each_token_and_ends_with_the_forwards(transformers_engine, sampling):
    body = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    body |= {"tokens": PROMPT, "max_new_tokens": 20, "stream": True}
    with serving(transformers_engine, Settings()) as verifier:
        response = verifier.http("POST", "/v1/decode", json=body)
        whole = verifier.http("POST", "/v1/decode", json={**body, "stream": False}).json()
    steps = list(decode(transformers_engine, PROMPT, sampling, 20))
    assert response.headers["content-type"].startswith("text/event-stream")
    end = {"forwards": sum(step.steps for step in steps), "finish": "length"}
    assert events(response) == [*({"token": step.token} for step in steps), {"done": True, **end}]
    assert whole == {"tokens": [step.token for step in steps], **end}


def test_a_failing_engine_ends_the_stream_and_frees_its_slot(engine, monkeypatch, caplog):
    body = {"tokens": PROMPT, "max_new_tokens": 5, "stream": True}
    with serving(engine, Settings(max_sessions=1)) as verifier:
        with monkeypatch.context() as broken:
            broken.setattr(type(engine), "step", lambda *_: 1 / 0)
            [said] = events(verifier.http("POST", "/v1/decode", json=body))
            whole = verifier.http("POST", "/v1/decode", json={**body, "stream": False})
        assert whole.status_code == 500 and whole.json() == said and said["error"]
        assert "ZeroDivisionError" in caplog.text and "Traceback" not in caplog.text
        assert len(events(verifier.http("POST", "/v1/decode", json=body))) == 6


class GatedEngine(ToyEngine):
    """Takes a step for each ``permits.release()``."""

    def __init__(self) -> None:
        super().__init__(vocab_size=10)
        self.permits = threading.Semaphore(0)

    async def step(self, requests):
        await asyncio.get_running_loop().run_in_executor(None, self.permits.acquire, True, TIMEOUT_S)
        return await super().step(requests)


@pytest.mark.parametrize("stream", [True, False])
def test_decoding_stops_when_the_client_leaves(stream):
    engine = GatedEngine()
    with serving(engine, Settings(max_sessions=1)) as verifier:
        url = f"http://127.0.0.1:{verifier.port}/v1/decode"
        body = {"tokens": [1], "stream": stream}
        if stream:
            engine.permits.release()
            with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as response:
                lines = response.iter_lines()  # kept: without it the response is closed
                assert next(lines) == f'data: {{"token": {engine.choice([1])}}}'
                # The stream holds the only place, and waits for its second token.
                refused = verifier.http("POST", "/v1/decode", json={"tokens": [1]})
                assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=body, timeout=0.3)
        eventually(lambda: not verifier.parts.plain.running)
        steps = len(engine.steps)
        engine.permits.release(100)
        assert verifier.http("POST", "/v1/decode", json={"tokens": [2], "max_new_tokens": 1}).status_code == 200
        assert len(engine.steps) <= steps + 2
        assert engine.sequences_open <= 1


def test_a_tokens_sessions_count_for_decoding(tmp_path):
    token, entry = new_token("alice")
    file, engine = tmp_path / "tokens.json", GatedEngine()
    file.write_text(json.dumps({"tokens": [{**json.loads(entry), "sessions": 1}]}))
    with serving(engine, Settings(token_file=file)) as verifier:
        verifier.token = token
        url = f"http://127.0.0.1:{verifier.port}/v1/decode"
        engine.permits.release()
        with httpx.stream("POST", url, json={"tokens": [1], "stream": True}, headers=verifier.headers) as response:
            lines = response.iter_lines()
            next(lines)
            assert verifier.http("POST", "/v1/decode", json={"tokens": [1]}).status_code == 503
        engine.permits.release(100)
