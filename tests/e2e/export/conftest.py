from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from moa_export import pipeline
from moa_export.recordings import PROMPTS


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


@pytest.fixture
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have graphs compared on the answers to 4 questions, which are 24 otherwise."""
    few = functools.partial(pipeline.ExportSettings, questions=PROMPTS[:4])
    monkeypatch.setattr(pipeline, "ExportSettings", few)
