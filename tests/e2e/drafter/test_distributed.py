"""Training in several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integration.drafter.test_pipeline import assert_close, weights
from support.drafter.training_data import moa_train, small, write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store") / "tokens.jsonl", 40)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_several_processes_train_as_one(tiny_target: Path, store: Path, tmp_path: Path, optimizer: str) -> None:
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
    """Everything an optimiser remembers of its parameters."""
    return [tensor for _, remembered in sorted(state.items()) for tensor in remembered.values()]
