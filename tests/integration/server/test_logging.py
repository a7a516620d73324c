"""What the verifier logs: one line each, with the session it is about, and no traceback that a client can cause."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import ssl
from datetime import datetime

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from moa_runtime.session.events import Sampling
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.auth import new_token
from moa_server.logging import add_log_fields, handle_loop_error, log_fields, log_unexpected
from moa_server.settings import Settings
from support.server.running import TIMEOUT_S, Client, serving
from support.toy_engine import ToyEngine


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def messages(stream: io.StringIO) -> list[str]:
    return [line["message"] for line in lines(stream)]


def own() -> logging.Logger:
    return logging.getLogger("moa_server.test")


# -- lines ---------------------------------------------------------------------------------------


def test_a_json_line(log):
    stream = log()
    with log_fields(bearer="alice"):
        add_log_fields(session=3, connection=2)
        own().info("%d of them", 4, extra={"data": {"count": 4}})
    own().warning("nobody's\nline")
    first, second = lines(stream)
    moment = datetime.fromisoformat(first.pop("time").replace("Z", "+00:00"))
    assert moment.utcoffset().total_seconds() == 0
    assert first == {
        "level": "info",
        "logger": "moa_server.test",
        "message": "4 of them",
        "bearer": "alice",
        "session": 3,
        "connection": 2,
        "count": 4,
    }
    assert second["message"] == r"nobody's\nline" and "session" not in second


def test_a_text_line(log):
    stream = log("text", "warning")
    own().info("too little")
    with log_fields(bearer="alice"):
        add_log_fields(session=3, connection=2)
        own().warning("a client wrote %s", "\n\x1b[2Jmoa-serve: error: fire")
    own().error("nobody's")
    assert stream.getvalue().splitlines() == [
        r"moa-serve: warning: a client wrote \n\x1b[2Jmoa-serve: error: fire [session 3, connection 2, alice]",
        "moa-serve: error: nobody's",
    ]


def test_tasks_that_run_already_learn_the_number(log):
    stream = log()

    async def connection(number: int) -> None:
        with log_fields(bearer=""):
            begun = asyncio.Event()

            async def reading() -> None:
                await begun.wait()
                own().info("read")

            task = asyncio.create_task(reading())
            await asyncio.sleep(0)
            add_log_fields(session=number)
            begun.set()
            await task

    async def both() -> None:
        await asyncio.gather(connection(1), connection(2))

    asyncio.run(both())
    assert sorted(line["session"] for line in lines(stream)) == [1, 2]


def test_an_unforeseen_exception_is_one_line_and_its_way_is_debugging(log):
    def fail() -> None:
        raise ValueError("first\nsecond")

    for level, count in (("info", 0), ("debug", 1)):
        stream = log("json", level)
        stream.truncate(stream.seek(0))
        try:
            fail()
        except ValueError as error:
            log_unexpected(own(), "a test", error)
        first, *others = lines(stream)
        assert first["message"].startswith(r"a test: unexpected ValueError: first\nsecond (test_logging.py:")
        assert "traceback" not in first and len(others) == count
        assert all("ValueError: first" in other["traceback"] for other in others)


@pytest.mark.parametrize("form", ["text", "json"])
def test_whatever_a_client_wrote_is_short_and_printable_wherever_it_stands_in_a_line(log, form):
    """U+202E turns round what a terminal shows behind it."""
    nasty = "\x1b[2J\r\nmoa-serve: error: fire\u202e" + 100_000 * "x"
    stream = log(form, "debug")
    with log_fields(bearer=nasty):
        try:
            raise ValueError(nasty)
        except ValueError as error:
            log_unexpected(own(), nasty, error)
        own().warning(f"built {nasty}", extra={"data": {"why": nasty, "more": [nasty]}})
    text = stream.getvalue()
    assert all(letter.isprintable() for line in text.split("\n") for letter in line)
    assert max(map(len, text.split("\n"))) < 5000 and "characters left out" in text
    assert not any(line.startswith("moa-serve: error: fire") for line in text.split("\n"))
    if form == "json":
        values = [value for line in lines(stream) for name, value in line.items() if name != "traceback"]
        assert all(letter.isprintable() for value in values for letter in value)
        assert max(map(len, values)) < 1200
        text = lines(stream)[0]["message"]
    assert "(test_logging.py:" in text, "the end of a long line is kept"


def test_a_traceback_of_many_lines_is_cut_and_cannot_look_like_other_lines(log):
    stream = log("text", "debug")
    try:
        raise ValueError("moa-serve: error: fire\n" * 100_000)
    except ValueError as error:
        log_unexpected(own(), "a test", error)
    assert 50 < len(stream.getvalue().splitlines()) < 200
    assert sum(line.startswith("moa-serve") for line in stream.getvalue().splitlines()) == 2


def test_libraries_are_heard_from_warnings_on(log):
    stream = log("json", "debug")
    logging.getLogger("some.library").info("hello")
    logging.getLogger("some.library").warning("beware")
    logging.getLogger("asyncio").warning("socket.send() raised exception.")  # a client's doing
    own().debug("here")
    assert messages(stream) == ["beware", "here"]


def test_nobody_can_fill_the_log(log):
    stream = log()
    for number in range(500):
        own().warning("complaint %d", number)
        own().info("session %d", number)
    assert sum(message.startswith("complaint") for message in messages(stream)) == 10
    assert sum(message.startswith("session") for message in messages(stream)) == 500


def test_a_loop_has_no_tracebacks(log):
    stream = log()

    async def fail() -> None:
        raise KeyError("lost")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(handle_loop_error)
        task = asyncio.create_task(fail())
        await asyncio.sleep(0)
        del task  # nobody will ever ask for its result
        loop.call_exception_handler({"message": "odd"})
        loop.call_exception_handler({"message": "SSL error", "exception": ssl.SSLError("reset")})

    asyncio.run(run())
    gc.collect()
    first, second = sorted(messages(stream))
    assert first == "in the background: odd" and second.startswith("in the background: unexpected KeyError: 'lost' (")
    assert "never retrieved" not in stream.getvalue() and "Traceback" not in stream.getvalue()


# -- a verifier -----------------------------------------------------------------------------------


@pytest.fixture
def engine():
    return ToyEngine()


def test_a_session_in_the_log(log, engine, tmp_path):
    token, entry = new_token("alice")
    (tmp_path / "tokens.json").write_text(f'{{"tokens": [{entry}]}}')
    stream = log()
    settings = Settings(token_file=tmp_path / "tokens.json", max_sessions=1)
    with serving(engine, settings) as verifier:
        assert verifier.http("POST", "/v1/decode", json={"tokens": [5]}).status_code == 401
        verifier.token = token
        first, second = Client(verifier, engine), Client(verifier, engine)
        first.connect()
        second.connect()
        assert second.faults
        first.session.prompt([1, 2], Sampling(), 3)
        first.rounds(lambda tokens: [])
        first.settle()
        first.socket.send("text")
        assert wire.ServerMessage.FromString(first.socket.recv(TIMEOUT_S)).fault.text
        assert verifier.http("POST", "/v1/decode", json=[]).status_code == 400
        first.drop()
        first.connect()
        second.socket.close()
        first.socket.close()
    told = [
        (line.get("session"), line.get("connection"), line.get("bearer"), line["message"]) for line in lines(stream)
    ]
    assert told[:2] == [
        (None, None, None, "refused: the bearer token is missing or wrong"),
        (1, 1, "alice", "session opened, 0 tokens held"),
    ]
    refusal = "a session was refused: this verifier already serves 1 sessions; try again later"
    assert (None, None, "alice", refusal) in told
    assert (1, 1, "alice", "session ended: the client left; 3 tokens in 3 verdicts") in told
    assert (1, 2, "alice", "session opened, 5 tokens held") in told
    assert (1, 1, "alice", "a frame was refused: a text frame; this protocol is binary") in told
    assert any(line[:3] == (None, None, "alice") and line[3].startswith("refused: expected a JSON") for line in told)
    ended = next(line for line in lines(stream) if line["message"].startswith("session ended"))
    assert (ended["why"], ended["tokens"], ended["rounds"]) == ("the client left", 3, 3)


def test_a_failing_engine_names_the_session(log, engine):
    stream = log("json", "warning")
    with serving(engine, Settings()) as verifier:
        clients = [Client(verifier, engine) for _ in range(2)]
        for client in clients:
            client.connect()
        engine.broken.add(next(iter(verifier.parts.store._conversations.values())).sequence)
        # Who wakes the worker is not whom its lines are about.
        clients[1].session.prompt([3], Sampling(), 2, while_away=False)
        clients[1].rounds(lambda tokens: [])
        clients[0].session.prompt([4], Sampling(), 2, while_away=False)
        clients[0].rounds(lambda tokens: [])
        for client in clients:
            client.socket.close()
    assert clients[0].faults and not clients[1].faults
    (line,) = lines(stream)
    assert line["session"] == 1 and line["message"].startswith("the engine failed on a draft of 0 tokens after 1")


def test_what_nobody_foresaw_ends_one_connection(log, engine, monkeypatch):
    stream = log("json", "warning")
    with serving(engine, Settings()) as verifier:
        client, other = Client(verifier, engine), Client(verifier, engine)
        client.connect()
        other.connect()
        session = next(iter(verifier.parts.store._conversations.values())).session
        monkeypatch.setattr(session, "receive", lambda message: 1 // 0)
        client.session.prompt([4], Sampling(), 2)
        for frame in client.session.frames_to_send():
            client.socket.send(frame)
        fault = wire.ServerMessage.FromString(client.socket.recv(TIMEOUT_S)).fault
        assert fault.code == wire.FAULT_CODE_INTERNAL
        with pytest.raises(ConnectionClosed) as closed:
            client.socket.recv(TIMEOUT_S)
        assert closed.value.rcvd.code == 1011
        other.session.prompt([3], Sampling(), 2)
        other.rounds(lambda tokens: [])
        assert len(other.session.committed) == 3
        other.socket.close()
    (line,) = lines(stream)
    assert line["session"] == 1 and line["message"].startswith("a session: unexpected ZeroDivisionError: ")
    assert "traceback" not in line


def test_what_nobody_foresaw_in_a_request_is_answered(log, engine, monkeypatch):
    stream = log("json", "warning")
    with serving(engine, Settings()) as verifier:
        monkeypatch.setattr(verifier.parts.metrics, "text", lambda: 1 // 0)
        answer = verifier.http("GET", "/metrics")
        assert (answer.status_code, answer.json()) == (500, {"error": "the verifier failed on this request"})
        monkeypatch.setattr(verifier.parts.authenticator, "authenticate", lambda header: 1 // 0)
        with pytest.raises(InvalidStatus) as refused:
            verifier.connect().__enter__()
        assert refused.value.response.status_code == 500
    first, second = messages(stream)
    assert first.startswith("/metrics: unexpected ZeroDivisionError: ")
    assert second.startswith("/v1/session: unexpected ZeroDivisionError: ")
    assert "Traceback" not in stream.getvalue()


def test_a_worker_that_stumbles_goes_on(log, engine, monkeypatch):
    """An engine that answers too few requests breaks the contract; its callers are told, and the next ones served."""
    stream = log("json", "warning")
    with serving(engine, Settings()) as verifier:
        client = Client(verifier, engine)
        client.connect()
        answered = engine.step
        monkeypatch.setattr(engine, "step", lambda requests: asyncio.sleep(0, []))
        client.session.prompt([4], Sampling(), 2)
        client.rounds(lambda tokens: [])
        assert client.faults[-1].retry_after_ms > 0
        monkeypatch.setattr(engine, "step", answered)
        client.drop()
        client.events.clear()
        client.connect()
        client.rounds(lambda tokens: [])
        assert not client.faults and len(client.session.committed) == 3
        client.socket.close()
    assert [text[:32] for text in messages(stream)] == ["a step: unexpected ValueError: z"]
