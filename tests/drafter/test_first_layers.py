"""The target's first layers below the drafter's own: in training, in a checkpoint, and copies that are trained.

That drafting computes what training does is tested in test_tli.py, for all numbers of layers at once.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moa_drafter.architectures.registry import new_drafter
from moa_drafter.checkpoint import load_bound, load_checkpoint, save_checkpoint
from moa_drafter.cli import main
from moa_drafter.config_fields import ConfigError
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_drafter.target_features import Reads, TargetStates, target_states
from moa_drafter.training.batch import Batch, make_batch
from moa_drafter.training.data import Conversation
from moa_drafter.training.losses import forward_kl
from moa_drafter.training.masks import FutureLengths
from moa_drafter.training.target_layers import start_target_layers, with_target_layers
from tiny import tiny_with_layers

TOKENS = torch.randint(3, 512, (26,), generator=torch.Generator().manual_seed(3)).tolist()


class Known:
    """States of one conversation, as features hold them."""

    def __init__(self, target: Target, reads: Reads) -> None:
        self.states = target_states(target, TOKENS, reads)

    def __getitem__(self, index: int) -> TargetStates:
        return self.states


def batch_of(target: Target, drafter: MoADrafter) -> Batch:
    features = Known(target, drafter.reads)
    conversation = Conversation(tuple(TOKENS[:5]), tuple(TOKENS[5:]))
    return make_batch([conversation], features, [0], FutureLengths(1, 6), random.Random(0), torch.device("cpu"))


@torch.no_grad()
@pytest.mark.parametrize("first", [1, 3])
def test_the_first_layers_compute_what_the_target_does(tiny_drafter: Path, target: Target, first: int) -> None:
    """So training may read it, and drafts the same as when it runs them."""
    drafter = tiny_with_layers(tiny_drafter, target, 0, first)
    assert drafter.reads.inner_layers == (first - 1,) and drafter.row_reads.inner_layers == ()
    batch = batch_of(target, drafter)
    x = drafter.embed(batch.tokens)
    given, _ = drafter.run_below(x, drafter.angles(batch.positions), batch.self_mask)
    torch.testing.assert_close(
        given, x + drafter.below_proj(drafter.below_norm(batch.states.inner[:, 0])), rtol=1e-4, atol=1e-4
    )
    arguments = batch.tokens, batch.positions, batch.states.kv, batch.self_mask, batch.memory_mask, batch.queries
    torch.testing.assert_close(drafter.predict(batch), drafter(*arguments), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("last", [0, 1])
def test_training(target: Target, tmp_path: Path, last: int, trained: bool) -> None:
    """The loss falls; the layers below are the target's own still, or are trained and stored."""
    torch.manual_seed(0)
    drafter = new_drafter(
        "moa",
        target,
        draft_vocab_size=512,
        lsa_layers=2,
        target_layers=last,
        first_layers=2,
        trained_target_layers=trained,
    )
    assert isinstance(drafter, MoADrafter)
    drafter.bind_target(target.embedding, target.head, target.layers)
    batch = batch_of(target, drafter)
    drafter.initialise(target, [(batch.tokens, batch.states)])
    copies, originals = [*drafter.below, *drafter.tail], [*target.layers[:2], *target.layers[4 - last :]]

    def moved() -> bool:
        states = [
            (copy.state_dict() or dict(copy.named_buffers()), layer.state_dict())
            for copy, layer in zip(copies, originals, strict=True)
        ]
        return not all(torch.equal(ours[name], theirs[name]) for ours, theirs in states for name in theirs)

    assert len(copies) == 2 + last and not moved()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    drafter.train()
    losses = []
    for _ in range(15):
        loss = forward_kl(drafter.logits(drafter.predict(batch)), drafter.logits(batch.states.last[batch.queries]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert drafter.below_proj.weight.abs().max() > 0
    assert moved() == trained
    save_checkpoint(drafter, tmp_path, dtype=torch.float32)
    stored = [name for name in load_file(tmp_path / "model.safetensors") if name.startswith(("below.", "tail."))]
    assert len(stored) == (9 * len(copies) if trained else 0)
    again = load_bound(tmp_path, target)
    assert isinstance(again, MoADrafter) and again.config == drafter.config
    with torch.no_grad():
        torch.testing.assert_close(again.predict(batch), drafter.eval().predict(batch), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("trained", [False, True])
def test_a_trained_drafter_goes_on_as_it_was(tiny_drafter: Path, target: Target, trained: bool) -> None:
    plain = load_checkpoint(tiny_drafter)
    assert isinstance(plain, MoADrafter)
    deeper = with_target_layers(plain, 0, 2, trained=trained)
    for drafter in (plain, deeper):
        drafter.bind_target(target.embedding, target.head, target.layers)
    batch = batch_of(target, deeper)
    start_target_layers(deeper, plain.config, target.model, [])
    assert torch.equal(deeper.eval().predict(batch), plain.eval().predict(batch))
    assert len(deeper.below) == 2
    if trained:
        assert torch.equal(deeper.below[1].mlp.up_proj.weight, target.layers[1].mlp.up_proj.weight)


def test_moa_train_goes_on_with_layers_of_the_target(
    target: Target, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "tokens.jsonl"
    store.write_text(
        "".join(json.dumps({"p": TOKENS[n : n + 5], "r": TOKENS[n + 5 : n + 17]}) + "\n" for n in range(9))
    )
    command = ["--model", str(target.folder), "--data", str(store), "--steps", "2", "--features", "disk"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*command, "--init", str(tiny_drafter), "--first-layers", "1", "--out", str(first)]) == 0
    command += ["--init", str(first / "drafter"), "--train-target-layers"]
    assert main([*command, "--out", str(second)]) == 0
    config = load_checkpoint(second / "drafter").config
    assert config.first_layers == 1 and config.trained_target_layers
    capsys.readouterr()
    assert main([*command, "--first-layers", "2", "--out", str(tmp_path / "third")]) == 2
    assert "was trained with 1 first_layers: that cannot be changed" in capsys.readouterr().err


def test_trained_copies_keep_their_number(tiny_drafter: Path, target: Target) -> None:
    drafter = tiny_with_layers(tiny_drafter, target, 1, 1, trained=True)
    assert with_target_layers(drafter, 1, 1).config == drafter.config
    with pytest.raises(ConfigError, match="trained copies of the target's layers: their number cannot be changed"):
        with_target_layers(drafter, 2)
    with pytest.raises(ConfigError, match="not of eagle"):
        new_drafter("eagle", target, draft_vocab_size=64, first_layers=1)
    with pytest.raises(ConfigError, match=r"must lie in 0\.\.3"):
        dataclasses.replace(drafter.config, first_layers=-1)
