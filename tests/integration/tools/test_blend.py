"""``tools/blend.py``: the mean of several checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blend import main
from moa_drafter.checkpoint import load_checkpoint, save_checkpoint
from moa_drafter.config import CONFIG_FILE
from support.tiny import make_tiny_drafter, make_tiny_rival


@pytest.fixture(scope="module")
def sisters(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three drafters that differ in their weights and their sharpness."""
    folders = []
    for seed, sharpness in enumerate((1.0, 1.2, 1.4), 1):
        folder = make_tiny_drafter(tiny_target, tmp_path_factory.mktemp("sister"), seed=seed)
        drafter = load_checkpoint(folder)
        drafter.draft_to_target.copy_(torch.arange(len(drafter.draft_to_target)))
        drafter.config = replace(drafter.config, sharpness=sharpness)
        save_checkpoint(drafter, folder, dtype=torch.float32)
        folders.append(folder)
    return folders


def test_the_mean_of_weights_and_sharpness(sisters: list[Path], tmp_path: Path) -> None:
    assert main([*map(str, sisters), "--out", str(tmp_path / "mean")]) == 0
    mean, *parts = (load_checkpoint(folder) for folder in (tmp_path / "mean", *sisters))
    assert mean.config == replace(parts[0].config, sharpness=1.2)
    for (name, own), *others in zip(mean.named_parameters(), *(part.parameters() for part in parts), strict=True):
        expected = sum(others) / 3
        # A checkpoint is written in bfloat16.
        torch.testing.assert_close(own, expected, rtol=2**-8, atol=1e-6, msg=name)
    torch.testing.assert_close(mean.draft_to_target, parts[0].draft_to_target)


def test_what_cannot_be_blended(sisters: list[Path], tiny_target: Path, tmp_path: Path, capsys) -> None:
    def refusal(*folders: Path) -> str:
        assert main([*map(str, folders), "--out", str(tmp_path / "mean")]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1 and not (tmp_path / "mean").exists()
        return err

    first = sisters[0]
    assert "name at least two" in refusal(first)
    assert CONFIG_FILE in refusal(first, tmp_path / "nothing")
    rival = make_tiny_rival("independent", tiny_target, tmp_path / "rival")
    assert "another drafter or target" in refusal(first, rival)
    other = load_checkpoint(first)
    other.draft_to_target.add_(1)
    save_checkpoint(other, tmp_path / "other")
    assert "drafts other tokens" in refusal(first, tmp_path / "other")
