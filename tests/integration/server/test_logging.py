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
    fields = {"bearer": "alice", "session": 3, "connection": 2, "count": 4}
    assert first == {"level": "info", "logger": "moa_server.test", "message": "4 of them", **fields}
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


def test_an_unforeseen_exception_is_one_line_and_its_traceback_is_debugging(log):
    for level, count in (("info", 0), ("debug", 1)):
        stream = log("json", level)
        stream.truncate(stream.seek(0))
        log_unexpected(own(), "a test", raised("first\nsecond"))
        first, *others = lines(stream)
        assert first["message"].startswith(r"a test: unexpected ValueError: first\nsecond (test_logging.py:")
        assert "traceback" not in first and len(others) == count
        assert all("ValueError: first" in other["traceback"] for other in others)


def raised(text: str) -> ValueError:
    """An error with a traceback of this file."""
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


@pytest.mark.parametrize("form", ["text", "json"])
def test_whatever_a_client_wrote_is_short_and_printable_in_a_line(log, form):
    """U+202E reverses what a terminal shows after it."""
    nasty = "\x1b[2J\r\nmoa-serve: error: fire\u202e" + 100_000 * "x"
    stream = log(form, "debug")
    with log_fields(bearer=nasty):
        log_unexpected(own(), nasty, raised(nasty))
        own().warning(f"built {nasty}", extra={"data": {"why": nasty, "more": [nasty]}})
    text = stream.getvalue().split("\n")
    assert all(letter.isprintable() for line in text for letter in line) and max(map(len, text)) < 5000
    assert not any(line.startswith("moa-serve: error: fire") for line in text)
    if form == "json":
        values = [value for line in lines(stream) for name, value in line.items() if name != "traceback"]
        assert all(letter.isprintable() for value in values for letter in value)
        assert max(map(len, values)) < 1200
    assert "(test_logging.py:" in text[0], "the end of a long line is kept"


def test_a_long_traceback_is_cut_and_cannot_look_like_other_lines(log):
    stream = log("text", "debug")
    log_unexpected(own(), "a test", raised("moa-serve: error: fire\n" * 100_000))
    assert 50 < len(stream.getvalue().splitlines()) < 200
    assert sum(line.startswith("moa-serve") for line in stream.getvalue().splitlines()) == 2


def test_libraries_log_from_warnings_on(log):
    stream = log("json", "debug")
    logging.getLogger("some.library").info("hello")
    logging.getLogger("some.library").warning("beware")
    logging.getLogger("asyncio").warning("socket.send() raised exception.")  # caused by a client
    own().debug("here")
    assert messages(stream) == ["beware", "here"]


def test_a_loop_has_no_tracebacks(log):
    stream = log()

    async def fail() -> None:
        raise KeyError("lost")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(handle_loop_error)
        task = asyncio.create_task(fail())
        await asyncio.sleep(0)
        del task  # its result is never retrieved
        loop.call_exception_handler({"message": "odd"})
        loop.call_exception_handler({"message": "SSL error", "exception": ssl.SSLError("reset")})

    asyncio.run(run())
    gc.collect()
    first, second = sorted(line["message"] for line in lines(stream) if line["level"] != "debug")
    assert first.endswith(": odd") and "unexpected KeyError: 'lost' (test_logging.py:" in second
    assert "Traceback" not in stream.getvalue()


def test_a_task_that_an_ended_loop_leaves_is_no_concern_of_an_operator(log):
    stream = log()

    async def wait() -> None:
        await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(handle_loop_error)
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    del task
    gc.collect()
    assert [line for line in lines(stream) if line["level"] != "debug"] == []


# -- a verifier -----------------------------------------------------------------------------------


@pytest.fixture
def engine():
    return ToyEngine()


