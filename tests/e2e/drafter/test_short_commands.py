"""A run as a sequence of short commands from a plain checkout, as ``docs/training.md`` gives it, at tiny size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moa_drafter.checkpoint import load_bound
from moa_drafter.target import load_target

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_run_of_short_commands(tiny_target: Path, tmp_path: Path) -> None:
    """Write, pause, write on, check, train, pause, train on."""

    def moa_train(*arguments: object) -> dict[str, object]:
        command = [sys.executable, "-m", "moa_drafter.cli", "--out", "run", "--json", *map(str, arguments)]
        paths = os.pathsep.join(str(ROOT / room) for room in ("export", "runtime"))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr[-2000:]
        return json.loads(ran.stdout)

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the river {n}"}) + "\n" for n in range(24)))
    config = tmp_path / "gpu.yaml"
    config.write_text(
        f"model: {tiny_target}\nprompts: prompts.jsonl\nconversations: 16\nwrite_batch: 8\nanswer_tokens: 16\n"
        "steps: 6\nstep_tokens: 160\naccumulate: 2\nema_decay: 0.9\ndraft_vocab: 384\nlsa_layers: 2\nheld_out: 3\n"
        "warmup_steps: 2\ndtype: float32\nfeatures: live\nwriter: transformers\n"
    )
    assert moa_train("--config", "gpu.yaml", "--write-only", "--pause-after", 1e-9)["finished"] is False
    assert moa_train("--resume", "--write-only")["conversations"] == 16
    assert "failed" not in moa_train("--config", "gpu.yaml", "--self-check")
    paused = moa_train("--resume", "--pause-after", 1e-9)
    assert (paused["finished"], paused["step"]) == (False, 1)
    done = moa_train("--resume")
    assert (done["finished"], done["step"]) == (True, 6)
    load_bound(tmp_path / "run/drafter", load_target(str(tiny_target)))
