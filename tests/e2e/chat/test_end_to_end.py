"""``moa-chat`` as a program, against a real verifier with the tiny target."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals and signals")

pytest.importorskip("granian")

from moa_chat import strings  # noqa: E402
from moa_chat.terminal.renderer import clean  # noqa: E402
from moa_runtime.datastore import write_datastore  # noqa: E402
from moa_runtime.manifest import read_manifest  # noqa: E402
from support.chat.programs import TOKEN, Running, chat, verifier  # noqa: E402
from support.chat.terminal_program import CTRL_C, CTRL_D, TerminalProgram, in_terminal  # noqa: E402
from support.drafter.eagle3_heads import write_head  # noqa: E402
from support.server.edge_running import eventually  # noqa: E402
from support.tiny import make_tiny_bundle  # noqa: E402

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def running(tiny_target: Path, tiny_drafter: Path) -> Iterator[Running]:
    with verifier(tiny_target, tiny_drafter) as running:
        yield running


@pytest.fixture
def server(running: Running) -> str:
    return running.url


@pytest.fixture(scope="module")
def waiting(tiny_target: Path, tiny_drafter: Path) -> Iterator[Running]:
    """A verifier that writes nothing while its client is away, so that an answer is still running when it is back."""
    with verifier(tiny_target, tiny_drafter, options=("--away-seconds", "0")) as waiting:
        yield waiting


@pytest.fixture
def hanging(waiting: Running) -> Iterator[Running]:
    """A verifier to be stopped with SIGSTOP; it continues after the test."""
    yield waiting
    waiting.process.send_signal(signal.SIGCONT)


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations are kept here, not in the home of the user who runs the tests."""
    monkeypatch.setenv("MOA_EDGE_PROFILE", str(tmp_path / "profile"))


