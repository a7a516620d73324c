"""The factor on a drafter's logits: found where it can be worked out, kept in the checkpoint, used to draft."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from moa_drafter.checkpoint import load_bound, load_checkpoint, save_checkpoint
from moa_drafter.config import CheckpointError
from moa_drafter.drafter import Drafter
from moa_drafter.target import Target
from moa_drafter.target_features import TargetStates
from moa_drafter.training.data import Conversation
from moa_drafter.training.evaluation import fitted_sharpness
from support.drafter.training_data import moa_train, small, write_store
from support.tiny import make_tiny_rival

CONVERSATIONS = 10


class Coin(Drafter):
    """Says of every token that it is 0 with odds of ``odds`` to 1, else 1; it cannot draft 2."""

    def __init__(self, odds: float) -> None:
        super().__init__(vocab_size=3, draft_vocab_size=2, hidden_size=1)
        self.embedding, self.head = torch.zeros(3, 1), torch.tensor([[math.log(odds)], [0.0]])

    def predict(self, batch):
        return torch.ones(len(batch.queries), 1)


class NoStates:
    def __getitem__(self, index: int) -> TargetStates:
        nothing = torch.zeros(22, 0, 0)
        return TargetStates(nothing, nothing, nothing.flatten(1))


@pytest.mark.parametrize(("odds", "factor"), [(2.0, 2.0), (4.0, 1.0), (16.0, 0.5), (1.01, 2.5)])
def test_the_factor_makes_the_odds_those_of_the_answers(odds: float, factor: float) -> None:
    """Four zeros for each one: odds of 4 to 1. The server gives the first token; those that cannot be drafted
    do not count."""
    answer = (1, *(0, 0, 0, 0, 1) * 2, *(2,) * 10)
    conversations = [Conversation((0,), answer)] * CONVERSATIONS
    assert fitted_sharpness(Coin(odds), conversations, NoStates(), range(CONVERSATIONS)) == factor


def test_a_finished_run_keeps_its_factor(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is in the checkpoint, and a run that goes on from there begins without it."""
    store = write_store(tmp_path / "store.jsonl", 20)
    flags = [*small(tiny_target, store, steps=4), "--learning-rate", "3e-3"]
    assert moa_train(tmp_path / "run", *flags, "--pause-after", 1e-9, "--json") == 0
    assert "sharpness" not in json.loads(capsys.readouterr().out)
    assert moa_train(tmp_path / "run", "--resume", "--json") == 0
    factor = json.loads(capsys.readouterr().out)["sharpness"]
    drafter = load_checkpoint(tmp_path / "run" / "drafter")
    assert drafter.config.sharpness == factor and 0.5 <= factor <= 2.5
    assert moa_train(tmp_path / "run", "--resume") == 0
    assert f"sharpness    {factor:.2f}" in capsys.readouterr().out
    assert moa_train(tmp_path / "more", *flags, "--init", tmp_path / "run" / "drafter", "--evaluate-every", 1) == 0
    log = [(tmp_path / run / "log.jsonl").read_text().splitlines() for run in ("run", "more")]
    assert json.loads(log[1][0])["loss"] < 1.5 * json.loads(log[0][-1])["loss"]


@pytest.mark.parametrize("architecture", ["moa", "eagle", "independent"])
def test_candidates_are_as_likely_as_the_factor_makes_them(
    tiny_target: Path, tiny_drafter: Path, target: Target, tmp_path: Path, architecture: str
) -> None:
    folder = tiny_drafter if architecture == "moa" else make_tiny_rival(architecture, tiny_target, tmp_path / "plain")
    drafter = load_checkpoint(folder)
    drafter.config = dataclasses.replace(drafter.config, sharpness=1.5)
    save_checkpoint(drafter, tmp_path / "sharp")
    plain, sharp = load_bound(folder, target), load_bound(tmp_path / "sharp", target)
    hidden = torch.randn(3, target.model.config.hidden_size)
    (tokens, before), (same, after) = plain.candidates(hidden, 5), sharp.candidates(hidden, 5)
    assert torch.equal(tokens, same) and not torch.allclose(before, after)
    expected = (1.5 * plain.logits(hidden)).log_softmax(-1).topk(5).values
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), "much"])
def test_a_factor_that_is_none_is_refused(tiny_drafter: Path, tmp_path: Path, value: object) -> None:
    drafter = load_checkpoint(tiny_drafter)
    save_checkpoint(drafter, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "sharpness": value}))
    with pytest.raises(CheckpointError, match="sharpness must be a positive number"):
        load_checkpoint(tmp_path)
