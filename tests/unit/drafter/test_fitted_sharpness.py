"""The factor on a drafter's logits, fitted to the target's answers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.drafter import Drafter
from moa_drafter.target_features import TargetStates
from moa_drafter.training.data import Conversation
from moa_drafter.training.evaluation import fitted_sharpness
from support.drafter.training_data import moa_train, small, write_store

CONVERSATIONS = 10


class Coin(Drafter):
    """Drafts token 0 with odds of ``odds`` to 1, else 1; it cannot draft 2."""

    def __init__(self, odds: float) -> None:
        super().__init__(vocab_size=3, draft_vocab_size=2, hidden_size=1)
        self.embedding, self.head = torch.zeros(3, 1), torch.tensor([[math.log(odds)], [0.0]])

    def predict(self, batch):
        return torch.ones(len(batch.queries), 1)


@pytest.mark.parametrize(("odds", "factor"), [(2.0, 2.0), (4.0, 1.0), (16.0, 0.5), (1.01, 2.5)])
def test_the_factor_makes_the_odds_those_of_the_answers(odds: float, factor: float) -> None:
    """Four zeros for each one; the server gives the first token, and tokens that cannot be drafted do not count."""
    answer, nothing = (1, *(0, 0, 0, 0, 1) * 2, *(2,) * 10), torch.zeros(22, 0, 0)
    conversations = [Conversation((0,), answer)] * CONVERSATIONS
    states = [TargetStates(nothing, nothing, nothing.flatten(1))] * CONVERSATIONS
    assert fitted_sharpness(Coin(odds), conversations, states, range(CONVERSATIONS)) == factor


def test_a_finished_run_keeps_its_factor(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is in the checkpoint, and a run that continues from there begins without it."""
    store = write_store(tmp_path / "store.jsonl", 20)
    flags = [*small(tiny_target, store, steps=4), "--learning-rate", "3e-3"]
    assert moa_train(tmp_path / "run", *flags, "--pause-after", 1e-9, "--json") == 0
    assert "sharpness" not in json.loads(capsys.readouterr().out)
    assert moa_train(tmp_path / "run", "--resume", "--json") == 0
    factor = json.loads(capsys.readouterr().out)["sharpness"]
    assert load_checkpoint(tmp_path / "run" / "drafter").config.sharpness == factor and 0.5 <= factor <= 2.5
    assert moa_train(tmp_path / "run", "--resume") == 0
    assert ["sharpness", f"{factor:.4g}"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert moa_train(tmp_path / "more", *flags, "--init", tmp_path / "run" / "drafter", "--evaluate-every", 1) == 0
    log = [(tmp_path / run / "log.jsonl").read_text().splitlines() for run in ("run", "more")]
    assert json.loads(log[1][0])["loss"] < 1.5 * json.loads(log[0][-1])["loss"]