def ask(client: Client, *prompt: int, **options) -> None:
    """A prompt and its answer without drafts."""
    client.session.prompt(list(prompt), Sampling(), 2, **options)
    client.rounds(lambda tokens: [])


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
    entries = lines(stream)
    of = [tuple(map(line.get, ("session", "connection", "bearer"))) for line in entries]
    assert of[:2] == [(None, None, None), (1, 1, "alice")]  # the request without a token, the session
    assert {*of[1:]} == {(None, None, "alice"), (1, 1, "alice"), (1, 2, "alice")}
    ended = next(line for line in entries if "rounds" in line)
    assert (ended["session"], ended["tokens"], ended["rounds"]) == (1, 3, 3)


def test_a_failing_engine_names_the_session(log, engine):
    stream = log("json", "warning")
    with serving(engine, Settings()) as verifier:
        clients = [Client(verifier, engine) for _ in range(2)]
        for client in clients:
            client.connect()
        engine.broken.add(next(iter(verifier.parts.store._conversations.values())).sequence)
        # The client that wakes the worker is not the one that its lines are about.
        for client in reversed(clients):
            ask(client, 3, while_away=False)
            client.socket.close()
    assert clients[0].faults and not clients[1].faults
    (line,) = lines(stream)
    assert line["session"] == 1 and "0 tokens" in line["message"]


def test_an_unforeseen_exception_ends_one_connection(log, engine, monkeypatch):
    stream = log("json", "warning")
    with serving(engine, Settings()) as verifier:
        client, other = Client(verifier, engine), Client(verifier, engine)
        client.connect()
        other.connect()
        session = next(iter(verifier.parts.store._conversations.values())).session
        monkeypatch.setattr(session, "receive", lambda *received: 1 // 0)
        client.session.prompt([4], Sampling(), 2)
        for frame in client.session.frames_to_send():
            client.socket.send(frame)
        fault = wire.ServerMessage.FromString(client.socket.recv(TIMEOUT_S)).fault
        assert fault.code == wire.FAULT_CODE_INTERNAL
        with pytest.raises(ConnectionClosed) as closed:
            client.socket.recv(TIMEOUT_S)
        assert closed.value.rcvd.code == 1011
        ask(other, 3)
        assert len(other.session.committed) == 3
        other.socket.close()
    (line,) = lines(stream)
    assert line["session"] == 1 and "unexpected ZeroDivisionError: " in line["message"] and "traceback" not in line


def test_an_unforeseen_exception_in_a_request_is_answered(log, engine, monkeypatch):
    stream = log("json", "warning")
    with serving(engine, Settings()) as verifier:
        monkeypatch.setattr(verifier.parts.metrics, "text", lambda: 1 // 0)
        answer = verifier.http("GET", "/metrics")
        assert answer.status_code == 500 and list(answer.json()) == ["error"]
        monkeypatch.setattr(verifier.parts.authenticator, "authenticate", lambda header: 1 // 0)
        with pytest.raises(InvalidStatus) as failed:
            verifier.connect().__enter__()
        assert failed.value.response.status_code == 500
    for path, message in zip(("/metrics", "/v1/session"), messages(stream), strict=True):
        assert message.startswith(f"{path}: unexpected ZeroDivisionError: ")
    assert "Traceback" not in stream.getvalue()


def test_a_worker_continues_after_an_exception(log, engine, monkeypatch):
    """An engine that answers too few requests breaks the contract; its callers get a fault, the next ones answers."""
    stream = log("json", "warning")
    with serving(engine, Settings()) as verifier:
        client = Client(verifier, engine)
        client.connect()
        answered = engine.step
        monkeypatch.setattr(engine, "step", lambda requests: asyncio.sleep(0, []))
        ask(client, 4)
        assert client.faults[-1].retry_after_ms > 0
        monkeypatch.setattr(engine, "step", answered)
        client.drop()
        client.events.clear()
        client.connect()
        client.rounds(lambda tokens: [])
        assert not client.faults and len(client.session.committed) == 3
        client.socket.close()
    assert ["unexpected ValueError: " in text for text in messages(stream)] == [True]
