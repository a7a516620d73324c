"""Target layer inference: the training forward, the device half and the target's own layers agree."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import load_bound, load_checkpoint
from moa_drafter.config import ConfigError, FitError, LayerDims, Reads, config_for_target
from moa_drafter.drafter_weights import parameters_of
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_drafter.target_features import target_states
from moa_drafter.training.batch import packed_masks
from moa_drafter.training.initialise import fit_to_target_layers, start_target_layers, with_target_layers
from moa_drafter.training.settings import read_settings
from moa_runtime.drafters.moa import MoaDrafter
from support.drafted import draft_of
from support.refusals import refused
from support.tiny import tiny_with_layers

TOKENS = torch.randint(3, 512, (26,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=["0", "1", "3", "2,trained"])
def drafter(request, tiny_drafter, target):
    """With some of the target's last layers."""
    count, *trained = request.param.split(",")
    return tiny_with_layers(tiny_drafter, target, int(count), trained=bool(trained))


@torch.no_grad()
def expected(target: Target, drafter: MoADrafter, tokens: list[int], limits: list[int]) -> torch.Tensor:
    """Log-probabilities ``[T, draft vocabulary]`` by the training forward."""
    positions, self_mask, memory_mask = packed_masks([len(tokens)], limits)
    kv = target_states(target, tokens, drafter.reads).kv
    hidden = drafter(torch.tensor(tokens), positions, kv, self_mask, memory_mask)
    return drafter.logits(hidden).log_softmax(-1)


