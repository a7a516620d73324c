"""A verifier that a program starts on its own machine ends with it, however that is, and is missed when it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")

from moa_chat import local_verifier as local  # noqa: E402  after the check for uvicorn

TIMEOUT_S = 120
#: What takes the place of moa-serve: it is ready at once, and gives up when it finds the file.
GIVES_UP = (
    "import json, pathlib, sys, time\n"
    "print(json.dumps({{'url': 'ws://127.0.0.1:9'}}), flush=True)\n"
    "while not pathlib.Path({mark!r}).exists(): time.sleep(0.02)\n"
    "sys.exit('moa-serve: error: no memory')"
)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionError:
        return False
    return True


def test_a_killed_program_leaves_no_verifier(tiny_target: Path, tiny_drafter: Path) -> None:
    options = ["--model", str(tiny_target), "--drafter", str(tiny_drafter), "--threads", "1"]
    code = (
        "import time; from moa_chat.local_verifier import local_verifier\n"
        f"with local_verifier({options}) as verifier: print(verifier.endpoint.url, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = urlsplit(process.stdout.readline().strip()).port
        assert port is not None and answers(port)
        process.kill()
    until(lambda: not answers(port))


@pytest.mark.parametrize("killed", [True, False])
def test_why_it_ended_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    mark = tmp_path / "mark"
    script = GIVES_UP.format(mark=str(mark))
    monkeypatch.setattr(local, "own_program", lambda *_: [sys.executable, "-c", script])
    with local.local_verifier() as verifier:
        assert verifier.problem is None
        os.kill(verifier.pid, signal.SIGKILL) if killed else mark.touch()
        until(lambda: verifier.problem is not None)
        why = "exit status -9" if killed else "moa-serve: error: no memory"
        assert str(verifier.problem) == f"the verifier on this machine ended: {why}"


def test_the_gateway_ends_with_the_verifier_that_it_started(onnx_bundle: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = (
        "import sys; from moa_chat import cli, local_verifier as local\n"
        f"local.own_program = lambda *_: [sys.executable, '-c', {GIVES_UP.format(mark=str(mark))!r}]\n"
        f"sys.exit(cli.main(['--serve', '127.0.0.1:0', '--local', '--json', '--bundle', {str(onnx_bundle)!r}]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "ready"
        mark.touch()
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (2, "")
    said = "moa-chat: error: the verifier on this machine ended: moa-serve: error: no memory"
    assert err.splitlines()[-1] == said and "Traceback" not in err
