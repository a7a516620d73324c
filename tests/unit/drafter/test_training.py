"""Training: rows that positions see, learning, determinism and resuming."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.cli import main
from moa_drafter.target import Target
from moa_drafter.target_features import Reads, target_states
from moa_drafter.training import features
from moa_drafter.training.batch import OWN_ROW, FutureLengths, drop_rows, future_lengths_at, packed_masks, row_limits
from moa_drafter.training.data import Conversation, frequent_tokens, packed_order, read_conversations
from moa_drafter.training.features import FeatureStore, LiveFeatures, packed_states
from moa_drafter.training.generation import TransformersDecoder, generate_conversations, repetitive
from moa_drafter.training.optimizers import OPTIMIZERS
from moa_drafter.training.settings import GenerateSettings, RunSettings
from moa_drafter.training.train import train_run
from support.drafter.training_data import write_tokens
from support.refusals import refused


@pytest.fixture(scope="module")
def tokens(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations that the tiny target wrote."""
    return write_tokens(target, tmp_path_factory.mktemp("tokens"))


class Drawn(random.Random):
    """Draws the given numbers."""

    def __init__(self, *numbers: float, last: int = 0) -> None:
        super().__init__()
        self._numbers, self._last = list(numbers), last

    def random(self) -> float:
        return self._numbers.pop(0)

    def randrange(self, *bounds: int) -> int:
        return self._last


def test_documented_examples_of_visible_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert row_limits(2, 5, OWN_ROW, random.Random(0)) == [0, 1, 2, 3, 4]
    drawn = iter([2, 3])
    monkeypatch.setattr(FutureLengths, "draw", lambda self, rng: next(drawn))
    assert row_limits(3, 8, FutureLengths(1, 4), random.Random(0)) == [0, 1, 2, 2, 2, 4, 4, 4]
    limits = [0, 1, 2, 2, 2, 4, 4]
    assert drop_rows(limits, 0.5, Drawn(0.4, 0.9, last=1)) == [0, 1, 1, 1, 1, 1, 1]
    assert drop_rows(limits, 0.5, Drawn(0.4, 0.1)) == [-1] * 7
    assert drop_rows(limits, 0.5, Drawn(0.6)) == drop_rows(limits, 0.0, Drawn()) == limits


def test_shares_of_lost_rows_are_kept() -> None:
    limits = list(range(40))
    drawn = [drop_rows(limits, 0.5, random.Random(seed)) for seed in range(600)]
    none = sum(kept[0] == -1 for kept in drawn)
    some = sum(kept[0] == 0 and kept != limits for kept in drawn)
    assert 110 < none < 190 and 110 < some < 190
    assert all(kept == [min(limit, kept[-1]) for limit in limits] for kept in drawn)


def test_long_future_lengths_stay_in_their_range() -> None:
    """In the last stages they reach as far as offline text."""
    last, continued = future_lengths_at(1.0), future_lengths_at(0.0, continued=True)
    assert last.no_rows_share > 0 and continued.no_rows_share > 0
    for lengths in (FutureLengths(1, 9, long_share=0.5, longest=64), last, continued):
        drawn = [lengths.draw(random.Random(seed)) for seed in range(4000)]
        assert min(drawn) == 1 and lengths.longest / 2 < max(drawn) <= lengths.longest


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
    """On disk, and live with the padding of texts of other lengths."""
    texts = [c.tokens for c in read_conversations(tokens, vocab_size=512)[:2]]
    conversations = [Conversation(text[:3], text[3:stop]) for text, stop in zip(texts, (9, 20), strict=True)]
    reads, cpu = Reads(kv_layers=(1, 3), inner_layers=(2,)), torch.device("cpu")
    alone = [target_states(target, c.tokens, reads) for c in conversations]
    kept = [packed_states(FeatureStore(tmp_path, target, conversations, reads), [1, 0], cpu)]
    monkeypatch.setattr(features, "target_states", None)  # a second computation would call it
    kept.append(packed_states(FeatureStore(tmp_path, target, conversations, reads), [1, 0], cpu))
    for states in (*kept, packed_states(LiveFeatures(target, conversations, reads), [1, 0], cpu)):
        for part in ("kv", "inner", "last"):
            expected = torch.cat([getattr(alone[i], part) for i in (1, 0)])
            torch.testing.assert_close(getattr(states, part), expected, rtol=2e-3, atol=2e-3)


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


@pytest.mark.parametrize(("key", "other"), [("draft_vocab", 256), ("lsa_layers", 3)])
def test_a_checkpoint_keeps_its_sizes(target: Target, tokens: Path, tmp_path: Path, key: str, other: int) -> None:
    run(target, tokens, tmp_path / "first", 2)
    init = tmp_path / "first/drafter"
    with refused("fixed_by_checkpoint") as caught:
        run(target, tokens, tmp_path / "other", 2, init=init, **{key: other})
    assert key in str(caught.value) and str(other) in str(caught.value)
    run(target, tokens, tmp_path / "left", 2, init=init, **{key: None})
    config = load_checkpoint(tmp_path / "left/drafter").config
    assert (config.draft_vocab_size, len(config.lsa_layers)) == (384, 2)