def assert_next(drafter: MoADrafter, runtime: MoaDrafter, prefix: list[int], logprobs: torch.Tensor) -> None:
    """Check that the drafter's best token after ``prefix`` is that of the training forward."""
    (drafted,) = draft_of(runtime, prefix, 1)
    best = logprobs.max(0)
    assert drafted.logprob == pytest.approx(float(best.values), abs=2e-4)
    assert drafted.token == int(drafter.draft_to_target[best.indices])


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 3])
def test_the_tail_computes_what_the_target_does(tiny_drafter, target, count):
    """Given what enters them, the copied layers and the norm make the target's last hidden states."""
    drafter = tiny_with_layers(tiny_drafter, target, count)
    reads = Reads(drafter.reads.kv_layers, inner_layers=(4 - count - 1,))
    states = target_states(target, TOKENS, reads)
    angles = drafter.angles(torch.arange(len(TOKENS)))
    causal = torch.ones(len(TOKENS), len(TOKENS)).tril().bool()
    x = states.inner[:, 0]
    keys, values = drafter.rows(states, torch.arange(len(TOKENS)))
    for n, layer in enumerate(drafter.tail, start=1):
        own = layer.keys_values(x, angles)
        # What travels in the rows is what the layer itself computes.
        torch.testing.assert_close(own[0], keys[:, 2 * n : 2 * n + 2], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own[1], values[:, 2 * n : 2 * n + 2], rtol=1e-4, atol=1e-4)
        x = layer(x, *own, angles, causal)
    torch.testing.assert_close(drafter.norm(x), states.last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("held", [-1, 0, 4, 9, len(TOKENS) - 2])
def test_a_text_long_after_the_last_row_or_without_any(target, drafter, held, monkeypatch):
    """Rows up to ``held`` alone, with the rest at once, in chunks without rows of later tokens, and token by token."""
    logprobs = expected(target, drafter, TOKENS, [min(position, held) for position in range(len(TOKENS))])
    assert torch.isfinite(logprobs).all()
    with torch.no_grad():
        rows = drafter.rows(target_states(target, TOKENS, drafter.reads), torch.arange(len(TOKENS)))
    backend = torch_backend_of(drafter, top_k=drafter.config.draft_vocab_size)
    at_once, in_chunks, stepwise = (MoaDrafter(backend, max_context=128) for _ in range(3))
    for runtime in (at_once, in_chunks, stepwise):
        runtime.add_rows(0, *(half[: held + 1].numpy() for half in rows))
    assert_next(drafter, at_once, TOKENS, logprobs[-1])
    for position in range(held + 1, len(TOKENS)):
        assert_next(drafter, stepwise, TOKENS[: position + 1], logprobs[position])
    monkeypatch.setattr("moa_runtime.drafters.moa.CATCH_UP_TOKENS", 4)
    assert_next(drafter, in_chunks, TOKENS, logprobs[-1])


@torch.no_grad()
def test_training_in_bfloat16_stays_close(target, drafter):
    exact = expected(target, drafter, TOKENS, limits := [min(n, 8) for n in range(26)])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = expected(target, drafter, TOKENS, limits)
    assert torch.nn.functional.cosine_similarity(rounded.float(), exact, dim=-1).min() > 0.97


def test_a_trained_drafter_continues_with_target_layers(target, tiny_drafter):
    """The fitted cross-attention estimates what enters the target's layers; what it looks at stays."""
    plain = load_checkpoint(tiny_drafter)
    deeper = with_target_layers(plain, 1)
    deeper.bind_target(target.embedding, target.head, target.layers)
    samples = []
    for seed in range(12):
        tokens = torch.randint(3, 512, (40,), generator=torch.Generator().manual_seed(seed))
        samples.append((tokens, target_states(target, tokens.tolist(), deeper.reads)))
    outputs: list[torch.Tensor] = []
    deeper.cross_attention.register_forward_hook(lambda module, inputs, output: outputs.append(output))

    def error() -> float:
        """Squared error of what enters the last layer, as a share of its size."""
        wrong = size = 0.0
        for tokens, states in samples:
            positions, self_mask, memory_mask = packed_masks([len(tokens)], [max(0, n - 1) for n in range(len(tokens))])
            with torch.no_grad():
                deeper(tokens, positions, states.kv, self_mask, memory_mask)
            wanted = target_states(target, tokens.tolist(), Reads(inner_layers=(2,))).inner[:, 0]
            wrong += float((outputs[-1] - wanted).square().sum())
            size += float(wanted.square().sum())
        return wrong / size

    before = error()
    fit_to_target_layers(deeper, target.model, samples)
    assert error() < 0.8 < before  # an output of zeros would be wrong by 1
    assert torch.equal(deeper.norm.weight, target.model.model.norm.weight)
    for name, tensor in plain.state_dict().items():
        if not name.startswith("norm.") and not name.endswith(("n.self_attn.o_proj.weight", "n.mlp.down_proj.weight")):
            assert torch.equal(deeper.state_dict()[name], tensor), name


def test_moa_train_leaves_the_targets_layers_alone_or_trains_copies(target, tiny_drafter, tmp_path, train):
    store, first = tmp_path / "tokens.jsonl", tmp_path / "first" / "drafter"
    texts = [{"p": TOKENS[n : n + 5], "r": TOKENS[n + 5 : n + 17]} for n in range(9)]
    store.write_text("".join(json.dumps(text) + "\n" for text in texts))
    for name, flags, trained in (
        ("first", ["--init", tiny_drafter, "--target-layers", 1], False),
        ("second", ["--init", first, "--train-target-layers"], True),
        ("new", ["--target-layers", 1, "--train-target-layers", "--lsa-layers", 2], True),
    ):
        train(name, "--model", target.folder, "--data", store, "--steps", 2, "--learning-rate", 1e-2, *flags)
        folder = tmp_path / name / "drafter"
        drafter = load_bound(folder, target)
        assert (drafter.config.target_layers, drafter.config.trained_target_layers) == (1, trained)
        tail = {**drafter.tail[0].state_dict(), **dict(drafter.tail[0].named_buffers())}
        same = [torch.equal(tensor, target.layers[-1].state_dict()[name]) for name, tensor in tail.items()]
        stored = [name for name in load_file(folder / "model.safetensors") if name.startswith("tail")]
        assert (len(same), all(same), len(stored)) == (9, not trained, 9 if trained else 0)


def test_trained_copies_begin_as_the_targets_layers_and_keep_their_number(tiny_drafter, target):
    plain = load_checkpoint(tiny_drafter)
    assert isinstance(plain, MoADrafter)
    deeper = with_target_layers(plain, 1, trained=True)
    deeper.bind_target(target.embedding, target.head, target.layers)
    start_target_layers(
        deeper, plain.config, target.model, [(torch.tensor(TOKENS), target_states(target, TOKENS, deeper.reads))]
    )
    assert torch.equal(deeper.tail[0].mlp.up_proj.weight, target.layers[-1].mlp.up_proj.weight)
    assert with_target_layers(deeper, 1).config == deeper.config
    with refused("fixed_by_checkpoint", ConfigError):
        with_target_layers(deeper, 2)


def test_a_row_grows_by_the_keys_and_values_of_each_layer(drafter):
    config = drafter.config
    assert config.kv_heads == 2 * (1 + config.target_layers)
    assert drafter.reads.kv_layers == (*config.lsa_layers, *range(4 - config.target_layers, 4))
    trained, frozen = (sum(each.numel() for each in parts) for parts in (drafter.parameters(), drafter.tail.buffers()))
    assert parameters_of(config) == (trained, frozen)


def test_what_an_older_version_wrote_opens_unless_it_has_first_layers(tiny_drafter, tmp_path):
    """A checkpoint, without the fields of later versions, and the record of a training run."""
    old, record = tmp_path / "old", tmp_path / "training.yaml"
    shutil.copytree(tiny_drafter, old)
    raw = json.loads((old / "config.json").read_text())
    del raw["target_layers"], raw["trained_target_layers"]
    (old / "config.json").write_text(json.dumps({**raw, "first_layers": 0}))
    record.write_text("settings: {steps: 2, first_layers: 0}")
    assert load_checkpoint(old).config == load_checkpoint(tiny_drafter).config
    assert read_settings(record) == {"steps": 2}
    (old / "config.json").write_text(json.dumps({**raw, "first_layers": 2}))
    record.write_text("settings: {steps: 2, first_layers: 2}")
    for opens in (lambda: load_checkpoint(old), lambda: read_settings(record)):
        with refused("unsupported"):
            opens()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"target_layers": 4}, "out_of_range"),
        ({"target_layers": -1}, "out_of_range"),
        ({"trained_target_layers": True}, "inconsistent"),
        ({"target_layers": 1, "final_norm": False}, "inconsistent"),
        ({"target_layers": 1, "decoder": LayerDims(64, 4, 1, 16, 128)}, "inconsistent"),
    ],
)
def test_impossible_target_layers_are_refused(tiny_drafter, changes, code):
    with refused(code, ConfigError):
        dataclasses.replace(load_checkpoint(tiny_drafter).config, **changes)


def test_a_target_with_other_layers_is_refused(tiny_drafter, target):
    drafter = MoADrafter(dataclasses.replace(load_checkpoint(tiny_drafter).config, target_layers=1))
    with refused("layers_missing", FitError):
        drafter.bind_target(target.embedding, target.head)
    biased = copy.deepcopy(target.layers[-1])
    biased.self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(64))
    with refused("unsupported_target", FitError, "self_attn.q_proj.bias"):
        drafter.bind_target(target.embedding, target.head, [biased])


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_target_with_scaled_positions_is_refused(target, kind):
    config = copy.deepcopy(target.model.config)
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": kind}
    with refused("unsupported_target", ConfigError, repr(kind)):
        config_for_target(config, draft_vocab_size=64, target_layers=1)
    assert config_for_target(config, draft_vocab_size=64).target_layers == 0
