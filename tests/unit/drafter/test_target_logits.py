"""The target's own logits, scaled and capped as its family does it, in training and in copies."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from moa_drafter.config import ConfigError, FitError, longest_context, unknown_fields
from moa_drafter.drafter import Drafter
from moa_drafter.target import Target, load_target
from moa_drafter.target_features import Reads, target_states
from moa_drafter.training.data import Conversation
from moa_drafter.training.evaluation import evaluate
from moa_drafter.training.features import LiveFeatures
from moa_drafter.training.losses import forward_kl
from moa_drafter.training.settings import TrainSettings
from moa_drafter.training.trainer import Trainer
from moa_export.offline_model import WriterSettings, make_writer, whole_model
from moa_export.progress import Progress
from support.families import config_of, make_target
from support.refusals import refused

SCALED = ["Granite (scaled logits alone)", "Cohere (scaled logits)"]
CAPPED = ["Gemma 2 (both soft caps)", "Gemma 3n (soft cap)"]
TEXT = torch.randint(3, 500, (20,), generator=torch.Generator().manual_seed(2)).tolist()
TOKENS = [*range(9, 200), *range(300, 400)]


class Oracle(Drafter):
    """Knows the target's last hidden states."""

    def __init__(self, target: Target) -> None:
        super().__init__(512, len(TOKENS), target.config.hidden_size)
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.draft_to_target.copy_(torch.tensor(TOKENS))
        self.bind_target(target.embedding, target.head, target.layers, target.logits)

    def predict(self, batch):
        self.queries = batch.queries
        return batch.states.last[batch.queries] + self.unused


def target_of(family: str, tiny_target: Path, folder: Path) -> Target:
    return load_target(str(make_target(family, tiny_target, folder)))


@torch.no_grad()
def own_logits(target: Target) -> torch.Tensor:
    return target.model(input_ids=torch.tensor([TEXT])).logits[0][:, TOKENS]


@pytest.mark.parametrize("family", ["Llama", *SCALED, *CAPPED])
def test_logits_of_the_draft_vocabulary_are_the_targets(family: str, tiny_target: Path, tmp_path: Path) -> None:
    target = target_of(family, tiny_target, tmp_path)
    drafter, hidden = Oracle(target), target_states(target, TEXT, Reads()).last
    torch.testing.assert_close(drafter.target_logits(hidden), own_logits(target), rtol=1e-4, atol=1e-5)
    if family not in CAPPED:  # a drafter has no cap, but the scale
        torch.testing.assert_close(drafter.logits(hidden), own_logits(target), rtol=1e-3, atol=1e-5)
    assert (target.head.data_ptr() == target.model.lm_head.weight.data_ptr()) == (family not in SCALED)


def test_a_bias_of_the_head_is_in_the_logits(tiny_target: Path) -> None:
    target = load_target(str(tiny_target))
    target.model.lm_head.bias = torch.nn.Parameter(torch.randn(512))
    hidden = target_states(target, TEXT, Reads()).last
    torch.testing.assert_close(Oracle(target).target_logits(hidden), own_logits(target), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", CAPPED)
def test_losses_are_those_of_the_targets_distribution(family: str, tiny_target: Path, tmp_path: Path) -> None:
    """In training and in evaluation."""
    target = target_of(family, tiny_target, tmp_path)
    drafter, conversations = Oracle(target), [Conversation(tuple(TEXT[:5]), tuple(TEXT[5:]))]
    features = LiveFeatures(target, conversations, Reads())

    def expected() -> float:
        hidden = target_states(target, TEXT, Reads()).last
        return float(forward_kl(drafter.logits(hidden)[drafter.queries], own_logits(target)[drafter.queries]))

    trainer = Trainer(drafter, conversations, features, TrainSettings(steps=1, loss="kl"), tmp_path, [])
    assert trainer.loss([[0]]) == pytest.approx(expected(), rel=1e-3) and expected() > 0.1
    assert evaluate(drafter, conversations, features, [0])["loss"] == pytest.approx(expected(), rel=1e-3)


@pytest.mark.parametrize("family", [*SCALED, *CAPPED, "Ministral 3 (scaled queries)"])
def test_a_target_that_we_do_not_compute_has_no_offline_model(family: str, tiny_target: Path, tmp_path: Path) -> None:
    target = target_of(family, tiny_target, tmp_path)
    arguments = (target, [], tmp_path, Progress(io.StringIO(), quiet=True))
    made, note = make_writer(WriterSettings(), *arguments)
    assert not made and note
    for attempt in (lambda: whole_model(target), lambda: make_writer(WriterSettings("target"), *arguments)):
        with refused("unsupported_target", ConfigError):
            attempt()


def test_a_copy_with_other_logits_is_refused(tiny_target: Path) -> None:
    """Whatever the reason: no field of the configuration tells it here."""
    target = load_target(str(tiny_target))
    target.model.lm_head.bias = torch.nn.Parameter(torch.randn(512))
    with pytest.raises(FitError):
        whole_model(target)


def test_the_fields_of_a_configuration_are_known_or_named() -> None:
    def unknown(family: str) -> list[str]:
        return unknown_fields(config_of(family))

    assert unknown("Llama (yarn)") == unknown("Qwen 2") == unknown("Mistral (window)") == []
    assert unknown("Ministral 3 (scaled queries)") == ["rope_parameters.llama_4_scaling_beta"]
    names = ["attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"]
    assert unknown("Granite (scaled logits alone)") == names
    assert "layer_types: sliding_attention" in unknown("Gemma 3")


def test_the_longest_context_is_the_shortest_limit(tiny_target: Path, tmp_path: Path) -> None:
    folder = make_target("Mistral (window)", tiny_target, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for window, longest in ((7, 7), (None, 40), (50, 40)):
        (folder / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
        assert longest_context(load_target(str(folder)).config)[0] == longest
