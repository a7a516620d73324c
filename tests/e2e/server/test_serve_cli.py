"""``moa-serve``: refusals in one sentence, a ready line, a quiet end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.auth import new_token
from moa_server.cli import main
from moa_server.connection import REFUSED, CloseReason
from support.server.raw import Target
from support.server.running import moa_serve

SIGNALS = pytest.mark.skipif(os.name == "nt", reason="signals")


def refusal(capsys, *argv: str) -> str:
    """The sentence of a refused command; it must be one line."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moa-serve: error: ") and err.count("\n") == 1
    return err


def test_a_port_in_use_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refusal(capsys, "--port", port)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "no-such-model"], "'no-such-model'"),
        (["--model", "{target}", "--drafter", "{target}"], "drafter"),
        (["--model", "{target}", "--drafter", "larn"], "larn"),
        (["--model", "{target}", "--drafter", "moa"], "moa"),
        (["--model", "{target}", "--max-context", "1000"], "1000"),
        (["--model", "{target}", "--device", "abacus"], "abacus"),
        (["--host", "0.0.0.0"], "[token_missing]"),
        (["--host", "::"], "[token_missing]"),
        (["--host", "nowhere.invalid", "--token", "t"], "nowhere.invalid"),
        (["--port", "99999"], "[out_of_range]"),
        (["--max-sessions", "0"], "[out_of_range]"),
        (["--idle-seconds", "nan"], "[out_of_range]"),
        (["--timeline", "nowhere/out.json"], "nowhere/out.json"),
        (["--allow-origin", "https://app.example/"], "'https://app.example/'"),
        (["--tls-cert", "cert.pem"], "[incomplete]"),
        (["--tls-cert", "none.pem", "--tls-key", "none.pem"], "[bad_certificate]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_cannot_be_used_are_refused(capsys, monkeypatch, tiny_target, argv, said):
    monkeypatch.delenv("MOA_TOKEN", raising=False)
    if "--port" not in argv:
        argv = [*argv, "--port", "0"]
    assert said in refusal(capsys, *(part.format(target=tiny_target) for part in argv))


@pytest.fixture
def model(tiny_target, tiny_drafter) -> tuple[str, ...]:
    return "--model", str(tiny_target), "--drafter", str(tiny_drafter)


@pytest.fixture
def token_file(tmp_path):
    """A token file, and the token of its only entry."""
    file = tmp_path / "tokens.json"
    token, entry = new_token("alice")
    file.write_text(f'{{"tokens": [{entry}]}}')
    return file, token


@SIGNALS
def test_it_serves_until_sigterm(model):
    with moa_serve(*model, env={**os.environ, "MOA_TOKEN": "secret"}) as (process, ready):
        assert ready["event"] == "ready" and ready["url"] == f"ws://127.0.0.1:{ready['port']}/v1/session"
        base = f"http://127.0.0.1:{ready['port']}"
        status = httpx.get(f"{base}/v1/status", headers={"Authorization": "Bearer secret"})
        assert status.json()["fingerprints"] == ready["fingerprints"]
        assert httpx.post(f"{base}/v1/decode", json={"tokens": [5]}).status_code == 401
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


@SIGNALS
def test_sighup_ends_the_sessions_of_a_withdrawn_token(model, token_file):
    file, token = token_file
    with moa_serve(*model, "--token-file", file) as (process, ready):
        prints = tuple(ready["fingerprints"][name] for name in ("target", "tokenizer", "drafter"))
        hello = Target(ready["port"], prints, 0, 0).hello().SerializeToString()
        with connect(ready["url"], additional_headers={"Authorization": f"Bearer {token}"}) as session:
            session.send(hello)
            assert wire.ServerMessage.FromString(session.recv(30)).HasField("welcome")
            file.write_text('{"tokens": []}')
            process.send_signal(signal.SIGHUP)
            fault = wire.ServerMessage.FromString(session.recv(30)).fault
            assert (fault.code, fault.text) == (wire.FAULT_CODE_PROTOCOL, CloseReason.WITHDRAWN.value)
            with pytest.raises(ConnectionClosedError) as closed:
                session.recv(30)
        assert closed.value.rcvd.code == REFUSED


SIGHUP_EARLY = """
import os, signal, sys
from pathlib import Path
from moa_server import cli, process

load, warm_up = cli.load_engine, process.warm_up

def loading(options):
    os.kill(os.getpid(), signal.SIGHUP)
    return load(options)

async def warming(*args):
    Path(sys.argv[-1]).write_text('{"tokens": []}')
    os.kill(os.getpid(), signal.SIGHUP)
    await warm_up(*args)

cli.load_engine, process.warm_up = loading, warming
sys.exit(cli.main())
"""


@SIGNALS
def test_sighup_before_it_is_ready_ends_nothing_and_is_not_lost(model, token_file):
    file, token = token_file
    with moa_serve(*model, "--token-file", file, program=SIGHUP_EARLY) as (process, ready):
        assert ready, f"it ended with {process.wait()}"
        status = httpx.get(f"http://127.0.0.1:{ready['port']}/v1/status", headers={"Authorization": f"Bearer {token}"})
        assert status.status_code == 401


@pytest.mark.parametrize(
    ("stdin", "ready"), [(subprocess.PIPE, True), (subprocess.DEVNULL, False)], ids=["serving", "loading"]
)
def test_it_ends_with_its_standard_input(model, stdin, ready):
    with moa_serve(*model, "--until-stdin-ends", stdin=stdin) as (process, line):
        assert bool(line) == ready
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


def test_without_a_standard_input_none_can_end(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "[no_stdin]" in refusal(capsys, "--until-stdin-ends")
