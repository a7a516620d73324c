"""``moa-train`` as a pipeline: configuration, accumulation, weight average, pauses, self-check."""

from __future__ import annotations

import json
import random

import pytest
import torch
import yaml
from safetensors.torch import load_file

from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.config import Reads
from moa_drafter.model import MoADrafter
from moa_drafter.training import distributed as processes
from moa_drafter.training.batch import FutureLengths, make_batch
from moa_drafter.training.data import Conversation
from moa_drafter.training.features import LiveFeatures
from moa_drafter.training.optimizers import WeightAverage, share_out
from moa_drafter.training.settings import RunSettings, TrainSettings
from moa_drafter.training.train import start_drafter
from moa_drafter.training.trainer import Trainer
from support.drafter.training_data import assert_close, moa_train, small, weights
from support.refusals import refused
from support.said import is_progress

WEIGHTS = "drafter/model.safetensors"
#: Fields of a result that name the run's folder.
ELSEWHERE = {"checkpoint": None, "next": None}


def test_flags_override_the_file_and_the_record_repeats_the_run(tiny_target, store, tmp_path, train):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {tiny_target}\ndata: [{store}]\nsteps: 50\nstep_tokens: 128\ndraft_vocab: 384\nlsa_layers: 2\n"
        "held_out: 3\nlearning_rate: 1e-3\nema_decay: 0.9\ndtype: float32\n"
    )
    first = train("one", "--config", config, "--steps", 4)
    record = yaml.safe_load((tmp_path / "one/drafter/training.yaml").read_text())
    assert record["settings"]["steps"] == 4 and record["settings"]["learning_rate"] == 1e-3
    assert record["settings"]["data"] == ["tokens.jsonl"], "no folders of this machine beside the weights"
    assert record["data"]["files"][0]["conversations"] == 40 and len(record["data"]["files"][0]["sha256"]) == 64
    assert record["target"]["fingerprint"] == load_checkpoint(tmp_path / "one/drafter").config.target_fingerprint
    again = train("two", "--config", tmp_path / "one/training.yaml")
    assert {**again, **ELSEWHERE} == {**first, **ELSEWHERE}
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == (tmp_path / "two" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("steps: [", "not_yaml"),
        ("[" * 100_000, "not_yaml"),
        ("- steps", "wrong_type"),
        ("stepz: 3", "unknown_key"),
        ("steps: many", "wrong_type"),
        (f"learning_rate: 1{400 * '0'}", "wrong_type"),
        ("compile: 3", "wrong_type"),
        ("mix: 3", "wrong_type"),
        ("learning_rate: -1", "out_of_range"),
        ("long_share: 1.5", "out_of_range"),
        ("features: tape", "out_of_range"),
        ("steps: 3\nminutes: 4", "options_conflict"),
        ("data: a.jsonl\nprompts: b.jsonl", "options_conflict"),
        ("step_tokens: 100\naccumulate: 3", "not_divisible"),
        ("arch: rnn", "unknown_arch"),
        ("loss: hope", "unknown_loss"),
        ("mix: {poems: 1}", "unknown_kind"),
        ("data: nowhere.jsonl", "file_missing"),
        ("prompts: nowhere.jsonl", "unreadable"),
        ("held_out: 40\ndata: STORE", "too_few"),
        ("longest: 10\ndata: STORE", "too_few"),
        ("target_layers: 4\ndata: STORE", "out_of_range"),
        ("arch: eagle3\ntarget_layers: 1\ndata: STORE", "wrong_architecture"),
        ("init: nowhere\ndata: STORE", "unknown_drafter"),
    ],
)
def test_bad_settings_are_refused(tiny_target, store, tmp_path, train, monkeypatch, text, code):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(text.replace("STORE", str(store)) + "\n")
    *before, _ = train("run", "--config", config, "--model", tiny_target, "--dtype", "float32", code=code)
    assert all(is_progress(line) for line in before)


def test_micro_batches_add_up_to_one_large_step(flags, tmp_path, train):
    # All conversations have 32 tokens, so 4 of them are one step or 4 micro-batches; in the curriculum's first
    # stage nothing is drawn.
    flags = [*flags, "--steps", 200, "--pause-after", 1e-9]
    assert train("whole", *flags)["step"] == train("cut", *flags, "--accumulate", 4)["step"] == 1
    assert_close(weights(tmp_path / "whole"), weights(tmp_path / "cut"), 2e-6)


def test_the_average_of_the_weights_is_saved(flags, tmp_path, train):
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(0.0)
    average = WeightAverage(model, 0.5)
    model.weight.data.fill_(1.0)
    average.update(1)  # decay (1 + 1) / (10 + 1)
    with average.applied():
        torch.testing.assert_close(model.weight.data, torch.full((1, 2), 9 / 11))
    assert model.weight.data.tolist() == [[1.0, 1.0]]

    train("run", *flags, "--ema-decay", 0.9)
    state = torch.load(tmp_path / "run/training.pt", weights_only=True)
    saved = load_file(tmp_path / "run" / WEIGHTS)
    names = [name for name, _ in load_checkpoint(tmp_path / "run/drafter").named_parameters()]
    for name, kept in zip(names, state["average"], strict=True):
        assert torch.equal(saved[name], kept.to(torch.bfloat16))
    assert not torch.equal(saved["Ekv2E.weight"], state["drafter"]["Ekv2E.weight"].to(torch.bfloat16))


