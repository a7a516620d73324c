"""Training when the disk is full."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from moa_drafter.target import Target
from moa_drafter.training.decoding import TransformersDecoder
from moa_drafter.training.generation import generate_conversations
from moa_drafter.training.settings import GenerateSettings
from unit.drafter.test_training import run


@pytest.fixture(scope="module")
def tokens(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations that the tiny target wrote to prompts we give it."""
    folder = tmp_path_factory.mktemp("tokens")
    rng = random.Random(0)
    words = ["the", "small", "model", "proposes", "tokens", "and", "a", "large", "one", "verifies", "them"]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": " ".join(rng.choices(words, k=6))}) + "\n" for _ in range(48)))
    store = folder / "tokens.jsonl"
    settings = GenerateSettings(conversations=40, write_batch=16, answer_tokens=32, sampled_share=0.5)
    generate_conversations(TransformersDecoder(target), store, settings, prompts=prompts, report=lambda held: None)
    return store


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
    said = ran.stderr.splitlines()[-1]
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert "the run cannot be saved in" in said and "make room for it, and go on with --resume" in said
    assert not list((tmp_path / "full").glob(".*")) and state.read_bytes() == before
