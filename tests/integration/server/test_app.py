"""The verifier over a real WebSocket: what is committed equals plain decoding, and nothing breaks it."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from moa_runtime.bundle import Fingerprints
from moa_runtime.session.events import Resumed, Sampling, Welcomed
from moa_runtime.session.handshake import PROTOCOL_VERSION
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine.base import Capabilities, new_sequence
from moa_server.engine.baseline import BlockingEngine, decode
from moa_server.scheduling.verify_job import Job
from moa_server.settings import Settings
from support.server.running import TIMEOUT_S, Client, serving
from support.toy_engine import ToyEngine

PROMPT = random.Random(8).sample(range(3, 512), 16)
SEEDED = Sampling(1.0, 0.95, 6)
COUNT = 40


def plain(engine, prefix, sampling=SEEDED, count=COUNT) -> list[int]:
    return [step.token for step in decode(engine, prefix, sampling, count)]


@pytest.fixture(scope="module", params=["transformers", "toy", "toy that schedules itself"])
def engine(request):
    """What the verifier does with an engine, it does with every engine."""
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
def test_the_answer_is_plain_decodings(verifier, engine, writer, sampling):
    client = Client(verifier, engine)
    client.connect()
    client.session.prompt(PROMPT, sampling, COUNT)
    client.rounds(writer)
    client.socket.close()
    assert client.session.committed == [*PROMPT, *plain(engine, PROMPT, sampling)]
    assert client.session.committed == [*PROMPT, *verifier.decode(PROMPT, COUNT, sampling)]
    assert len(client.finished) == 1


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
    keys, values = rows.keys, rows.values
    got_keys, got_values = np.zeros_like(keys), np.zeros_like(values)
    for event in client.rows:
        got_keys[event.start : event.start + len(event.keys)] = event.keys
        got_values[event.start : event.start + len(event.keys)] = event.values
    np.testing.assert_allclose(got_keys, keys, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(got_values, values, rtol=2e-3, atol=2e-3)


def test_a_second_turn_goes_on_from_the_first(verifier, engine, writer, answer):
    client = start(verifier, engine)
    client.rounds(writer)
    client.session.prompt([5, 6, 7], SEEDED, 10)
    client.rounds(lambda tokens: [])
    client.socket.close()
    history = [*PROMPT, *answer, 5, 6, 7]
    assert client.session.committed == [*history, *plain(engine, history, SEEDED, 10)]


def test_several_sessions_at_once(verifier, engine, writer, answer):
    clients = [start(verifier, engine) for _ in range(3)]
    while any(client.session.answering for client in clients):
        for client in clients:
            client.rounds(writer, 2)
    for client in clients:
        client.socket.close()
        assert client.session.committed == [*PROMPT, *answer]


# -- connections -------------------------------------------------------------------------------


def test_a_session_outlives_its_connection(verifier, engine, writer, answer):
    client = start(verifier, engine)
    client.rounds(writer, 3)
    client.drop()
    client.connect()
    client.rounds(writer)
    client.socket.close()
    assert [e.resumed for e in client.events if isinstance(e, Welcomed)] == [False, True]
    assert client.session.committed == [*PROMPT, *answer]


def test_a_session_outlives_its_cache(verifier, engine, writer, answer):
    client = start(verifier, engine)
    client.rounds(writer, 3)
    client.drop()
    while len(verifier.parts.worker):  # the last frame's work is dropped with its connection
        time.sleep(0.01)
    for conversation in verifier.parts.store._conversations.values():
        engine.release(conversation.sequence)
    client.connect()
    client.rounds(writer)
    client.socket.close()
    assert client.session.committed == [*PROMPT, *answer]


def test_a_forgotten_session_is_replayed(verifier, engine, writer, answer):
    client = start(verifier, engine)
    client.rounds(writer, 3)
    client.drop()
    with serving(engine, Settings()) as restarted:
        client.connect(restarted)
        client.rounds(writer)
        client.socket.close()
    replays = [event.replayed for event in client.events if isinstance(event, Resumed)]
    assert len(replays) == 1 and replays[0] > len(PROMPT)
    assert client.session.committed == [*PROMPT, *answer]


def test_an_unknown_resume_token_begins_a_conversation(verifier, engine):
    with verifier.connect() as socket:
        socket.send(hello(engine, resume=wire.Resume(token="guessed")))
        welcome = receive(socket).welcome
    assert welcome.committed_length == 0
    assert len(welcome.resume_token) >= 32 and welcome.resume_token != "guessed"


def test_a_second_connection_takes_over(verifier, engine, writer, answer):
    client = start(verifier, engine)
    client.rounds(writer, 3)
    first = client.socket
    client.session.disconnected()
    client.connect()
    assert fault_code(receive_last(first)) == "FAULT_CODE_REPLACED"
    client.rounds(writer)
    client.socket.close()
    assert client.session.committed == [*PROMPT, *answer]


def test_a_hello_that_was_under_way_for_long_takes_nothing_over(verifier, engine, writer, answer):
    client = start(verifier, engine)
    client.session.disconnected()
    client.session.connect()
    [late] = client.session.frames_to_send()  # of a connection that the client drops at once
    client.session.disconnected()
    client.connect()
    with verifier.connect() as socket:
        socket.send(late)
        refused = receive_last(socket)
        assert fault_code(refused) == "FAULT_CODE_REPLACED" and "newer connection" in refused.fault.text
    client.rounds(writer)
    client.socket.close()
    assert client.session.committed == [*PROMPT, *answer]


def receive_last(socket) -> wire.ServerMessage:
    """The last message before the other side closes."""
    last = None
    while True:
        try:
            last = receive(socket)
        except ConnectionClosed:
            return last


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer secret2"}])
def test_a_wrong_token_is_refused_before_the_upgrade(verifier, headers, monkeypatch):
    monkeypatch.setattr(type(verifier), "headers", headers)
    with pytest.raises(InvalidStatus) as refused:
        verifier.connect()
    assert refused.value.response.status_code == 401
    assert verifier.http("POST", "/v1/decode", json={"tokens": [1]}).status_code == 401


def test_web_pages_are_refused_unless_they_are_named(engine):
    ours, other = "http://localhost:3000", "https://page.example"
    with serving(engine, Settings(origins=(ours,))) as running:
        with pytest.raises(InvalidStatus) as refused:
            running.connect(origin=other)
        assert refused.value.response.status_code == 403
        assert f"--allow-origin {other}".encode() in refused.value.response.body
        decoding = {"json": {"tokens": PROMPT, "max_new_tokens": 2}}
        assert running.http("POST", "/v1/decode", headers={"Origin": other}, **decoding).status_code == 403

        with running.connect(origin=ours) as socket:
            socket.send(hello(engine))
            assert receive(socket).WhichOneof("event") == "welcome"
        let_in = running.http("POST", "/v1/decode", headers={"Origin": ours}, **decoding)
        assert let_in.status_code == 200
        assert let_in.headers["access-control-allow-origin"] == ours


def test_no_web_page_is_let_in_by_itself(verifier):
    with pytest.raises(InvalidStatus) as refused:
        verifier.connect(origin=f"http://127.0.0.1:{verifier.port}")  # with the right token
    assert refused.value.response.status_code == 403


def test_other_fingerprints_are_refused_with_both_named(verifier, engine):
    own = engine.fingerprints
    with verifier.connect() as socket:
        socket.send(hello(engine, fingerprints=Fingerprints("feed" * 8, own.tokenizer, own.drafter)))
        refused = receive(socket)
        with pytest.raises(ConnectionClosed):
            socket.recv(TIMEOUT_S)
    assert fault_code(refused) == "FAULT_CODE_FINGERPRINT_MISMATCH"
    assert "feed" * 8 in refused.fault.text and own.target in refused.fault.text


@pytest.mark.parametrize(
    "first", [b"\x0c\xff", b"", "text", wire.ClientMessage(bye=wire.Bye()).SerializeToString()], ids=repr
)
def test_a_connection_must_begin_with_hello(verifier, first):
    with verifier.connect() as socket:
        socket.send(first)
        assert fault_code(receive(socket)) == "FAULT_CODE_PROTOCOL"
        with pytest.raises(ConnectionClosed):
            socket.recv(TIMEOUT_S)


def test_another_protocol_version_is_refused(verifier, engine):
    with verifier.connect() as socket:
        socket.send(hello(engine, protocol_version=99))
        assert fault_code(receive(socket)) == "FAULT_CODE_VERSION_MISMATCH"


def test_broken_frames_are_faults_and_the_session_goes_on(verifier, engine, writer, answer):
    client = start(verifier, engine)
    client.rounds(writer, 2)
    client.settle()
    for frame, code in (
        ("text", "PROTOCOL"),
        (b"\x0c\xff\x00", "PROTOCOL"),
        (bytes(5000), "TOO_LARGE"),
        (hello(engine), "PROTOCOL"),
        (wire.ClientMessage(draft=wire.Draft(epoch=9, base_len=400)).SerializeToString(), "OUT_OF_SYNC"),
        (wire.ClientMessage(prompt=wire.Prompt(epoch=9, tokens=[512])).SerializeToString(), "PROTOCOL"),
    ):
        client.socket.send(frame)
        assert fault_code(receive(client.socket)) == f"FAULT_CODE_{code}", frame
    client.rounds(writer)
    client.socket.close()
    assert client.session.committed == [*PROMPT, *answer]


def test_a_frame_far_too_large_closes_the_connection(verifier, engine):
    with verifier.connect() as socket:
        socket.send(hello(engine))
        receive(socket)
        with pytest.raises(ConnectionClosed):
            socket.send(bytes(100_000))
            socket.recv(TIMEOUT_S)
            raise AssertionError("the frame was answered")


def test_a_prompt_longer_than_the_context_is_refused(verifier, engine, writer, answer):
    client = Client(verifier, engine)
    client.connect()
    client.session.prompt([7] * 600, SEEDED, COUNT)
    client.rounds(writer)
    assert [fault.code for fault in client.faults] == ["CONTEXT_FULL"]
    assert "600" in client.faults[0].text and "512" in client.faults[0].text
    # The connection serves a shorter one.
    client.events.clear()
    client.session.cancel()
    client.session.prompt(PROMPT, SEEDED, COUNT)
    client.rounds(writer)
    client.socket.close()
    assert client.session.committed == [*PROMPT, *answer]


def test_a_failing_engine_is_a_fault_and_the_session_goes_on(verifier, engine, writer, answer, monkeypatch, caplog):
    client = start(verifier, engine)
    client.rounds(writer, 2)
    client.settle()
    with monkeypatch.context() as broken:
        broken.setattr(type(engine), "step", lambda *_: 1 / 0)
        client.rounds(writer)
    assert [fault.code for fault in client.faults] == ["INTERNAL"]
    assert "ZeroDivisionError" in caplog.text
    client.events.clear()
    assert client.session.resend()
    client.rounds(writer)
    client.socket.close()
    assert client.session.committed == [*PROMPT, *answer]


def test_more_sessions_than_allowed_are_told_to_wait(engine):
    with serving(engine, Settings(max_sessions=1)) as verifier, verifier.connect() as first:
        first.send(hello(engine))
        welcome = receive(first).welcome
        with verifier.connect() as second:
            second.send(hello(engine))
            busy = receive(second)
        assert fault_code(busy) == "FAULT_CODE_BUSY"
        assert busy.fault.retry_after_ms > 0
        first.close()
        # A conversation without a connection makes room.
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            with verifier.connect() as third:
                third.send(hello(engine))
                answered = receive(third)
            if answered.WhichOneof("event") == "welcome":
                break
        assert answered.welcome.resume_token != welcome.resume_token


def test_a_silent_connection_is_closed(engine):
    with serving(engine, Settings(idle_seconds=0.2)) as verifier, verifier.connect() as socket:
        socket.send(hello(engine))
        receive(socket)
        assert fault_code(receive(socket)) == "FAULT_CODE_IDLE"
        with pytest.raises(ConnectionClosed):
            socket.recv(TIMEOUT_S)


# -- http --------------------------------------------------------------------------------------


def test_health_says_nothing_but_that(verifier):
    assert verifier.http("GET", "/healthz", headers={}).json() == {"status": "ok"}
    assert verifier.http("GET", "/readyz", headers={}).json() == {"status": "ready"}


@pytest.mark.parametrize("path", ["/v1/status", "/metrics"])
def test_what_the_verifier_does_is_for_those_with_a_token(verifier, path):
    assert verifier.http("GET", path, headers={}).status_code == 401
    assert verifier.http("GET", path).status_code == 200


def test_status(verifier, engine):
    status = verifier.http("GET", "/v1/status").json()
    assert status["fingerprints"] == vars(engine.fingerprints)
    assert status["forwards"] == engine.forwards
    assert status["capabilities"]["trees"] == engine.capabilities.trees
    assert {"sessions", "version", "uptime_s"} <= status.keys()


def test_decode_counts_forwards(verifier, engine):
    answered = verifier.http("POST", "/v1/decode", json={"tokens": PROMPT, "max_new_tokens": 5}).json()
    assert answered["tokens"] == plain(engine, PROMPT, Sampling(), 5)
    assert answered["forwards"] >= 5


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "192.168.0.7"])
def test_other_hosts_are_not_answered_for_on_loopback(verifier, host):
    answered = verifier.http("POST", "/v1/decode", json={"tokens": [1]}, headers={**verifier.headers, "Host": host})
    assert answered.status_code == 421
    assert f"not for {host}" in answered.json()["error"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{", "no JSON"),
        ("[" * 4000, "no JSON"),
        ("[]", "JSON object"),
        ('{"tokens": []}', "at least one"),
        ('{"tokens": [512]}', "below 512"),
        ('{"tokens": [1.5]}', "below 512"),
        ('{"tokens": [1], "temprature": 1}', "temperature"),
        ('{"tokens": [1], "temperature": NaN}', "temperature"),
        ('{"tokens": [1], "temperature": 1%s}' % ("0" * 400), "temperature"),
        ('{"tokens": [1], "top_p": 0}', "top_p"),
        ('{"tokens": [1], "seed": -1}', "seed"),
        ('{"tokens": [1], "max_new_tokens": 0}', "max_new_tokens"),
        ('{"tokens": [%s]}' % ("1," * 520 + "1"), "521 tokens"),
        (" " * 5000, "4096 bytes"),
    ],
    ids=lambda value: value[:24],
)
def test_decode_refuses_in_one_sentence(verifier, body, said):
    answered = verifier.http("POST", "/v1/decode", content=body)
    assert answered.status_code in (400, 413)
    assert said in answered.json()["error"]


def test_what_goes_wrong_in_reading_ends_the_connection_at_once(verifier, engine, monkeypatch, caplog):
    with verifier.connect() as socket, monkeypatch.context() as broken:
        socket.send(hello(engine))
        receive(socket)
        broken.setattr("moa_server.connection.parse_client_message", lambda *_: 1 / 0)
        socket.send(b"anything")
        assert fault_code(receive(socket)) == "FAULT_CODE_INTERNAL"
        with pytest.raises(ConnectionClosed):
            socket.recv(TIMEOUT_S)
    assert "ZeroDivisionError" in caplog.text and "Traceback" not in caplog.text
