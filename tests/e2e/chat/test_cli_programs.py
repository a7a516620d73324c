"""Programs that ``moa-chat`` starts: a verifier, an export."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from moa_chat import local_verifier as local
from moa_runtime import bundle
from moa_runtime.errors import MoaError


def _program(monkeypatch, script: str) -> None:
    for module in (local, bundle):
        monkeypatch.setattr(module, "own_program", lambda *_: [sys.executable, "-c", script])


def test_a_local_verifier_is_stopped_at_the_end(monkeypatch, tmp_path):
    mark = tmp_path / "stopped"
    _program(
        monkeypatch,
        "import json, os, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(mark)!r}, 'w').close(), sys.exit(0)))\n"
        "print('loading', flush=True)\n"
        "print(json.dumps({'event': 'ready', 'url': 'ws://127.0.0.1:1/' + os.environ['MOA_TOKEN']}), flush=True)\n"
        "time.sleep(60)",
    )
    with local.local_verifier() as verifier:
        endpoint = verifier.endpoint
        assert endpoint.url == f"ws://127.0.0.1:1/{endpoint.token}" and len(endpoint.token) > 20
        assert not mark.exists()
    assert mark.exists()


def test_a_local_verifier_that_fails_says_why(monkeypatch):
    _program(monkeypatch, "import sys; sys.exit('moa-serve: error: no memory')")
    with pytest.raises(MoaError, match="did not start: moa-serve: error: no memory"), local.local_verifier():
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_export_is_told_to_end_and_waited_for(monkeypatch, tmp_path):
    began, ended = tmp_path / "began", tmp_path / "ended"
    _program(
        monkeypatch,
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(ended)!r}, 'w').close(), sys.exit(1)))\n"
        f"open({str(began)!r}, 'w').close()\n"
        "time.sleep(60)",
    )
    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))

    def stop() -> None:
        while not began.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with pytest.raises(SystemExit, match="3"):
            bundle.make_bundle(tmp_path / "bundle", "onnx", "a test", "no time")
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert ended.exists()


def test_an_export_that_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(tmp_path / "none"))
    _program(monkeypatch, "import sys; sys.exit(3)")
    with pytest.raises(MoaError, match="could not be exported"):
        local.ensure_bundle()


@pytest.mark.parametrize(
    ("drafter", "named"), [(None, []), ("moa", []), ("sssd", []), ("independent", ["independent"])]
)
def test_the_export_is_told_which_drafter(monkeypatch, tmp_path, drafter, named):
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    monkeypatch.delenv("MOA_EDGE_BUNDLE", raising=False)
    commands = []

    def own_program(*words):
        commands.append(words)
        return [sys.executable, "-c", ""]

    monkeypatch.setattr(bundle, "own_program", own_program)
    local.ensure_bundle(drafter)
    [command] = commands
    assert command[command.index("--out") + 1] == str(tmp_path / "bundles" / (named[0] if named else "default"))
    assert [command[at + 1] for at, word in enumerate(command) if word == "--drafter"] == named


def test_help_needs_no_runtime():
    code = (
        "import sys; from moa_chat.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'numpy', 'onnxruntime', 'torch', 'transformers', 'uvicorn', 'PySide6'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--offline-limit" in done.stdout