def test_a_paused_run_continues_exactly_with_its_own_settings(flags, tmp_path, train):
    flags = [*flags, "--ema-decay", "0.9", "--accumulate", "2"]
    whole = train("whole", *flags)
    result, parts = train("cut", *flags, "--pause-after", 1e-9), 1
    while not result["finished"]:
        result, parts = train("cut", "--resume", "--pause-after", 1e-9), parts + 1
    assert parts == 6 and {**result, **ELSEWHERE} == {**whole, **ELSEWHERE}
    assert (tmp_path / "cut" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()
    one, other = (torch.load(tmp_path / run / "training.pt", weights_only=True) for run in ("cut", "whole"))
    assert all(torch.equal(a, b) for a, b in zip(one["average"], other["average"], strict=True))


@pytest.mark.slow
def test_minutes_without_data_are_for_writing_too(tiny_target, tmp_path, train):
    sizes = ["--step-tokens", 128, "--draft-vocab", 384, "--lsa-layers", 2, "--write-batch", 32, "--answer-tokens", 16]
    flags = ["--model", tiny_target, "--minutes", 0.05, "--dtype", "float32", *sizes, "--prompt-tokens", 12]
    result = train("run", *flags)
    assert result["finished"] and result["step"] == result["steps"] >= 10
    written = (tmp_path / "run/conversations.jsonl").read_bytes().count(b"\n")
    settings = yaml.safe_load((tmp_path / "run/training.yaml").read_text())["settings"]
    assert settings["conversations"] == written < 2000 and settings["write_batch"] == 8
    assert train("run", "--resume")["tau"] == result["tau"], "nothing more is written or trained"


def test_a_flag_against_the_run_is_refused(flags, train):
    train("run", "--resume", code="nothing_to_resume")
    train("run", *flags, "--pause-after", 1e-9)
    train("run", "--resume", "--learning-rate", 0.1, code="settings_differ")
    train("run", *flags, code="run_exists")
    train("run", "--resume", "--learning-rate", 5e-4)


@pytest.mark.parametrize("arch", ["eagle3", "early-exit", "independent"])
def test_every_architecture_is_trained_by_the_same_loop(target, store, tmp_path, train, arch):
    flags = [*small(target.folder, store, steps=25), "--learning-rate", "3e-3", "--future-high", "4"]
    train("run", *flags, "--long-share", 0, "--arch", arch, "--evaluate-every", 5)
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    assert load_checkpoint(tmp_path / "run/drafter").config.architecture == arch
    with refused("wrong_architecture"):
        start_drafter(target, [], RunSettings(init=tmp_path / "run/drafter"))


def test_work_is_shared_out_evenly(tmp_path, monkeypatch):
    assert share_out([1, 4, 3], 2) == [1, 0, 1]
    costs = [7, 6, 5, 4, 3, 2, 1]
    owned = list(zip(costs, share_out(costs, 3), strict=True))
    loads = [sum(cost for cost, owner in owned if owner == worker) for worker in range(3)]
    assert max(loads) - min(loads) <= 1
    monkeypatch.setattr(processes, "count", lambda: 2)
    with refused("not_divisible"):
        Trainer(MoADrafter.__new__(MoADrafter), [], [], TrainSettings(steps=1, accumulate=3), tmp_path, [])


def test_the_self_check_passes_and_measures_parts(flags, tmp_path, train):
    result = train("run", *flags, "--self-check")
    assert result["loss_after"] < result["loss_before"] and result["tokens_per_second"] > 0
    parts = {"target forward", "layer self-attention", "drafter forward", "backward", "optimiser", "data"}
    assert set(result["shares"]) == parts and sum(result["shares"].values()) == pytest.approx(1)
    assert not (tmp_path / "run").exists()


def test_the_self_check_writes_its_own_text_without_data(flags, tiny_target, tmp_path, train, prompts):
    assert train("run", *flags[:2], *flags[4:], "--prompts", prompts, "--held-out", 40, "--self-check")["steps"] == 10
    train("run", *small(tiny_target, tmp_path / "gone.jsonl"), "--self-check", code="file_missing")


def test_a_self_check_that_fails_exits_1(flags, tmp_path, capsys):
    # Steps of a million times the usual size destroy the weights.
    assert moa_train(tmp_path / "run", *flags, "--self-check", "--learning-rate", "500", "--json") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["failed"] in printed.err


def test_every_answer_of_a_conversation_is_learnt(target):
    # The docstring's example; the server knows the rows of everything before an answer.
    conversation = Conversation(tuple(range(5, 8)), tuple(range(10, 19)), ((4, 6),))
    assert conversation.answers == [(3, 7), (9, 12)] and conversation.learnt == 5
    features = LiveFeatures(target, [conversation], Reads(kv_layers=(0,)))
    batch = make_batch([conversation], features, [0], FutureLengths(6, 6), random.Random(0), torch.device("cpu"))
    assert batch.queries.tolist() == [3, 4, 5, 9, 10]
    assert batch.depths.tolist() == [1, 2, 3, 1, 2]
    assert batch.memory_mask[5].int().tolist() == [1] * 3 + [0] * 9
    assert batch.memory_mask[10].int().tolist() == [1] * 9 + [0] * 3
