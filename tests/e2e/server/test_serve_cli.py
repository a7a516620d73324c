"""``moa-serve``: refusals in one sentence, a ready line, a quiet end."""

from __future__ import annotations

import json
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
from support.server.raw import Target


def refusal(capsys, *argv: str) -> str:
    """What a refused command says; it must be one line."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moa-serve: error: ") and err.count("\n") == 1
    return err


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1 port {port}: Address already in use" in refusal(capsys, "--port", str(port))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "no-such-model"], "unknown target 'no-such-model'"),
        (["--model", "{target}", "--drafter", "{target}"], "drafter"),
        (["--model", "{target}", "--drafter", "larn"], "larn"),
        (["--model", "{target}", "--drafter", "moa"], "does not fit the target"),
        (["--model", "{target}", "--max-context", "1000"], "1000 tokens"),
        (["--model", "{target}", "--device", "abacus"], "abacus"),
        (["--host", "0.0.0.0"], "--token or MOA_TOKEN"),
        (["--host", "::"], "--token or MOA_TOKEN"),
        (["--host", "nowhere.invalid", "--token", "t"], "cannot listen on nowhere.invalid"),
        (["--port", "99999"], "0..65535"),
        (["--max-sessions", "0"], "--max-sessions must be at least 1"),
        (["--idle-seconds", "nan"], "--idle-seconds must be at least 1"),
        (["--timeline", "nowhere/out.json"], "cannot write the timeline nowhere/out.json: No such file"),
        (["--allow-origin", "https://app.example/"], "'https://app.example/' is no origin"),
        (["--tls-cert", "cert.pem"], "pass both"),
        (["--tls-cert", "none.pem", "--tls-key", "none.pem"], "cannot use none.pem"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(capsys, monkeypatch, tiny_target, argv, said):
    monkeypatch.delenv("MOA_TOKEN", raising=False)
    if "--port" not in argv:
        argv = [*argv, "--port", "0"]
    assert said in refusal(capsys, *(part.format(target=tiny_target) for part in argv))


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_it_serves_until_it_is_told_to_stop(tiny_target, tiny_drafter):
    command = [sys.executable, "-c", "import sys; from moa_server.cli import main; sys.exit(main())", "--json"]
    command += ["--model", str(tiny_target), "--drafter", str(tiny_drafter), "--port", "0", "--threads", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "MOA_TOKEN": "secret"}
    ) as process:
        ready = json.loads(process.stdout.readline())
        assert ready["event"] == "ready"
        assert ready["url"] == f"ws://127.0.0.1:{ready['port']}/v1/session"
        base = f"http://127.0.0.1:{ready['port']}"
        status = httpx.get(f"{base}/v1/status", headers={"Authorization": "Bearer secret"})
        assert status.json()["fingerprints"] == ready["fingerprints"]
        assert httpx.post(f"{base}/v1/decode", json={"tokens": [5]}).status_code == 401
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_sighup_ends_the_sessions_of_a_withdrawn_token(tiny_target, tiny_drafter, tmp_path):
    file = tmp_path / "tokens.json"
    token, entry = new_token("alice")
    file.write_text(f'{{"tokens": [{entry}]}}')
    command = [sys.executable, "-c", "import sys; from moa_server.cli import main; sys.exit(main())", "--json"]
    command += ["--model", str(tiny_target), "--drafter", str(tiny_drafter), "--port", "0", "--threads", "1"]
    command += ["--token-file", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        ready = json.loads(process.stdout.readline())
        prints = tuple(ready["fingerprints"][name] for name in ("target", "tokenizer", "drafter"))
        hello = Target(ready["port"], prints, 0, 0).hello().SerializeToString()
        with connect(ready["url"], additional_headers={"Authorization": f"Bearer {token}"}) as session:
            session.send(hello)
            assert wire.ServerMessage.FromString(session.recv(30)).HasField("welcome")
            file.write_text('{"tokens": []}')
            process.send_signal(signal.SIGHUP)
            fault = wire.ServerMessage.FromString(session.recv(30)).fault
            assert (fault.code, fault.text) == (wire.FAULT_CODE_PROTOCOL, "the bearer token was withdrawn")
            with pytest.raises(ConnectionClosedError) as closed:
                session.recv(30)
        assert closed.value.rcvd.code == 1008
        process.terminate()


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


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_sighup_before_it_is_ready_ends_nothing_and_is_not_lost(tiny_target, tiny_drafter, tmp_path):
    file = tmp_path / "tokens.json"
    token, entry = new_token("alice")
    file.write_text(f'{{"tokens": [{entry}]}}')
    command = [sys.executable, "-c", SIGHUP_EARLY, "--json", "--threads", "1", "--port", "0"]
    command += ["--model", str(tiny_target), "--drafter", str(tiny_drafter), "--token-file", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        ready = json.loads(process.stdout.readline() or "{}")
        assert ready, f"it ended with {process.wait()}"
        status = httpx.get(f"http://127.0.0.1:{ready['port']}/v1/status", headers={"Authorization": f"Bearer {token}"})
        assert status.status_code == 401
        process.terminate()


def test_it_ends_with_its_standard_input(tiny_target, tiny_drafter):
    """While it serves, and while it loads: a program that is gone waits for neither."""
    command = [sys.executable, "-c", "import sys; from moa_server.cli import main; sys.exit(main())", "--json"]
    command += ["--model", str(tiny_target), "--drafter", str(tiny_drafter), "--port", "0", "--threads", "1"]
    command += ["--until-stdin-ends"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, stdin=subprocess.PIPE, **pipes) as process:
        assert json.loads(process.stdout.readline())["event"] == "ready"
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, **pipes) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


def test_without_a_standard_input_none_can_end(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "--until-stdin-ends needs a standard input" in refusal(capsys, "--until-stdin-ends")
