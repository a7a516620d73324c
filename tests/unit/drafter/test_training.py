"""Training: what positions may see, that it learns, that it is deterministic and resumes exactly."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

import moa_drafter.training.features as features_module
from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.cli import main
from moa_drafter.target import Target
from moa_drafter.target_features import Reads, target_states
from moa_drafter.training.batch import OWN_ROW, FutureLengths, packed_masks, row_limits
from moa_drafter.training.data import frequent_tokens, packed_order, read_conversations
from moa_drafter.training.features import FeatureStore
from moa_drafter.training.generation import TransformersDecoder, generate_conversations, repetitive
from moa_drafter.training.optimizers import OPTIMIZERS
from moa_drafter.training.settings import GenerateSettings, RunSettings
from moa_drafter.training.train import train_run
from moa_runtime.errors import MoaError
from support.drafter.training_data import write_tokens


@pytest.fixture(scope="module")
def tokens(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations that the tiny target wrote to prompts we give it."""
    return write_tokens(target, tmp_path_factory.mktemp("tokens"))


def test_row_limits_of_the_documented_example(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([2, 3])
    monkeypatch.setattr(FutureLengths, "draw", lambda self, rng: next(drawn))
    assert row_limits(3, 8, FutureLengths(1, 4), random.Random(0)) == [0, 1, 2, 2, 2, 4, 4, 4]


def test_future_length_zero_sees_its_own_row() -> None:
    assert row_limits(2, 5, OWN_ROW, random.Random(0)) == [0, 1, 2, 3, 4]


def test_long_future_lengths_stay_in_their_range() -> None:
    lengths = FutureLengths(1, 9, long_share=0.5, longest=64)
    drawn = [lengths.draw(random.Random(i)) for i in range(500)]
    assert min(drawn) == 1 and 48 < max(drawn) <= 64


def test_packed_conversations_do_not_see_each_other() -> None:
    positions, self_mask, memory_mask = packed_masks([2, 3], [0, 1, 0, 0, 0])
    assert positions.tolist() == [0, 1, 0, 1, 2]
    assert self_mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert memory_mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 0, 0],
    ]


def test_every_epoch_trains_on_everything_once() -> None:
    order = packed_order([5, 7, 4, 9, 3], 12, seed=1)
    seen: list[int] = []
    while len(seen) < 10:
        seen += next(order)
    assert sorted(seen[:5]) == sorted(seen[5:10]) == [0, 1, 2, 3, 4]


def test_draft_vocabulary_prefers_frequent_tokens(tokens: Path) -> None:
    conversations = read_conversations(tokens, vocab_size=512)
    chosen = frequent_tokens(conversations, 64, [511])
    assert len(chosen) == 64 and 511 in chosen and chosen == sorted(chosen)
    counts = [sum(c.tokens.count(token) for c in conversations) for token in range(512)]
    left_out = max(counts[token] for token in range(512) if token not in chosen)
    assert left_out <= min(counts[token] for token in chosen if token != 511)


