"""Training when the disk is full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moa_drafter.target import Target
from support.drafter.training_data import write_tokens
from unit.drafter.test_training import run


@pytest.fixture(scope="module")
def tokens(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations that the tiny target wrote to prompts we give it."""
    return write_tokens(target, tmp_path_factory.mktemp("tokens"))


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_a_disk_without_room_is_said_and_keeps_what_was_saved(target: Target, tokens: Path, tmp_path: Path) -> None:
    run(target, tokens, tmp_path / "run", 2)
    state = tmp_path / "run" / "training.pt"
    before = state.read_bytes()
    code = (
        "import resource, signal, sys; from moa_drafter.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (200_000,) * 2)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    options = ["--model", target.folder, "--data", tokens, "--out", tmp_path / "full", "--draft-vocab", 384]
    options += ["--steps", 2, "--step-tokens", 160, "--features", "live", "--dtype", "float32"]
    ran = subprocess.run([sys.executable, "-c", code, *map(str, options)], capture_output=True, text=True)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr and "[not_writable]" in ran.stderr.splitlines()[-1]
    assert not list((tmp_path / "full").glob(".*")) and state.read_bytes() == before
