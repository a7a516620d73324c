"""``moa-train`` in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moa_drafter.checkpoint import load_bound
from moa_drafter.target import load_target
from support.drafter.training_data import assert_close, moa_train, small, weights


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_several_processes_train_as_one(tiny_target, store, tmp_path, optimizer):
    flags = [*small(tiny_target, store, steps=3), "--accumulate", "2", "--evaluate-every", "1000"]
    flags += ["--optimizer", optimizer, "--save-every", "2"]
    assert moa_train(tmp_path / "one", *flags) == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*launcher, "moa_drafter.cli", "--out", str(tmp_path / "two"), *flags, "--device", "cpu", "--json"]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout)["finished"] is True, "one process reports"
    assert_close(weights(tmp_path / "one"), weights(tmp_path / "two"), 2e-5)
    states = [torch.load(tmp_path / run / "training.pt") for run in ("one", "two")]
    moments = [[m for part in state["optimizers"] for m in tensors_of(part["state"])] for state in states]
    assert len(moments[0]) == len(moments[1]) and all(m.any() for m in moments[1])
    for ours, theirs in zip(*moments, strict=True):
        assert_close({"": ours}, {"": theirs}, 2e-5)


def tensors_of(state: dict[int, dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the state of an optimiser for all parameters."""
    return [tensor for _, remembered in sorted(state.items()) for tensor in remembered.values()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_a_full_disk_keeps_the_last_state(flags, tmp_path):
    run = tmp_path / "run"
    assert moa_train(run, *flags, "--pause-after", 1e-9) == 0
    before = (run / "training.pt").read_bytes()
    code = (
        "import resource, signal, sys; from moa_drafter.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (200_000,) * 2)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    ran = subprocess.run([sys.executable, "-c", code, "--out", run, "--resume"], capture_output=True, text=True)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr and "[not_writable]" in ran.stderr.splitlines()[-1]
    assert not list(run.glob(".*")) and (run / "training.pt").read_bytes() == before


ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_run_of_short_commands(tiny_target, tmp_path):
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
    assert (done["finished"], done["step"]) == (True, 6) and "next" not in paused
    assert [command.split()[0] for command in done["next"]] == ["moa-export", "moa-serve", "moa-chat"]
    assert all("run/bundle" in done["next"][at] for at in (0, 2)) and f"--model {tiny_target}" in done["next"][1]
    load_bound(tmp_path / "run/drafter", load_target(str(tiny_target)))


def test_names_need_no_torch():
    code = "import sys, moa_drafter.pretrained; assert not {'numpy', 'torch', 'safetensors'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
