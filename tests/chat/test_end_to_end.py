"""``moa-chat`` as a program, against a real verifier with the tiny target."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals and signals")

pytest.importorskip("uvicorn")
pytest.importorskip("onnxscript")

from terminal_program import CTRL_C, CTRL_D, in_terminal  # noqa: E402

from moa_chat.text import clean  # noqa: E402
from tiny import make_tiny_drafter, make_tiny_target  # noqa: E402

TOKEN = "secret"
QUESTION = "What is the capital of France?"


def program(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; from {module} import main; sys.exit(main())", *arguments]


@contextlib.contextmanager
def verifier(folder, port: int = 0) -> Iterator[tuple[subprocess.Popen, str, int]]:
    """``moa-serve`` with the tiny target: process, address, port."""
    models = ["--model", str(folder / "target"), "--drafter", str(folder / "drafter")]
    command = program("moa_server.cli", *models, "--json", "--port", str(port), "--threads", "1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "MOA_TOKEN": TOKEN}) as process:
        try:
            ready = json.loads(process.stdout.readline())
            yield process, ready["url"], ready["port"]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny target, its drafter and their bundle."""
    from moa_export.cli import main

    folder = tmp_path_factory.mktemp("chat")
    target = make_tiny_target(folder / "target")
    drafter = make_tiny_drafter(target, folder / "drafter")
    models = ["--model", str(target), "--drafter", str(drafter)]
    assert main(["--target", "onnx", *models, "--out", str(folder / "bundle"), "--quiet"]) == 0
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with verifier(folder) as (_, url, _):
        yield url


def chat(folder, url: str, *arguments: str) -> list[str]:
    return program("moa_chat.cli", "--server", url, "--bundle", str(folder / "bundle"), "--threads", "1", *arguments)


def once(folder, url: str, *arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess:
    command = chat(folder, url, "--once", QUESTION, *arguments)
    environment = {**os.environ, "MOA_TOKEN": token}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_once(folder, server):
    plain = once(folder, server, "--max-new-tokens", "24")
    assert plain.returncode == 0, plain.stderr
    as_json = once(folder, server, "--max-new-tokens", "24", "--json", "--draft-length", "3")
    result = json.loads(as_json.stdout)
    assert result["text"] + "\n" == plain.stdout
    assert len(result["tokens"]) == result["statistics"]["tokens"] == 24 and result["finish"] == "length"
    assert result["statistics"]["bytes_up"] > 0 and result["statistics"]["bytes_down"] > 0
    assert result["server"] == server


def test_errors_are_one_sentence(folder, server):
    cases = {
        "refused the token": once(folder, server, token="wrong"),
        "no verifier answers": once(folder, "ws://127.0.0.1:9"),
        "context holds": once(folder, server, "--system", "long " * 2000),
    }
    for said, done in cases.items():
        assert done.returncode == 2 and done.stdout == ""
        assert said in done.stderr and done.stderr.startswith("moa-chat: error: ") and done.stderr.count("\n") == 1


def test_a_chat_in_a_terminal(folder, server):
    expected = json.loads(once(folder, server, "--max-new-tokens", "24", "--json").stdout)["text"]
    with in_terminal(chat(folder, server, "--max-new-tokens", "24"), MOA_TOKEN=TOKEN) as terminal:
        terminal.wait("you>")
        terminal.press(QUESTION + "\n")
        text = terminal.wait(r"24 tokens in .* rounds \| rtt")
        shown = text.split(QUESTION)[1].split("cut off")[0]
        assert "".join(shown.split()) == "".join(clean(expected).split())
        terminal.wait("you>", count=2)
        terminal.press("/stats\n")
        terminal.wait(r"rounds +\d+")
        terminal.press(CTRL_C)
        terminal.wait("Ctrl-C again or Ctrl-D leaves")
        terminal.press(CTRL_D)
        assert terminal.process.wait(30) == 0


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(folder):
    """The verifier hangs in the middle, so that the answer certainly runs when Ctrl-C comes."""
    with verifier(folder) as (process, url, _), in_terminal(chat(folder, url), MOA_TOKEN=TOKEN) as terminal:
        terminal.wait("you>")
        terminal.press(QUESTION + "\n")
        terminal.wait(r"online \| tau")
        process.send_signal(signal.SIGSTOP)
        terminal.wait(r"offline \| tau .* tentative")
        terminal.press(CTRL_C)
        text = terminal.wait(r"stopped \| \d+ tokens")
        assert "tentative" not in text.split(QUESTION)[1]
        process.send_signal(signal.SIGCONT)
        terminal.wait("you>", count=2)
        terminal.press("And of Italy?\n")
        terminal.wait(r"tokens in .* rounds \| rtt", count=2)
        terminal.press("/quit\n")
        assert terminal.process.wait(30) == 0
        assert "Traceback" not in terminal.text()
