"""Programs that ``moa-chat`` starts on its own machine, a verifier and an export, end with it, and say why they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("granian")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")

from moa_chat import local_verifier as local  # noqa: E402  after the check for granian
from moa_runtime import bundle as bundles  # noqa: E402
from support.refusals import refused  # noqa: E402

TIMEOUT_S = 120
#: A program in the place of moa-serve: it is ready at once, and gives up when it finds the file.
GIVES_UP = (
    "import json, pathlib, sys, time\n"
    "print(json.dumps({{'url': 'ws://127.0.0.1:9'}}), flush=True)\n"
    "while not pathlib.Path({mark!r}).exists(): time.sleep(0.02)\n"
    "sys.exit('moa-serve: error: no memory  [out_of_memory]')"
)
#: Writes a file when it is terminated.
NOTES_ITS_END = (
    "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (open({mark!r}, 'w'), sys.exit(1)))\n"
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


@pytest.fixture
def instead(monkeypatch) -> Callable[[str], None]:
    """Runs a script in the place of moa-edge's own programs."""

    def run_instead(script: str) -> None:
        for module in (local, bundles):
            monkeypatch.setattr(module, "own_program", lambda *_: [sys.executable, "-c", script])

    return run_instead


def test_a_killed_program_leaves_no_verifier(tiny_target: Path, tiny_drafter: Path) -> None:
    options = ["--model", str(tiny_target), "--drafter", str(tiny_drafter), "--threads", "1"]
    code = (
        "import time; from moa_chat.local_verifier import local_verifier\n"
        f"with local_verifier({options}) as verifier: print(verifier.endpoint.url, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        port = urlsplit(process.stdout.readline().strip()).port
        assert port is not None and answers(port)
        process.kill()
    until(lambda: not answers(port))


def test_a_local_verifier_gets_a_token_and_is_stopped_at_the_end(instead, tmp_path: Path) -> None:
    mark = tmp_path / "stopped"
    instead(
        NOTES_ITS_END.format(mark=str(mark)) + "import json, os; print('loading', flush=True)\n"
        "print(json.dumps({'event': 'ready', 'url': 'ws://127.0.0.1:1/' + os.environ['MOA_TOKEN']}), flush=True)\n"
        "time.sleep(60)"
    )
    with local.local_verifier() as verifier:
        endpoint = verifier.endpoint
        assert endpoint.url == f"ws://127.0.0.1:1/{endpoint.token}" and len(endpoint.token) > 20
        assert not mark.exists()
    assert mark.exists()


def test_a_killed_verifier_is_started_again_on_the_same_port(tiny_target, tiny_drafter, monkeypatch, capsys):
    """Its stages are shown at the first start alone: later an answer may be on the screen."""
    monkeypatch.setattr(local, "_LEAST_SECONDS", 0.0)
    options = ["--model", str(tiny_target), "--drafter", str(tiny_drafter), "--threads", "1"]
    with local.local_verifier(options, restarts=True) as verifier:
        port, first = urlsplit(verifier.endpoint.url).port, verifier.pid
        assert port is not None
        stages = {line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()}
        assert len(stages) == 3 and all(stage.startswith("moa-serve: ") for stage in stages)
        os.kill(first, signal.SIGKILL)
        until(lambda: verifier.pid != first and answers(port))
        assert verifier.problem is None and not capsys.readouterr().err
    until(lambda: not answers(port))


@pytest.mark.parametrize("killed", [True, False])
def test_why_a_local_verifier_ended_is_known(tmp_path: Path, instead, killed: bool) -> None:
    mark = tmp_path / "mark"
    instead(GIVES_UP.format(mark=str(mark)))
    with local.local_verifier() as verifier:
        assert verifier.problem is None
        os.kill(verifier.pid, signal.SIGKILL) if killed else mark.touch()
        until(lambda: verifier.problem is not None)
        why, code = ("it was ended by SIGKILL", "verifier_ended") if killed else ("no memory", "out_of_memory")
        assert str(verifier.problem).endswith(f": {why}") and verifier.problem.code == code


def test_a_local_verifier_that_fails_says_why(instead) -> None:
    instead("import sys; sys.exit('moa-serve: error: no memory  [out_of_memory]')")
    with refused("out_of_memory") as caught, local.local_verifier():
        pass
    assert str(caught.value).endswith(": no memory")


def test_the_gateway_ends_with_the_verifier_that_it_started(onnx_bundle, tiny_target, tiny_drafter, tmp_path):
    own = ["--bundle", str(onnx_bundle), "--model", str(tiny_target), "--drafter", str(tiny_drafter)]
    mark = tmp_path / "mark"
    code = (
        "import sys; from moa_chat import cli, local_verifier as local\n"
        f"local.own_program = lambda *_: [sys.executable, '-c', {GIVES_UP.format(mark=str(mark))!r}]\n"
        f"sys.exit(cli.main(['--serve', '127.0.0.1:0', '--local', '--json', *{own}]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert json.loads(process.stdout.readline())["event"] == "ready"
        mark.touch()
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (2, "")
    assert err.splitlines()[-1].endswith(": no memory  [out_of_memory]") and "Traceback" not in err


def test_an_export_is_terminated_and_waited_for(instead, tmp_path: Path) -> None:
    began, ended = tmp_path / "began", tmp_path / "ended"
    instead(NOTES_ITS_END.format(mark=str(ended)) + f"open({str(began)!r}, 'w').close(); time.sleep(60)")
    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))

    def stop() -> None:
        until(began.exists)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with pytest.raises(SystemExit, match="3"):
            bundles.make_bundle(tmp_path / "bundle", "onnx", "a test")
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert ended.exists()


@pytest.mark.parametrize(
    ("drafter", "named"), [(None, []), ("moa", []), ("sssd", []), ("independent", ["independent"])]
)
def test_the_export_gets_the_drafter(monkeypatch, tmp_path, drafter, named):
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    monkeypatch.delenv("MOA_EDGE_BUNDLE", raising=False)
    commands = []

    def own_program(*words):
        commands.append(words)
        return [sys.executable, "-c", "import sys; sys.exit(3)" if drafter is None else ""]

    monkeypatch.setattr(bundles, "own_program", own_program)
    if drafter is None:
        with pytest.raises(Exception, match="model"):
            local.ensure_bundle()
    else:
        local.ensure_bundle(drafter)
    [command] = commands
    assert command[:2] == ("moa_export.build_program", str(tmp_path / "bundles" / (named[0] if named else "default")))
    assert [command[at + 1] for at, word in enumerate(command) if word == "--drafter"] == named


def test_help_loads_no_runtime():
    code = (
        "import sys; from moa_chat.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'numpy', 'onnxruntime', 'torch', 'transformers', 'granian', 'PySide6'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--offline-limit" in done.stdout, done.stderr
