"""``moa-train`` as a pipeline: configuration, accumulation, weight average, pauses, several processes, self-check."""

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
from moa_drafter.training.data import Conversation, read_conversations
from moa_drafter.training.features import FeatureStore, LiveFeatures, packed_states
from moa_drafter.training.optimizers import WeightAverage, share_out
from moa_drafter.training.settings import RunSettings, TrainSettings
from moa_drafter.training.train import start_drafter
from moa_drafter.training.trainer import Trainer
from moa_runtime.errors import MoaError
from support.drafter.training_data import moa_train, small, write_store
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
    ("text", "message"),
    [
        ("steps: [", "is no YAML"),
        ("- steps", "must hold keys and values"),
        ("stepz: 3", "unknown key 'stepz'"),
        ("steps: many", "steps must be a whole number, not 'many'"),
        ("steps: 2.5", "steps must be a whole number"),
        ("compile: 3", "compile must be true or false"),
        ("learning_rate: -1", "learning_rate must be positive, not -1"),
        ("long_share: 1.5", "long_share must be at most 1"),
        ("features: tape", "features must be one of auto, disk, live"),
        ("steps: 3\nminutes: 4", "steps and minutes exclude each other"),
        ("step_tokens: 100\naccumulate: 3", "must divide step_tokens"),
        ("data: a.jsonl\nprompts: b.jsonl", "prompts and data exclude each other"),
        ("arch: rnn", "unknown arch 'rnn': choose one of moa"),
        ("loss: hope", "unknown loss 'hope': choose one of kl"),
        ("mix: {poems: 1}", "unknown kind 'poems'"),
        ("mix: 3", "mix must name kinds with weights"),
        ("data: nowhere.jsonl", "no token file nowhere.jsonl"),
        ("prompts: nowhere.jsonl", "cannot read the prompts"),
        ("held_out: 40\ndata: STORE", "leaves nothing to train on"),
        ("longest: 10\ndata: STORE", "too few to train on"),
        ("target_layers: 4\ndata: STORE", "target_layers"),
        ("arch: eagle\ntarget_layers: 1\ndata: STORE", "not of eagle"),
        ("init: nowhere\ndata: STORE", "nowhere"),
    ],
)
def test_bad_settings_are_one_sentence(
    tiny_target: Path,
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(text.replace("STORE", str(store)) + "\n")
    assert moa_train(tmp_path / "run", "--config", config, "--model", tiny_target, "--dtype", "float32") == 2
    printed = capsys.readouterr()
    *before, said = printed.err.splitlines()
    assert message in said and all(is_progress(line) for line in before) and printed.out == ""


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


def test_the_average_follows_the_weights_and_is_what_is_saved(tiny_target: Path, store: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(0.0)
    average = WeightAverage(model, 0.5)
    model.weight.data.fill_(1.0)
    average.update(1)  # decay (1 + 1) / (10 + 1)
    torch.testing.assert_close(average.weights[0], torch.full((1, 2), 9 / 11))
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


def test_a_paused_run_goes_on_exactly_with_its_own_settings(
    tiny_target: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*small(tiny_target, store), "--ema-decay", "0.9", "--accumulate", "2"]
    assert moa_train(tmp_path / "whole", *flags, "--json") == 0
    whole = json.loads(capsys.readouterr().out)
    cut = tmp_path / "cut"
    assert moa_train(cut, *flags, "--pause-after", 1e-9, "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["finished"] is False and "go on with --resume" in printed.err
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


def test_minutes_are_for_writing_too_where_there_is_no_data(
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
    out = tmp_path / "run"
    assert moa_train(out, "--resume") == 2
    assert "nothing to resume" in capsys.readouterr().err
    assert moa_train(out, *small(tiny_target, store), "--pause-after", 1e-9) == 0
    capsys.readouterr()
    assert moa_train(out, "--resume", "--learning-rate", 0.1) == 2
    assert "another learning_rate (0.1; the run has 0.0005)" in capsys.readouterr().err
    assert moa_train(out, *small(tiny_target, store)) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert moa_train(out, "--resume", "--learning-rate", 5e-4) == 0


@pytest.mark.parametrize("arch", ["eagle", "early-exit", "independent"])
def test_every_architecture_is_trained_by_the_same_loop(target: Target, store: Path, tmp_path: Path, arch: str) -> None:
    flags = [*small(target.folder, store, steps=25), "--learning-rate", "3e-3", "--future-high", "4"]
    assert moa_train(tmp_path / "run", *flags, "--long-share", 0, "--arch", arch, "--evaluate-every", 5) == 0
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    assert load_checkpoint(tmp_path / "run/drafter").config.architecture == arch
    with pytest.raises(MoaError, match="architecture"):
        start_drafter(target, [], RunSettings(init=tmp_path / "run/drafter"))


def test_work_is_shared_out_evenly() -> None:
    assert share_out([1, 4, 3], 2) == [1, 0, 1]
    assert share_out([5, 5, 5, 5], 1) == [0] * 4
    costs = [7, 6, 5, 4, 3, 2, 1]
    owned = list(zip(costs, share_out(costs, 3), strict=True))
    loads = [sum(cost for cost, owner in owned if owner == worker) for worker in range(3)]
    assert max(loads) - min(loads) <= 1


def test_the_micro_batches_must_be_shared_out_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(MoaError, match="multiple of the 2 processes"):
        Trainer(MoADrafter.__new__(MoADrafter), [], [], TrainSettings(steps=1, accumulate=3), tmp_path, [])


def test_the_self_check_passes_and_says_where_time_goes(
    tiny_target: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert moa_train(tmp_path / "run", *small(tiny_target, store), "--self-check", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["loss_after"] < result["loss_before"] and result["tokens_per_second"] > 0
    parts = {"target forward", "layer self-attention", "drafter forward", "backward", "optimiser", "data"}
    assert set(result["shares"]) == parts and sum(result["shares"].values()) == pytest.approx(1)
    assert not (tmp_path / "run").exists()


def test_the_self_check_writes_its_own_text_where_there_is_none(
    tiny_target: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the river {n}"}) + "\n" for n in range(30)))
    flags = [*small(tiny_target, store)[:2], *small(tiny_target, store)[4:], "--prompts", prompts]
    assert moa_train(tmp_path / "run", *flags, "--held-out", 40, "--self-check", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 10
    assert moa_train(tmp_path / "run", *small(tiny_target, tmp_path / "gone.jsonl"), "--self-check") == 2
    assert "no token file" in capsys.readouterr().err


def test_a_self_check_that_fails_exits_1(
    tiny_target: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Steps of a million times the usual size destroy the weights.
    assert moa_train(tmp_path / "run", *small(tiny_target, store), "--self-check", "--learning-rate", "500") == 1
    assert "the loss does not fall" in capsys.readouterr().err


# -- data ------------------------------------------------------------------------------------------


def test_live_states_equal_those_of_single_conversations(target: Target, store: Path, tmp_path: Path) -> None:
    long = write_store(tmp_path / "long.jsonl", 2, prompt=20, answer=30)
    conversations = read_conversations(store, vocab_size=512)[:2] + read_conversations(long, vocab_size=512)
    reads = Reads(kv_layers=(1, 3), inner_layers=(2,))
    cpu = torch.device("cpu")
    live = packed_states(LiveFeatures(target, conversations, reads), [0, 2, 1], cpu)
    kept = packed_states(FeatureStore(tmp_path / "features", target, conversations, reads), [0, 2, 1], cpu)
    for part in ("kv", "inner", "last"):
        torch.testing.assert_close(getattr(live, part), getattr(kept, part), rtol=2e-3, atol=2e-3)


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


@pytest.mark.parametrize("spans", ["[[0,3]]", "[[4,9]]", "[[6,4]]", "[4]", "7"])
def test_broken_spans_are_named_by_line(tmp_path: Path, spans: str) -> None:
    file = tmp_path / "tokens.jsonl"
    file.write_text(f'{{"p":[1,2],"r":[1,2,3,4,5,6,7,8,9],"u":{spans}}}\n')
    with pytest.raises(MoaError, match="line 1"):
        read_conversations(file, vocab_size=512)
