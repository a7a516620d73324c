"""Target layer inference: the training forward, the device half and the target's own layers agree."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moa_drafter.architectures.registry import initialise, new_drafter, torch_backend_of
from moa_drafter.checkpoint import load_bound, load_checkpoint, save_checkpoint
from moa_drafter.config import ConfigError, FitError, LayerDims, config_for_target
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_drafter.target_features import Reads, target_states
from moa_drafter.training.batch import FutureLengths, packed_masks, row_limits
from moa_drafter.training.initialise import fit_to_target_layers, start_target_layers, with_target_layers
from moa_drafter.training.losses import forward_kl
from moa_drafter.training.settings import read_settings
from moa_runtime.drafters.moa import MoaDrafter
from support.drafted import draft_of
from support.drafter.training_data import moa_train
from support.refusals import refused
from support.tiny import tiny_with_layers

TOKENS = torch.randint(3, 512, (26,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=["0", "1", "3", "2,trained"])
def drafter(request: pytest.FixtureRequest, tiny_drafter: Path, target: Target) -> MoADrafter:
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


@torch.no_grad()
def rows_of(target: Target, drafter: MoADrafter, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    keys, values = drafter.rows(target_states(target, tokens, drafter.reads), torch.arange(len(tokens)))
    return keys.numpy(), values.numpy()


def runtime_drafter(drafter: MoADrafter) -> MoaDrafter:
    return MoaDrafter(torch_backend_of(drafter, top_k=drafter.config.draft_vocab_size), max_context=128)


def assert_next(drafter: MoADrafter, runtime: MoaDrafter, prefix: list[int], logprobs: torch.Tensor) -> None:
    """The drafter's best token after ``prefix`` is that of the training forward."""
    (drafted,) = draft_of(runtime, prefix, 1)
    best = logprobs.max(0)
    assert drafted.logprob == pytest.approx(float(best.values), abs=2e-4)
    assert drafted.token == int(drafter.draft_to_target[best.indices])


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 3])
def test_the_tail_computes_what_the_target_does(tiny_drafter: Path, target: Target, count: int) -> None:
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
def test_a_text_long_after_the_last_row_or_without_any(
    target: Target, drafter: MoADrafter, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows up to ``held`` alone, with the rest at once, in chunks without rows of later tokens, and token by token."""
    logprobs = expected(target, drafter, TOKENS, [min(position, held) for position in range(len(TOKENS))])
    assert torch.isfinite(logprobs).all()
    keys, values = rows_of(target, drafter, TOKENS)
    at_once, in_chunks, stepwise = (runtime_drafter(drafter) for _ in range(3))
    for runtime in (at_once, in_chunks, stepwise):
        runtime.add_rows(0, keys[: held + 1], values[: held + 1])
    assert_next(drafter, at_once, TOKENS, logprobs[-1])
    for position in range(held + 1, len(TOKENS)):
        assert_next(drafter, stepwise, TOKENS[: position + 1], logprobs[position])
    monkeypatch.setattr("moa_runtime.drafters.moa.CATCH_UP_TOKENS", 4)
    assert_next(drafter, in_chunks, TOKENS, logprobs[-1])


@pytest.mark.parametrize("copies", ["frozen", "trained"])
def test_training_leaves_the_targets_layers_alone_or_trains_copies(target: Target, tmp_path: Path, copies: str) -> None:
    torch.manual_seed(0)
    trained = new_drafter(
        "moa", target, draft_vocab_size=512, lsa_layers=2, target_layers=1, trained_target_layers=copies == "trained"
    )
    trained.bind_target(target.embedding, target.head, target.layers)
    states = target_states(target, TOKENS, trained.reads)
    initialise(trained, target, [(torch.tensor(TOKENS), states)])
    limits = row_limits(5, len(TOKENS), FutureLengths(1, 6), random.Random(0))
    positions, *masks = packed_masks([len(TOKENS)], limits)
    arguments = torch.tensor(TOKENS), positions, states.kv, *masks
    optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-3)
    losses = []
    for _ in range(15):
        loss = forward_kl(trained.logits(trained(*arguments)), trained.logits(states.last))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    tail = {**trained.tail[0].state_dict(), **dict(trained.tail[0].named_buffers())}
    same = [torch.equal(tensor, target.layers[-1].state_dict()[name]) for name, tensor in tail.items()]
    assert same == [copies == "frozen"] * 9
    save_checkpoint(trained, tmp_path, dtype=torch.float32)
    stored = [name for name in load_file(tmp_path / "model.safetensors") if name.startswith("tail")]
    assert len(stored) == (9 if copies == "trained" else 0)
    with torch.no_grad():
        torch.testing.assert_close(load_bound(tmp_path, target)(*arguments), trained(*arguments))


def test_training_in_bfloat16_stays_close(target: Target, drafter: MoADrafter) -> None:
    positions, self_mask, memory_mask = packed_masks([26], [min(n, 8) for n in range(26)])
    states = target_states(target, TOKENS, drafter.reads)
    arguments = torch.tensor(TOKENS), positions, states.kv, self_mask, memory_mask
    exact = drafter(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = drafter(*arguments)
    assert torch.nn.functional.cosine_similarity(rounded.float(), exact, dim=-1).min() > 0.97


def test_a_trained_drafter_continues_with_target_layers(target: Target, tiny_drafter: Path) -> None:
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


def test_moa_train_continues_with_target_layers(target: Target, tiny_drafter: Path, tmp_path: Path) -> None:
    store = tmp_path / "tokens.jsonl"
    texts = [{"p": TOKENS[n : n + 5], "r": TOKENS[n + 5 : n + 17]} for n in range(9)]
    store.write_text("".join(json.dumps(text) + "\n" for text in texts))
    init = tiny_drafter
    for flags, trained in ((("--target-layers", 1), False), (("--train-target-layers",), True)):
        out = tmp_path / f"trained-{trained}"
        command = ["--model", target.folder, "--data", store, "--steps", 2, "--init", init, *flags]
        assert moa_train(out, *command) == 0
        init = out / "drafter"
        config = load_checkpoint(init).config
        assert config.target_layers == 1 and config.trained_target_layers == trained


def test_trained_copies_begin_as_the_targets_layers_and_keep_their_number(tiny_drafter: Path, target: Target) -> None:
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


def test_a_row_grows_by_the_keys_and_values_of_each_layer(drafter: MoADrafter) -> None:
    config = drafter.config
    assert config.kv_heads == 2 * (1 + config.target_layers)
    assert drafter.reads.kv_layers == (*config.lsa_layers, *range(4 - config.target_layers, 4))
    assert drafter.frozen_parameters == sum(p.numel() for layer in drafter.tail for p in layer.buffers())


def test_what_an_older_version_wrote_opens_unless_it_has_first_layers(tiny_drafter: Path, tmp_path: Path) -> None:
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
def test_impossible_target_layers_are_refused(tiny_drafter: Path, changes: dict[str, object], code: str) -> None:
    with refused(code, ConfigError):
        dataclasses.replace(load_checkpoint(tiny_drafter).config, **changes)


def test_a_target_with_other_layers_is_refused(tiny_drafter: Path, target: Target) -> None:
    drafter = MoADrafter(dataclasses.replace(load_checkpoint(tiny_drafter).config, target_layers=1))
    with refused("layers_missing", FitError):
        drafter.bind_target(target.embedding, target.head)
    biased = copy.deepcopy(target.layers[-1])
    biased.self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(64))
    with refused("unsupported_target", FitError) as caught:
        drafter.bind_target(target.embedding, target.head, [biased])
    assert "self_attn.q_proj.bias" in str(caught.value)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_target_with_scaled_positions_is_refused(target: Target, kind: str) -> None:
    config = copy.deepcopy(target.model.config)
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": kind}
    with refused("unsupported_target", ConfigError) as caught:
        config_for_target(config, draft_vocab_size=64, target_layers=1)
    assert repr(kind) in str(caught.value)
    assert config_for_target(config, draft_vocab_size=64).target_layers == 0
