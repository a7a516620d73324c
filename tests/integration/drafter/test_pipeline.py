"""``moa-train`` as a pipeline: configuration, accumulation, weight average, pauses, self-check."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_drafter.target_features import Reads
from moa_drafter.training import distributed as processes
from moa_drafter.training.batch import FutureLengths, make_batch
from moa_drafter.training.data import Conversation
from moa_drafter.training.features import LiveFeatures
from moa_drafter.training.optimizers import WeightAverage, share_out
from moa_drafter.training.settings import RunSettings, TrainSettings
from moa_drafter.training.train import start_drafter
from moa_drafter.training.trainer import Trainer
from support.drafter.training_data import moa_train, small, write_store
from support.refusals import refused
from support.said import is_progress

WEIGHTS = "drafter/model.safetensors"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store") / "tokens.jsonl", 40)


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The trained weights themselves, in float32."""
    return torch.load(out / "training.pt", weights_only=True)["drafter"]


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=tolerance, msg=lambda text, name=name: name + text)


# -- configuration ---------------------------------------------------------------------------------


def test_flags_go_before_the_file_and_the_record_repeats_the_run(
    tiny_target: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {tiny_target}\ndata: [{store}]\nsteps: 50\nstep_tokens: 128\ndraft_vocab: 384\nlsa_layers: 2\n"
        "held_out: 3\nlearning_rate: 1e-3\nema_decay: 0.9\ndtype: float32\n"
    )
    assert moa_train(tmp_path / "one", "--config", config, "--steps", 4, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    record = yaml.safe_load((tmp_path / "one/drafter/training.yaml").read_text())
    assert record["settings"]["steps"] == 4 and record["settings"]["learning_rate"] == 1e-3
    assert record["settings"]["data"] == ["tokens.jsonl"], "no folders of this machine beside the weights"
    assert record["data"]["files"][0]["conversations"] == 40 and len(record["data"]["files"][0]["sha256"]) == 64
    assert record["target"]["fingerprint"] == load_checkpoint(tmp_path / "one/drafter").config.target_fingerprint

    assert moa_train(tmp_path / "two", "--config", tmp_path / "one/training.yaml", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert {**again, "checkpoint": None} == {**first, "checkpoint": None}
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == (tmp_path / "two" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("steps: [", "not_yaml"),
        ("- steps", "wrong_type"),
        ("stepz: 3", "unknown_key"),
        ("steps: many", "wrong_type"),
        ("steps: 2.5", "wrong_type"),
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
        ("arch: eagle\ntarget_layers: 1\ndata: STORE", "wrong_architecture"),
        ("init: nowhere\ndata: STORE", "unknown_drafter"),
    ],
)
def test_bad_settings_are_refused(
    tiny_target: Path,
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch,
    text: str,
    code: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(text.replace("STORE", str(store)) + "\n")
    assert moa_train(tmp_path / "run", "--config", config, "--model", tiny_target, "--dtype", "float32") == 2
    printed = capsys.readouterr()
    *before, last = printed.err.splitlines()
    assert f"[{code}]" in last and all(is_progress(line) for line in before) and printed.out == ""


def test_a_dry_run_counts_and_writes_nothing(
    tiny_target: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert moa_train(tmp_path / "run", *small(tiny_target, store), "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["data"]["trained_on"] == 37 and plan["data"]["answer_tokens"] == 37 * 23
    assert plan["settings"]["steps"] == 6 and plan["parameters"] > 10_000
    assert not (tmp_path / "run").exists()


# -- the loop --------------------------------------------------------------------------------------


def test_micro_batches_add_up_to_one_large_step(tiny_target: Path, store: Path, tmp_path: Path) -> None:
    # All conversations have 32 tokens, so 4 of them are one step or 4 micro-batches; in the curriculum's first
    # stage nothing is drawn.
    flags = [*small(tiny_target, store, steps=200), "--save-every", "3", "--pause-after"]
    assert moa_train(tmp_path / "whole", *flags, 1e-9) == 0
    assert moa_train(tmp_path / "cut", *flags, 1e-9, "--accumulate", 4) == 0
    for out in (tmp_path / "whole", tmp_path / "cut"):
        assert torch.load(out / "training.pt", weights_only=True)["step"] == 1
    assert_close(weights(tmp_path / "whole"), weights(tmp_path / "cut"), 2e-6)


def test_the_average_of_the_weights_is_saved(tiny_target: Path, store: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(0.0)
    average = WeightAverage(model, 0.5)
    model.weight.data.fill_(1.0)
    average.update(1)  # decay (1 + 1) / (10 + 1)
    with average.applied():
        torch.testing.assert_close(model.weight.data, torch.full((1, 2), 9 / 11))
    assert model.weight.data.tolist() == [[1.0, 1.0]]

    assert moa_train(tmp_path / "run", *small(tiny_target, store), "--ema-decay", 0.9) == 0
    state = torch.load(tmp_path / "run/training.pt", weights_only=True)
    saved = load_file(tmp_path / "run" / WEIGHTS)
    names = [name for name, _ in load_checkpoint(tmp_path / "run/drafter").named_parameters()]
    for name, kept in zip(names, state["average"], strict=True):
        assert torch.equal(saved[name], kept.to(torch.bfloat16))
    assert not torch.equal(saved["Ekv2E.weight"], state["drafter"]["Ekv2E.weight"].to(torch.bfloat16))


def test_a_paused_run_continues_exactly_with_its_own_settings(
    tiny_target: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*small(tiny_target, store), "--ema-decay", "0.9", "--accumulate", "2"]
    assert moa_train(tmp_path / "whole", *flags, "--json") == 0
    whole = json.loads(capsys.readouterr().out)
    cut = tmp_path / "cut"
    assert moa_train(cut, *flags, "--pause-after", 1e-9, "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["finished"] is False and "--resume" in printed.err
    parts = 1
    while not (result := json.loads(printed.out))["finished"]:
        assert moa_train(cut, "--resume", "--pause-after", 1e-9, "--json") == 0
        printed, parts = capsys.readouterr(), parts + 1
    assert parts == 6 and {**result, "checkpoint": None} == {**whole, "checkpoint": None}
    assert (cut / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()
    one, other = (torch.load(out / "training.pt", weights_only=True) for out in (cut, tmp_path / "whole"))
    assert all(torch.equal(a, b) for a, b in zip(one["average"], other["average"], strict=True))


def test_minutes_become_steps_that_a_resumed_run_keeps(
    tiny_target: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("minutes: 0.001\n")
    flags = [*small(tiny_target, store)[:4], *small(tiny_target, store)[6:]]
    assert moa_train(tmp_path / "run", "--config", config, *flags, "--pause-after", 1e-9, "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 10, "fewer would not be worth a probe"
    assert moa_train(tmp_path / "run", "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 10


def test_minutes_without_data_are_for_writing_too(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--step-tokens", 128, "--draft-vocab", 384, "--lsa-layers", 2, "--write-batch", 32, "--answer-tokens", 16]
    flags = ["--model", tiny_target, "--minutes", 0.05, "--dtype", "float32", *sizes, "--prompt-tokens", 12, "--json"]
    assert moa_train(tmp_path / "run", *flags) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["finished"] and result["step"] == result["steps"] >= 10
    written = (tmp_path / "run/conversations.jsonl").read_bytes().count(b"\n")
    settings = yaml.safe_load((tmp_path / "run/training.yaml").read_text())["settings"]
    assert settings["conversations"] == written < 2000
    assert moa_train(tmp_path / "run", "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tau"] == result["tau"], "nothing more is written or trained"


def test_a_flag_against_the_run_is_refused(
    tiny_target: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flags = tmp_path / "run", small(tiny_target, store)
    for arguments, code in (
        (["--resume"], "nothing_to_resume"),
        ([*flags, "--pause-after", 1e-9], None),
        (["--resume", "--learning-rate", 0.1], "settings_differ"),
        (flags, "run_exists"),
        (["--resume", "--learning-rate", 5e-4], None),
    ):
        assert moa_train(out, *arguments) == (2 if code else 0)
        assert not code or f"[{code}]" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["eagle", "early-exit", "independent"])
def test_every_architecture_is_trained_by_the_same_loop(target: Target, store: Path, tmp_path: Path, arch: str) -> None:
    flags = [*small(target.folder, store, steps=25), "--learning-rate", "3e-3", "--future-high", "4"]
    assert moa_train(tmp_path / "run", *flags, "--long-share", 0, "--arch", arch, "--evaluate-every", 5) == 0
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    assert load_checkpoint(tmp_path / "run/drafter").config.architecture == arch
    with refused("wrong_architecture"):
        start_drafter(target, [], RunSettings(init=tmp_path / "run/drafter"))


def test_work_is_shared_out_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_out([1, 4, 3], 2) == [1, 0, 1]
    costs = [7, 6, 5, 4, 3, 2, 1]
    owned = list(zip(costs, share_out(costs, 3), strict=True))
    loads = [sum(cost for cost, owner in owned if owner == worker) for worker in range(3)]
    assert max(loads) - min(loads) <= 1
    monkeypatch.setattr(processes, "count", lambda: 2)
    with refused("not_divisible"):
        Trainer(MoADrafter.__new__(MoADrafter), [], [], TrainSettings(steps=1, accumulate=3), tmp_path, [])


def test_the_self_check_passes_and_measures_parts(
    tiny_target: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert moa_train(tmp_path / "run", *small(tiny_target, store), "--self-check", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["loss_after"] < result["loss_before"] and result["tokens_per_second"] > 0
    parts = {"target forward", "layer self-attention", "drafter forward", "backward", "optimiser", "data"}
    assert set(result["shares"]) == parts and sum(result["shares"].values()) == pytest.approx(1)
    assert not (tmp_path / "run").exists()


def test_the_self_check_writes_its_own_text_without_data(
    tiny_target: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the river {n}"}) + "\n" for n in range(30)))
    flags = [*small(tiny_target, store)[:2], *small(tiny_target, store)[4:], "--prompts", prompts]
    assert moa_train(tmp_path / "run", *flags, "--held-out", 40, "--self-check", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 10
    assert moa_train(tmp_path / "run", *small(tiny_target, tmp_path / "gone.jsonl"), "--self-check") == 2
    assert "[file_missing]" in capsys.readouterr().err


def test_a_self_check_that_fails_exits_1(
    tiny_target: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Steps of a million times the usual size destroy the weights.
    flags = [*small(tiny_target, store), "--self-check", "--learning-rate", "500", "--json"]
    assert moa_train(tmp_path / "run", *flags) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["failed"] in printed.err


# -- data ------------------------------------------------------------------------------------------


def test_every_answer_of_a_conversation_is_learnt(target: Target) -> None:
    # The docstring's example, and what the server knows: rows of everything before an answer.
    conversation = Conversation(tuple(range(5, 8)), tuple(range(10, 19)), ((4, 6),))
    assert conversation.answers == [(3, 7), (9, 12)] and conversation.learnt == 5
    features = LiveFeatures(target, [conversation], Reads(kv_layers=(0,)))
    batch = make_batch([conversation], features, [0], FutureLengths(6, 6), random.Random(0), torch.device("cpu"))
    assert batch.queries.tolist() == [3, 4, 5, 9, 10]
    assert batch.depths.tolist() == [1, 2, 3, 1, 2]
    assert batch.memory_mask[5].int().tolist() == [1] * 3 + [0] * 9
    assert batch.memory_mask[10].int().tolist() == [1] * 9 + [0] * 3