def test_a_run_that_diverges_stops_and_keeps_its_last_state(target: Target, tokens: Path, tmp_path: Path) -> None:
    with refused("diverged") as caught:
        run(target, tokens, tmp_path / "run", 10, learning_rate=1e30, warmup_steps=0, save_every=1)
    assert "1e+30" in str(caught.value)
    assert not (tmp_path / "run/drafter").exists() or load_checkpoint(tmp_path / "run/drafter")
    run(target, tokens, tmp_path / "good", 2)
    with refused("diverged"):
        run(target, tokens, tmp_path / "more", 10, init=tmp_path / "good/drafter", learning_rate=1e30, warmup_steps=0)
    assert not (tmp_path / "more/drafter").exists() or not (tmp_path / "more/training.pt").exists()
    assert load_checkpoint(tmp_path / "good/drafter")


def test_a_damaged_run_is_refused_and_not_overwritten(target: Target, tokens: Path, tmp_path: Path) -> None:
    with refused("nothing_to_resume"):
        run(target, tokens, tmp_path / "run", 2, resume=True)
    run(target, tokens, tmp_path / "run", 2)
    with refused("run_exists"):
        run(target, tokens, tmp_path / "run", 2)
    state = tmp_path / "run" / "training.pt"
    torch.save([1], tmp_path / "list.pt")
    torch.save({**torch.load(state, weights_only=True), "drafter": {}}, tmp_path / "other.pt")
    others = [(tmp_path / name).read_bytes() for name in ("list.pt", "other.pt")]
    for content in (state.read_bytes()[:-5000], b"", b"a text", *others):
        state.write_bytes(content)
        with refused("damaged") as caught:
            run(target, tokens, tmp_path / "run", 2, resume=True)
        assert str(tmp_path / "run" / "drafter") in str(caught.value) and state.read_bytes() == content


def test_generation_resumes_after_the_last_whole_line(target: Target, tmp_path: Path) -> None:
    settings = GenerateSettings(conversations=12, write_batch=8, prompt_tokens=24, answer_tokens=16)
    held: list[int] = []
    store = tmp_path / "tokens.jsonl"
    store.write_text('{"p":[1,2],"r":[3,4],"b":1}\n{"p":[1,2],"r":[5,')
    generate_conversations(TransformersDecoder(target), store, settings, report=held.append)
    conversations = read_conversations(store, vocab_size=512)
    assert held[0] == 1 and held[-1] == 12 and len(conversations) == 12
    assert conversations[0].answer == (3, 4)


def test_looping_text_is_recognised() -> None:
    assert repetitive([1, 2, 3, 4, 5] * 10) and not repetitive(list(range(50)))


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        ('{"p":[1],"r":[2,3]}\n{"p":1}\n', "bad_line", "line 2"),
        ('{"p":[1],"r":[2,700]}\n', "out_of_range", "line 1"),
        ("", "too_few", ""),
        ('{"p":[1,2],"r":[]}\n', "too_few", ""),
        ('{"p":[1],"r":[2,0.5]}\n', "bad_line", "line 1"),
        ('{"p":[1],"r":[2,true]}\n', "bad_line", "line 1"),
        ('{"p":[1],"r":[2,3],"u":[[1e400,2]]}\n', "bad_line", "line 1"),
        *((f'{{"p":[1,2],"r":[1,2,3,4,5,6,7,8,9],"u":{spans}}}\n', "bad_line", "line 1")
          for spans in ("[[0,3]]", "[[4,9]]", "[[6,4]]", "[4]", "7")),
        ("[" * 100_000 + "\n", "bad_line", "line 1"),
    ],
)  # fmt: skip
def test_a_broken_token_file_is_named_by_line(tmp_path: Path, content: str, code: str, named: str) -> None:
    file = tmp_path / "tokens.jsonl"
    file.write_text(content)
    with refused(code) as caught:
        read_conversations(file, vocab_size=512)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--model", "no-such-model"], "unknown_target"),
        (["--steps", "-1"], "out_of_range"),
        (["--data", "nowhere.jsonl"], "file_missing"),
        (["--device", "abacus"], "unknown_device"),
        (["--minutes", "1e300"], "out_of_range"),
        (["--learning-rate", "inf"], "out_of_range"),
        (["--seed", str(2**70)], "out_of_range"),
        (["--pause-after", "0"], "out_of_range"),
        (["--mix", "chat"], "wrong_type"),
        (["--conversations", "9", "--draft-vocab", "513"], "out_of_range"),
        (["--conversations", "9", "--lsa-layers", "40"], "out_of_range"),
        (["--conversations", "9", "--target-layers", "40"], "out_of_range"),
        (["--prompts", __file__], "bad_line"),
        (["--out", __file__], "not_a_folder"),
        (["--out", f"{__file__}/run"], "path_refused"),
    ],
)
def test_moa_train_refuses_bad_arguments(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: str
) -> None:
    assert main(["--model", str(target.folder), "--out", str(tmp_path), *arguments]) == 2
    printed = capsys.readouterr()
    assert f"[{code}]" in printed.err and "Traceback" not in printed.err and printed.out == ""
    assert not (tmp_path / "conversations.jsonl").exists()  # nothing was written for it
