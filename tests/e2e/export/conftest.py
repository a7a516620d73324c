from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def onnx_export(tiny_target: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A bundle of the tiny drafter, made by the command in a process of its own, and what that printed."""
    out = tmp_path_factory.mktemp("made") / "deep" / "bundle"
    command = [sys.executable, "-m", "moa_export.cli", "--target", "onnx", "--json", "--out", str(out)]
    inputs = ["--model", str(tiny_target), "--drafter", str(tiny_drafter), "--offline-model", "none"]
    ran = subprocess.run([*command, *inputs], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert all(line.endswith(" s gone)") for line in ran.stderr.splitlines())  # how far it is, no noise of toolchains
    return out, ran.stdout