def once(onnx_bundle, url: str, *arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess:
    command = chat(onnx_bundle, url, "--once", QUESTION, *arguments)
    environment = {**os.environ, "MOA_TOKEN": token}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_one_prompt_has_one_answer(onnx_bundle, server):
    plain = once(onnx_bundle, server, "--max-new-tokens", "24")
    assert plain.returncode == 0, plain.stderr
    as_json = once(onnx_bundle, server, "--max-new-tokens", "24", "--json", "--draft-length", "3")
    result = json.loads(as_json.stdout)
    assert result["text"] + "\n" == plain.stdout
    assert len(result["tokens"]) == result["statistics"]["tokens"] == 24 and result["finish"] == "length"
    assert result["statistics"]["bytes_up"] > 0 and result["statistics"]["bytes_down"] > 0
    assert result["server"] == server


def test_a_drafter_without_a_model_gets_the_same_text_without_memory_rows(onnx_bundle, server, tmp_path):
    limit = ("--max-new-tokens", "48", "--json", "--drafting", "device")
    with_rows = json.loads(once(onnx_bundle, server, *limit).stdout)
    tokenizer = read_manifest(onnx_bundle).fingerprints.tokenizer
    write_datastore(tmp_path / "texts", [[each["id"] for each in with_rows["tokens"]]], tokenizer)
    for more in ((), ("--datastore", str(tmp_path / "texts"))):
        done = once(onnx_bundle, server, *limit, "--drafter", "sssd", *more)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["text"] == with_rows["text"]
        assert result["statistics"]["bytes_down"] < with_rows["statistics"]["bytes_down"] / 2
    assert result["statistics"]["tau"] > 4, "the datastore holds this very answer"


def test_a_published_head_drafts_on_the_device(tiny_target, tmp_path):
    head = write_head(tmp_path / "head", {"norm_before_residual": True}, of="authors")
    bundle = make_tiny_bundle(tmp_path / "bundle", tiny_target, head, "none", questions=())
    limit, found = ("--max-new-tokens", "48", "--json"), []
    with verifier(tiny_target, head) as running:
        for how in (("device",), ("server",), ("device", "--drafter", "sssd")):
            done = once(bundle, running.url, *limit, "--drafting", *how)
            assert done.returncode == 0, done.stderr
            found.append(json.loads(done.stdout))
    assert found[0]["text"] == found[1]["text"] == found[2]["text"]
    device, _, without = (result["statistics"] for result in found)
    # A row is 64 numbers in float16.
    assert device["bytes_down"] - without["bytes_down"] > 48 * 128


def test_errors_are_one_sentence(onnx_bundle, server):
    for code, done in (
        ("[unauthorized]", once(onnx_bundle, server, token="wrong")),
        ("[unreachable]", once(onnx_bundle, "ws://127.0.0.1:9")),
        ("[context_full]", once(onnx_bundle, server, "--system", "long " * 2000)),
    ):
        assert done.returncode == 2 and done.stdout == ""
        assert code in done.stderr and done.stderr.startswith("moa-chat: error: ") and done.stderr.count("\n") == 1


def test_a_chat_in_a_terminal(onnx_bundle, server):
    expected = json.loads(once(onnx_bundle, server, "--max-new-tokens", "24", "--json").stdout)["text"]
    command = chat(onnx_bundle, server, "--terminal", "--max-new-tokens", "24")
    with in_terminal(command, columns=200, MOA_TOKEN=TOKEN) as terminal:
        terminal.wait("you>")
        terminal.press(QUESTION + "\n")
        text = terminal.wait(r"24 tokens in .* rounds \| server drafts")
        shown = text.split(QUESTION)[1].split("cut off")[0]
        assert "".join(shown.split()) == "".join(clean(expected).split())
        terminal.wait("you>", count=2)
        terminal.press("/stats\n")
        terminal.wait(r"rounds +\d+")
        terminal.wait("you>", count=3)
        time.sleep(1)  # readline loses a Ctrl-C that comes between its prompt and its wait for keys
        terminal.press(CTRL_C)
        terminal.wait(re.escape(strings.HOW_TO_LEAVE))
        terminal.press(CTRL_D)
        assert terminal.process.wait(30) == 0


@contextmanager
def slowed(running: Running) -> Iterator[None]:
    """Let a verifier run a tenth of the time: an answer of the tiny target would be over before a screen is read."""
    over = threading.Event()

    def take_turns() -> None:
        while not over.is_set():
            running.process.send_signal(signal.SIGSTOP)
            time.sleep(0.027)
            running.process.send_signal(signal.SIGCONT)
            time.sleep(0.003)

    turns = threading.Thread(target=take_turns)
    turns.start()
    try:
        yield
    finally:
        over.set()
        turns.join()


@contextmanager
def hung(onnx_bundle: Path, hanging: Running, *arguments: str) -> Iterator[TerminalProgram]:
    """A chat whose verifier hung in the middle of an answer, and that knows that this is an outage."""
    # An answer that the device has written to its end would be over: it may write no more than this.
    # Rounds of the device have memory rows, whatever these cost: without them it would write nothing.
    options = ("--drafting", "device", "--max-new-tokens", "400", "--offline-limit", "60", *arguments)
    command = chat(onnx_bundle, hanging.url, "--terminal", *options)
    with in_terminal(command, columns=300, MOA_TOKEN=TOKEN) as terminal:
        terminal.wait("you>")
        terminal.press(QUESTION + "\n")
        terminal.wait(r"online \|.* tau .* \d\d rounds")  # memory rows come after the first text
        hanging.process.send_signal(signal.SIGSTOP)
        terminal.wait(r"slow \| ")
        # The user is not asked about a few words, nor after a second: wait for more, and for an attempt that failed.
        terminal.wait(r"(?m)^reconnecting \|.*tau .* [2-9]\d tentative")
        terminal.wait(r"(?m)^reconnecting in \d+ s\b.*tau .* [2-9]\d tentative")
        yield terminal


@pytest.mark.parametrize(
    "key", [pytest.param("", id="asked after the answer", marks=pytest.mark.slow), pytest.param("\x0b", id="Ctrl-K")]
)
def test_the_user_keeps_what_was_written_while_the_verifier_hung(onnx_bundle, hanging, key):
    with hung(onnx_bundle, hanging) as terminal:
        hanging.process.send_signal(signal.SIGCONT)
        if key:
            terminal.wait(re.escape(strings.KEEP_KEY))
            terminal.press(key)
        else:
            terminal.wait(re.escape(strings.KEEP_MINE_ASKED.strip()))
            terminal.press("y\n")
        terminal.wait(r"\d+ written offline")
        terminal.wait("you>", count=2)
        terminal.press("/stats\n")
        terminal.wait(r"kept +[1-9]")
        terminal.press("/quit\n")
        assert terminal.process.wait(30) == 0


def test_an_answer_goes_on_after_its_program_was_suspended(onnx_bundle, tiny_target, tiny_drafter):
    """For so long that the verifier has closed the connection."""
    with verifier(tiny_target, tiny_drafter, options=("--idle-seconds", "1", "--away-seconds", "0")) as running:
        command = chat(onnx_bundle, running.url, "--terminal", "--max-new-tokens", "400")
        with in_terminal(command, columns=200, MOA_TOKEN=TOKEN) as terminal:
            terminal.wait("you>")
            with slowed(running):
                terminal.press(QUESTION + "\n")
                terminal.wait(r"online \|.* tau .* \d\d rounds")
                terminal.process.send_signal(signal.SIGSTOP)
            metrics, allowed = f"http://127.0.0.1:{running.port}/metrics", {"Authorization": f"Bearer {TOKEN}"}
            eventually(lambda: 'moa_refusals_total{reason="idle"} 1.0' in httpx.get(metrics, headers=allowed).text)
            terminal.process.send_signal(signal.SIGCONT)
            terminal.wait(r"400 tokens in .* rounds")
            terminal.wait("you>", count=2)
            terminal.press("/quit\n")
            assert terminal.process.wait(30) == 0 and "Traceback" not in terminal.text()


def test_ctrl_c_stops_an_answer_and_the_chat_continues(onnx_bundle, hanging):
    """The verifier hangs in the middle, so that the answer certainly runs when Ctrl-C comes."""
    with hung(onnx_bundle, hanging, "--policy", "rollback") as terminal:
        terminal.press(CTRL_C)
        text = terminal.wait(r"stopped \| \d+ tokens")
        assert "tentative" not in text.split("you>")[1]
        hanging.process.send_signal(signal.SIGCONT)
        terminal.wait("you>", count=2)
        terminal.press("And of Italy?\n")
        terminal.wait(r"tokens in .* rounds \| rtt \d+ ms", count=2)
        terminal.wait(r"you>\s*\Z")  # after the check of text that was written while it hung
        terminal.press("/quit\n")
        assert terminal.process.wait(30) == 0
        assert "Traceback" not in terminal.text()


def test_a_killed_program_continues_when_it_is_started_again(onnx_bundle, server, waiting):
    """SIGKILL in the middle of an answer, which is still unfinished when the program is back."""
    command = chat(onnx_bundle, waiting.url, "--terminal", "--max-new-tokens", "200")
    whole = once(onnx_bundle, server, "--max-new-tokens", "200").stdout
    with in_terminal(command, columns=200, MOA_TOKEN=TOKEN) as terminal:
        terminal.wait("you>")
        with slowed(waiting):
            terminal.press(QUESTION + "\n")
            terminal.wait(r"online \|.* tau")
            terminal.process.kill()
    with in_terminal(command, columns=200, MOA_TOKEN=TOKEN) as terminal:
        text = terminal.wait(r"200 tokens in .* rounds")
        shown = text.split(QUESTION)[1].split("cut off")[0]
        assert "".join(shown.split()) == "".join(clean(whole).split())
        with in_terminal(command, columns=500, MOA_TOKEN=TOKEN) as second:
            second.wait(re.escape(strings.KEPT_NOWHERE.format("")))
            assert QUESTION not in second.wait("you>")
        terminal.press(CTRL_D)
        assert terminal.process.wait(30) == 0
    with in_terminal([*command, "--no-save"], columns=200, MOA_TOKEN=TOKEN) as terminal:
        assert QUESTION not in terminal.wait("you>")
