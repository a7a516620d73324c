"""Training: visible rows, the target's logits, learning, resuming, and the factor that is fitted at its end."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moa_drafter.architectures.registry import ARCHITECTURES
from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.config import Reads, longest_context, unknown_fields
from moa_drafter.drafter import Drafter
from moa_drafter.target import Target, load_target
from moa_drafter.target_features import TargetStates, target_states
from moa_drafter.training import features
from moa_drafter.training.batch import OWN_ROW, FutureLengths, drop_rows, future_lengths_at, packed_masks, row_limits
from moa_drafter.training.cli import next_commands
from moa_drafter.training.data import Conversation, frequent_tokens, packed_order, read_conversations
from moa_drafter.training.evaluation import evaluate, fitted_sharpness
from moa_drafter.training.features import FeatureStore, LiveFeatures, packed_states
from moa_drafter.training.generation import repetitive
from moa_drafter.training.losses import forward_kl
from moa_drafter.training.optimizers import OPTIMIZERS
from moa_drafter.training.settings import RunSettings, TrainSettings
from moa_drafter.training.train import train_run
from moa_drafter.training.trainer import Trainer
from moa_runtime.errors import MoaError
from support.drafter.training_data import moa_train
from support.families import config_of, make_target
from support.refusals import refused


def drawn(*numbers, last=0):
    """Return a generator that draws the given numbers."""
    return SimpleNamespace(random=iter(numbers).__next__, randrange=lambda *bounds: last)


def test_documented_examples_of_visible_rows(monkeypatch):
    assert row_limits(2, 5, OWN_ROW, random.Random(0)) == [0, 1, 2, 3, 4]
    lengths = iter([2, 3])
    monkeypatch.setattr(FutureLengths, "draw", lambda self, rng: next(lengths))
    assert row_limits(3, 8, FutureLengths(1, 4), random.Random(0)) == [0, 1, 2, 2, 2, 4, 4, 4]
    limits = [0, 1, 2, 2, 2, 4, 4]
    assert drop_rows(limits, 0.5, drawn(0.4, 0.9, last=1)) == [0, 1, 1, 1, 1, 1, 1]
    assert drop_rows(limits, 0.5, drawn(0.4, 0.1)) == [-1] * 7
    assert drop_rows(limits, 0.5, drawn(0.6)) == drop_rows(limits, 0.0, drawn()) == limits


def test_long_future_lengths_stay_in_their_range():
    """In the last stages they reach as far as offline text."""
    last, continued = future_lengths_at(1.0), future_lengths_at(0.0, continued=True)
    assert last.no_rows_share > 0 and continued.no_rows_share > 0
    for lengths in (FutureLengths(1, 9, long_share=0.5, longest=64), last, continued):
        found = [lengths.draw(random.Random(seed)) for seed in range(4000)]
        assert min(found) == 1 and lengths.longest / 2 < max(found) <= lengths.longest


def test_packed_conversations_do_not_see_each_other():
    positions, self_mask, memory_mask = packed_masks([2, 3], [0, 1, 0, 0, 0])
    assert positions.tolist() == [0, 1, 0, 1, 2]
    rows = [["".join(map(str, row)) for row in mask.int().tolist()] for mask in (self_mask, memory_mask)]
    assert rows == [["10000", "11000", "00100", "00110", "00111"], ["10000", "11000", "00100", "00100", "00100"]]


def test_every_epoch_trains_on_everything_once():
    order = packed_order([5, 7, 4, 9, 3], 12, seed=1)
    seen: list[int] = []
    while len(seen) < 10:
        seen += next(order)
    assert sorted(seen[:5]) == sorted(seen[5:10]) == [0, 1, 2, 3, 4]


def test_the_draft_vocabulary_prefers_frequent_tokens():
    texts = [Conversation((7, 7, 9), (9, 7, 5)), Conversation((9,), (3,))]
    assert frequent_tokens(texts, 4, [8]) == [5, 7, 8, 9]
    assert frequent_tokens(texts, 7, [8]) == [0, 1, 3, 5, 7, 8, 9], "lowest ids fill it up"


def test_features_are_kept_and_equal_the_targets(target, tokens, tmp_path, monkeypatch):
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


#: Settings of a small run.
SIZES = {"step_tokens": 160, "warmup_steps": 5, "save_every": 10, "evaluate_every": 1000, "lsa_layers": 2}


def run(target, tokens, folder, steps, *, resume=False, stop_at=None, **changes):
    """Train for ``steps``; with ``stop_at`` until an interruption after that step."""
    curriculum = "none" if "init" in changes else "full"
    settings = {**SIZES, "steps": steps, "draft_vocab": 384, "held_out": 4, "curriculum": curriculum, **changes}
    folder.mkdir(exist_ok=True)

    def report(figures, total):
        if figures["step"] == stop_at:
            raise KeyboardInterrupt

    return train_run(target, [tokens], folder, RunSettings(**settings), resume=resume, report=report)


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 5e-4), ("muon", 2e-3)])
def test_training_lowers_the_loss_and_an_interrupted_run_resumes_exactly(target, tokens, tmp_path, optimizer, rate):
    changes = {"optimizer": optimizer, "learning_rate": rate}
    short = run(target, tokens, tmp_path / "short", 2, **changes)
    long = run(target, tokens, tmp_path / "long", 60, **changes)
    assert long["loss"] < 0.8 * short["loss"]
    with pytest.raises(KeyboardInterrupt):
        run(target, tokens, tmp_path / "cut", 60, stop_at=37, **changes)
    assert run(target, tokens, tmp_path / "cut", 60, resume=True, **changes) == long
    weights = "drafter/model.safetensors"
    assert (tmp_path / "cut" / weights).read_bytes() == (tmp_path / "long" / weights).read_bytes()


def test_every_parameter_has_one_optimizer(tiny_drafter):
    drafter = load_checkpoint(tiny_drafter)
    muon, adamw = OPTIMIZERS["muon"](drafter, RunSettings()).parts
    held = [p for part in (muon, adamw) for group in part.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(id(p) for p in drafter.parameters() if p.requires_grad)
    # A row of layer_scale is no direction in a space of layers: orthogonalising it would mean nothing.
    assert any(p is drafter.layer_scale for group in adamw.param_groups for p in group["params"])


def test_a_checkpoint_is_trained_on(target, tokens, tmp_path):
    first = run(target, tokens, tmp_path / "first", 40)
    more = run(target, tokens, tmp_path / "more", 20, init=tmp_path / "first" / "drafter")
    scratch = run(target, tokens, tmp_path / "scratch", 20)
    assert more["loss"] < first["loss"] < scratch["loss"]


@pytest.mark.parametrize(("key", "other"), [("draft_vocab", 256), ("lsa_layers", 3)])
def test_a_checkpoint_keeps_its_sizes(target, tokens, tmp_path, tiny_drafter, key, other):
    with refused("fixed_by_checkpoint", MoaError, key, str(other)):
        run(target, tokens, tmp_path / "other", 2, init=tiny_drafter, **{key: other})
    run(target, tokens, tmp_path / "left", 2, init=tiny_drafter, **{key: None})
    config = load_checkpoint(tmp_path / "left/drafter").config
    assert (config.draft_vocab_size, len(config.lsa_layers)) == (384, 2)


def test_a_run_that_diverges_stops_and_keeps_its_last_state(target, tokens, tmp_path, tiny_drafter):
    fast = {"learning_rate": 1e30, "warmup_steps": 0}
    with refused("diverged", MoaError, "1e+30"):
        run(target, tokens, tmp_path / "run", 10, save_every=1, **fast)
    assert not (tmp_path / "run/drafter").exists() or load_checkpoint(tmp_path / "run/drafter")
    with refused("diverged"):
        run(target, tokens, tmp_path / "more", 10, init=tiny_drafter, **fast)
    assert not (tmp_path / "more/training.pt").exists() and load_checkpoint(tiny_drafter)


def test_a_damaged_run_is_refused_and_not_overwritten(target, tokens, tmp_path):
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
        with refused("damaged", MoaError, str(tmp_path / "run" / "drafter")):
            run(target, tokens, tmp_path / "run", 2, resume=True)
        assert state.read_bytes() == content


def test_looping_text_is_recognised():
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
def test_a_broken_token_file_is_named_by_line(tmp_path, content, code, named):
    file = tmp_path / "tokens.jsonl"
    file.write_text(content)
    with refused(code, MoaError, named):
        read_conversations(file, vocab_size=512)


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
def test_moa_train_refuses_bad_arguments(target, tmp_path, train, arguments, code):
    train("run", "--model", target.folder, *arguments, code=code)
    assert not (tmp_path / "run" / "conversations.jsonl").exists()  # nothing was written for it


class Coin(Drafter):
    """Drafts token 0 with odds of ``odds`` to 1, else 1; it cannot draft 2."""

    def __init__(self, odds: float) -> None:
        super().__init__(vocab_size=3, draft_vocab_size=2, hidden_size=1)
        self.embedding, self.head = torch.zeros(3, 1), torch.tensor([[math.log(odds)], [0.0]])

    def predict(self, batch):
        return torch.ones(len(batch.queries), 1)


@pytest.mark.parametrize(("odds", "factor"), [(2.0, 2.0), (4.0, 1.0), (16.0, 0.5), (1.01, 2.5)])
def test_the_factor_makes_the_odds_those_of_the_answers(odds, factor):
    """Four zeros for each one; the server gives the first token, and tokens that cannot be drafted do not count."""
    answer, nothing = (1, *(0, 0, 0, 0, 1) * 2, *(2,) * 10), torch.zeros(22, 0, 0)
    conversations = [Conversation((0,), answer)] * 10
    states = [TargetStates(nothing, nothing, nothing.flatten(1))] * 10
    assert fitted_sharpness(Coin(odds), conversations, states, range(10)) == factor


def test_a_finished_run_keeps_its_factor(flags, tmp_path, capsys, train):
    """It is in the checkpoint, and a run that continues from there begins without it."""
    flags = [*flags, "--learning-rate", "3e-3"]
    assert "sharpness" not in train("run", *flags, "--pause-after", 1e-9)
    factor = train("run", "--resume")["sharpness"]
    assert load_checkpoint(tmp_path / "run" / "drafter").config.sharpness == factor and 0.5 <= factor <= 2.5
    assert moa_train(tmp_path / "run", "--resume") == 0
    assert ["sharpness", f"{factor:.4g}"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    train("more", *flags, "--init", tmp_path / "run" / "drafter", "--evaluate-every", 1)
    log = [(tmp_path / run / "log.jsonl").read_text().splitlines() for run in ("run", "more")]
    assert json.loads(log[1][0])["loss"] < 1.5 * json.loads(log[0][-1])["loss"]


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
def test_logits_of_the_draft_vocabulary_are_the_targets(family, tiny_target, tmp_path):
    target = target_of(family, tiny_target, tmp_path)
    drafter, hidden = Oracle(target), target_states(target, TEXT, Reads()).last
    torch.testing.assert_close(drafter.target_logits(hidden), own_logits(target), rtol=1e-4, atol=1e-5)
    if family not in CAPPED:  # a drafter has no cap, but the scale
        torch.testing.assert_close(drafter.logits(hidden), own_logits(target), rtol=1e-3, atol=1e-5)
    assert (target.head.data_ptr() == target.model.lm_head.weight.data_ptr()) == (family not in SCALED)


def test_a_bias_of_the_head_is_in_the_logits(tiny_target):
    target = load_target(str(tiny_target))
    target.model.lm_head.bias = torch.nn.Parameter(torch.randn(512))
    hidden = target_states(target, TEXT, Reads()).last
    torch.testing.assert_close(Oracle(target).target_logits(hidden), own_logits(target), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", CAPPED)
def test_losses_are_those_of_the_targets_distribution(family, tiny_target, tmp_path):
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


def test_the_fields_of_a_configuration_are_known_or_named():
    def unknown(family: str) -> list[str]:
        return unknown_fields(config_of(family))

    assert unknown("Llama (yarn)") == unknown("Qwen 2") == unknown("Mistral (window)") == []
    assert unknown("Ministral 3 (scaled queries)") == ["rope_parameters.llama_4_scaling_beta"]
    names = ["attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"]
    assert unknown("Granite (scaled logits alone)") == names
    assert "layer_types: sliding_attention" in unknown("Gemma 3")


def test_the_longest_context_is_the_shortest_limit(tiny_target, tmp_path):
    folder = make_target("Mistral (window)", tiny_target, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for window, longest in ((7, 7), (None, 40), (50, 40)):
        (folder / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
        assert longest_context(load_target(str(folder)).config)[0] == longest


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_drafter_can_be_put_to_use_after_it_was_trained(arch, tmp_path):
    commands = next_commands(tmp_path / "drafter", RunSettings(arch=arch))
    assert [command.split()[0] for command in commands] == ["moa-export", "moa-serve", "moa-chat"]