def test_features_are_kept_and_equal_the_targets(
    target: Target, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations = read_conversations(tokens, vocab_size=512)[:3]
    reads = Reads(kv_layers=(1, 3), inner_layers=(2,))
    store = FeatureStore(tmp_path, target, conversations, reads)
    expected = target_states(target, conversations[2].tokens, reads)
    for part in ("kv", "inner", "last"):
        torch.testing.assert_close(getattr(store[2], part), getattr(expected, part), rtol=2e-3, atol=2e-3)
    again = FeatureStore(tmp_path, target, conversations, reads)
    monkeypatch.setattr(features_module, "target_states", None)  # a second computation would call it
    torch.testing.assert_close(again[2].kv, store[2].kv)


def run(target: Target, tokens: Path, folder: Path, steps: int, **changes: object) -> dict[str, object]:
    resume = bool(changes.pop("resume", False))
    stop_at = changes.pop("stop_at", None)
    settings = RunSettings(
        **{
            "steps": steps,
            "step_tokens": 160,
            "warmup_steps": 5,
            "save_every": 10,
            "evaluate_every": 1000,
            "draft_vocab": 384,
            "lsa_layers": 2,
            "held_out": 4,
            "curriculum": "none" if "init" in changes else "full",
            **changes,
        }
    )
    folder.mkdir(exist_ok=True)

    def report(figures: dict[str, float], total: int) -> None:
        if figures["step"] == stop_at:
            raise KeyboardInterrupt

    return train_run(target, [tokens], folder, settings, resume=resume, report=report)


def test_training_lowers_the_loss_and_is_deterministic(target: Target, tokens: Path, tmp_path: Path) -> None:
    short = run(target, tokens, tmp_path / "short", 2)
    long = run(target, tokens, tmp_path / "long", 60)
    assert long["loss"] < 0.8 * short["loss"]
    again = run(target, tokens, tmp_path / "again", 60)
    assert again == long
    weights = "drafter/model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (tmp_path / "long" / weights).read_bytes()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_run_resumes_exactly(target: Target, tokens: Path, tmp_path: Path, optimizer: str) -> None:
    whole = run(target, tokens, tmp_path / "whole", 30, optimizer=optimizer)
    with pytest.raises(KeyboardInterrupt):
        run(target, tokens, tmp_path / "cut", 30, stop_at=17, optimizer=optimizer)
    resumed = run(target, tokens, tmp_path / "cut", 30, resume=True, optimizer=optimizer)
    assert resumed == whole
    weights = "drafter/model.safetensors"
    assert (tmp_path / "cut" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()


def test_muon_learns_and_every_parameter_has_one_optimizer(target: Target, tokens: Path, tmp_path: Path) -> None:
    short = run(target, tokens, tmp_path / "short", 2, optimizer="muon", learning_rate=2e-3)
    long = run(target, tokens, tmp_path / "long", 60, optimizer="muon", learning_rate=2e-3)
    assert long["loss"] < 0.8 * short["loss"]
    drafter = load_checkpoint(tmp_path / "long" / "drafter")
    muon, adamw = OPTIMIZERS["muon"](drafter, RunSettings()).parts
    held = [p for part in (muon, adamw) for group in part.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(id(p) for p in drafter.parameters() if p.requires_grad)
    # A row of layer_scale is no direction in a space of layers: orthogonalising it would mean nothing.
    assert any(p is drafter.layer_scale for group in adamw.param_groups for p in group["params"])


def test_a_checkpoint_is_trained_on(target: Target, tokens: Path, tmp_path: Path) -> None:
    first = run(target, tokens, tmp_path / "first", 40)
    more = run(target, tokens, tmp_path / "more", 20, init=tmp_path / "first" / "drafter")
    scratch = run(target, tokens, tmp_path / "scratch", 20)
    assert more["loss"] < first["loss"] < scratch["loss"]


@pytest.mark.parametrize(("key", "has", "other"), [("draft_vocab", 384, 256), ("lsa_layers", 2, 3)])
def test_sizes_of_a_checkpoint_stay(
    target: Target, tokens: Path, tmp_path: Path, key: str, has: int, other: int
) -> None:
    run(target, tokens, tmp_path / "first", 2)
    init = tmp_path / "first/drafter"
    with pytest.raises(MoaError, match=rf"{key} \({other}\) cannot be chosen .* has {has}: leave {key} out"):
        run(target, tokens, tmp_path / "other", 2, init=init, **{key: other})
    run(target, tokens, tmp_path / "left", 2, init=init, **{key: None})
    config = load_checkpoint(tmp_path / "left/drafter").config
    assert (config.draft_vocab_size, len(config.lsa_layers)) == (384, 2)


def test_a_run_that_diverges_stops_and_keeps_what_was_saved(target: Target, tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(MoaError, match=r"training diverged: at step .* lower learning_rate than 1e\+30"):
        run(target, tokens, tmp_path / "run", 10, learning_rate=1e30, warmup_steps=0, save_every=1)
    assert not (tmp_path / "run/drafter").exists() or load_checkpoint(tmp_path / "run/drafter")
    good = run(target, tokens, tmp_path / "good", 2)
    with pytest.raises(MoaError, match="nothing was saved"):
        run(target, tokens, tmp_path / "more", 10, init=tmp_path / "good/drafter", learning_rate=1e30, warmup_steps=0)
    assert good["loss"] > 0 and load_checkpoint(tmp_path / "good/drafter")


def test_a_run_is_not_overwritten(target: Target, tokens: Path, tmp_path: Path) -> None:
    run(target, tokens, tmp_path / "run", 10)
    with pytest.raises(MoaError, match="already holds a run"):
        run(target, tokens, tmp_path / "run", 10)
    with pytest.raises(MoaError, match="nothing to resume"):
        run(target, tokens, tmp_path / "other", 10, resume=True)


def test_what_is_no_run_or_a_damaged_one_is_said(target: Target, tokens: Path, tmp_path: Path) -> None:
    run(target, tokens, tmp_path / "run", 2)
    state = tmp_path / "run" / "training.pt"
    torch.save([1], tmp_path / "list.pt")
    held = torch.load(state, weights_only=True)
    torch.save({**held, "drafter": {}}, tmp_path / "other.pt")
    others = [(tmp_path / name).read_bytes() for name in ("list.pt", "other.pt")]
    for content in (state.read_bytes()[:-5000], b"", b"a text", *others):
        state.write_bytes(content)
        with pytest.raises(
            MoaError, match=r"training\.pt is damaged, so this run cannot go on: train its checkpoint on"
        ):
            run(target, tokens, tmp_path / "run", 2, resume=True)
        assert state.read_bytes() == content
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        assert main(["--out", str(out), "--model", str(target.folder), "--data", str(tokens), "--steps", "1"]) == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_generation_resumes_behind_the_last_whole_line(target: Target, tmp_path: Path) -> None:
    settings = GenerateSettings(conversations=12, write_batch=8, prompt_tokens=24, answer_tokens=16)
    held: list[int] = []
    store = tmp_path / "tokens.jsonl"
    store.write_text('{"p":[1,2],"r":[3,4],"b":1}\n{"p":[1,2],"r":[5,')
    generate_conversations(TransformersDecoder(target), store, settings, report=held.append)
    conversations = read_conversations(store, vocab_size=512)
    assert held[0] == 1 and held[-1] == 12 and len(conversations) == 12
    assert conversations[0].answer == (3, 4)


def test_looping_text_is_recognised() -> None:
    assert repetitive([1, 2, 3, 4, 5] * 10)
    assert not repetitive(list(range(50)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"p":[1],"r":[2,3]}\n{"p":1}\n', "line 2"),
        ('{"p":[1],"r":[2,700]}\n', "outside 0..511"),
        ("", "no conversation"),
        ('{"p":[1,2],"r":[]}\n', "no conversation"),
        ('{"p":[1],"r":[2,0.5]}\n', "line 1: expected"),
        ('{"p":[1],"r":[2,true]}\n', "line 1: expected"),
        ('{"p":[1],"r":[2,3],"u":[[1e400,2]]}\n', "line 1: expected"),
        ("[" * 100_000 + "\n", "line 1: expected"),
    ],
)
def test_a_broken_token_file_is_named_by_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "tokens.jsonl"
    file.write_text(content)
    with pytest.raises(MoaError, match=message):
        read_conversations(file, vocab_size=512)


def test_moa_train_end_to_end(target: Target, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    command = [
        "--model",
        str(target.folder),
        "--data",
        str(tokens),
        "--out",
        str(out),
        "--draft-vocab",
        "384",
        "--json",
    ]
    assert main([*command, "--steps", "12", "--step-tokens", "160"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 12 and len(result["accuracy_by_depth"]) == 6 and result["tau"] >= 1
    assert (out / "drafter" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model"], "unknown target"),
        (["--steps", "-1"], "must be positive"),
        (["--data", "nowhere.jsonl"], "no token file"),
        (["--device", "abacus"], "no torch device 'abacus'"),
        (["--minutes", "1e300"], "minutes must be at most 1000000"),
        (["--learning-rate", "inf"], "learning_rate must be finite, not inf"),
        (["--seed", str(2**70)], "seed must be at most"),
        (["--conversations", "9", "--draft-vocab", "513"], "draft_vocab (513) must be at most 512"),
        (["--conversations", "9", "--lsa-layers", "40"], "lsa_layers (40) must be at most"),
        (["--prompts", __file__], "line 1: expected {'prompt': text} or"),
        (["--conversations", "9", "--target-layers", "40"], "target_layers must lie in 0.."),
    ],
)
def test_moa_train_says_what_is_wrong(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    model = [] if "--model" in arguments else ["--model", str(target.folder)]
    assert main([*model, "--out", str(tmp_path), *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err and printed.out == ""
    assert not (tmp_path / "conversations.jsonl").exists()  # nothing was written for it
