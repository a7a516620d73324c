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
from moa_drafter.cli import main
from moa_drafter.config import ConfigError, DrafterConfig, FitError, LayerDims, config_for_target
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_drafter.target_features import Reads, target_states
from moa_drafter.training.batch import FutureLengths, packed_masks, row_limits
from moa_drafter.training.initialise import fit_to_target_layers, start_target_layers, with_target_layers
from moa_drafter.training.losses import forward_kl
from moa_drafter.training.settings import read_settings
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.errors import MoaError
from support.drafted import draft_of
from support.tiny import tiny_with_layers

TOKENS = torch.randint(3, 512, (26,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=["0", "1", "3", "2,trained"])
def drafter(request: pytest.FixtureRequest, tiny_drafter: Path, target: Target) -> MoADrafter:
    """With so many of the target's last layers."""
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
    """The drafter's best token behind ``prefix`` is that of the training forward."""
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


def test_a_chain_equals_the_training_forward_with_rows_arriving_between_rounds(
    target: Target, drafter: MoADrafter
) -> None:
    segments = [(7, 12), (12, 13), (13, 20), (20, 26)]
    limits = list(range(7))
    for start, stop in segments:
        limits += [start - 1] * (stop - start)
    logprobs = expected(target, drafter, TOKENS, limits)
    keys, values = rows_of(target, drafter, TOKENS)
    runtime = runtime_drafter(drafter)
    for start, stop in segments:
        runtime.add_rows(runtime.rows, keys[runtime.rows : start], values[runtime.rows : start])
        for position in range(start, stop):
            assert_next(drafter, runtime, TOKENS[: position + 1], logprobs[position])


@pytest.mark.parametrize("held", [-1, 0, 4])
def test_long_after_the_last_row_and_without_any(target: Target, drafter: MoADrafter, held: int) -> None:
    """Rows up to ``held`` and nothing more: prompt and answer are written by the device."""
    limits = [min(position, held) for position in range(len(TOKENS))]
    logprobs = expected(target, drafter, TOKENS, limits)
    assert torch.isfinite(logprobs).all()
    keys, values = rows_of(target, drafter, TOKENS)
    at_once = runtime_drafter(drafter)
    at_once.add_rows(0, keys[: held + 1], values[: held + 1])
    assert_next(drafter, at_once, TOKENS, logprobs[-1])
    stepwise = runtime_drafter(drafter)
    stepwise.add_rows(0, keys[: held + 1], values[: held + 1])
    for position in range(held + 1, len(TOKENS)):
        assert_next(drafter, stepwise, TOKENS[: position + 1], logprobs[position])


@pytest.mark.parametrize("held", [9, len(TOKENS) - 2])
def test_a_long_catch_up_goes_in_chunks(
    target: Target, drafter: MoADrafter, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk is given no rows of later tokens, whose places it does not have yet."""
    monkeypatch.setattr("moa_runtime.drafters.moa.CATCH_UP_TOKENS", 4)
    logprobs = expected(target, drafter, TOKENS, [min(position, held) for position in range(len(TOKENS))])
    keys, values = rows_of(target, drafter, TOKENS)
    runtime = runtime_drafter(drafter)
    runtime.add_rows(0, keys[: held + 1], values[: held + 1])
    assert_next(drafter, runtime, TOKENS, logprobs[-1])


def test_rows_that_come_for_a_part_of_what_was_drafted_change_the_rest(target: Target, drafter: MoADrafter) -> None:
    """Tokens drafted on while a verdict was on its way are cached with fewer rows than there are now."""
    keys, values = rows_of(target, drafter, TOKENS)
    runtime = runtime_drafter(drafter)
    runtime.add_rows(0, keys[:7], values[:7])
    draft_of(runtime, TOKENS[:20], 3)
    runtime.add_rows(7, keys[7:12], values[7:12])
    limits = list(range(12)) + [11] * (len(TOKENS) - 12)
    assert_next(drafter, runtime, TOKENS[:20], expected(target, drafter, TOKENS[:20], limits[:20])[-1])
    # And back: rows that turn out to be of another past are forgotten.
    runtime.truncate_rows(9)
    limits = list(range(9)) + [8] * (len(TOKENS) - 9)
    assert_next(drafter, runtime, TOKENS[:20], expected(target, drafter, TOKENS[:20], limits[:20])[-1])


def test_a_node_of_a_tree_scores_like_the_chain_along_its_path(target: Target, drafter: MoADrafter) -> None:
    prefix = TOKENS[:9]
    keys, values = rows_of(target, drafter, prefix)
    runtime = MoaDrafter(torch_backend_of(drafter, top_k=3), max_context=128)
    runtime.add_rows(0, keys[:8], values[:8])
    tree = runtime.propose(prefix, Budget.tree(nodes=30, levels=4, width=3))
    assert tree.depth == 4 and len(tree.tokens) == 30
    own = {int(token): index for index, token in enumerate(drafter.draft_to_target)}
    for node in range(3, len(tree.tokens), 4):
        path = [node]
        while tree.parents[path[-1]]:
            path.append(tree.parents[path[-1]] - 1)
        drafted = [tree.tokens[step] for step in reversed(path)]
        logprobs = expected(target, drafter, prefix + drafted, list(range(8)) + [7] * (1 + len(drafted)))
        score = sum(float(logprobs[8 + depth, own[token]]) for depth, token in enumerate(drafted))
        assert tree.scores[node] == pytest.approx(score, abs=5e-4)


@pytest.mark.parametrize("copies", ["frozen", "trained"])
def test_training_leaves_the_targets_layers_alone_or_trains_copies(target: Target, tmp_path: Path, copies: str) -> None:
    torch.manual_seed(0)
    trained = new_drafter(
        "moa", target, draft_vocab_size=512, lsa_layers=2, target_layers=1, trained_target_layers=copies == "trained"
    )
    assert isinstance(trained, MoADrafter)
    trained.bind_target(target.embedding, target.head, target.layers)
    states = target_states(target, TOKENS, trained.reads)
    initialise(trained, target, [(torch.tensor(TOKENS), states)])
    limits = row_limits(5, len(TOKENS), FutureLengths(1, 6), random.Random(0))
    positions, self_mask, memory_mask = packed_masks([len(TOKENS)], limits)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-3)
    losses = []
    for _ in range(15):
        hidden = trained(torch.tensor(TOKENS), positions, states.kv, self_mask, memory_mask)
        loss = forward_kl(trained.logits(hidden), trained.logits(states.last))
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
    again = load_bound(tmp_path, target)
    assert isinstance(again, MoADrafter) and again.config.target_layers == 1 and len(again.tail) == 1
    with torch.no_grad():
        torch.testing.assert_close(
            again(torch.tensor(TOKENS), positions, states.kv, self_mask, memory_mask),
            trained(torch.tensor(TOKENS), positions, states.kv, self_mask, memory_mask),
        )


def test_training_in_bfloat16_stays_close(target: Target, drafter: MoADrafter) -> None:
    positions, self_mask, memory_mask = packed_masks([26], [min(n, 8) for n in range(26)])
    states = target_states(target, TOKENS, drafter.reads)
    arguments = torch.tensor(TOKENS), positions, states.kv, self_mask, memory_mask
    exact = drafter(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = drafter(*arguments)
        rounded.float().square().mean().backward()
    assert torch.nn.functional.cosine_similarity(rounded.float(), exact, dim=-1).min() > 0.97
    assert all(parameter.grad is not None for parameter in drafter.Ekv2E.parameters())
    drafter.zero_grad()


def test_a_trained_drafter_goes_on_with_target_layers(target: Target, tiny_drafter: Path) -> None:
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


def test_moa_train_goes_on_with_target_layers(target: Target, tiny_drafter: Path, tmp_path: Path) -> None:
    store = tmp_path / "tokens.jsonl"
    store.write_text(
        "".join(json.dumps({"p": TOKENS[n : n + 5], "r": TOKENS[n + 5 : n + 17]}) + "\n" for n in range(9))
    )
    command = ["--model", str(target.folder), "--data", str(store), "--steps", "2"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*command, "--init", str(tiny_drafter), "--target-layers", "1", "--out", str(first)]) == 0
    config = load_checkpoint(first / "drafter").config
    assert config.target_layers == 1 and not config.trained_target_layers
    assert main([*command, "--init", str(first / "drafter"), "--train-target-layers", "--out", str(second)]) == 0
    config = load_checkpoint(second / "drafter").config
    assert config.target_layers == 1 and config.trained_target_layers


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
    with pytest.raises(ConfigError, match="trained copies of the target's layers: their number cannot be changed"):
        with_target_layers(deeper, 2)
    with pytest.raises(ConfigError, match="not of eagle"):
        new_drafter("eagle", target, draft_vocab_size=64, target_layers=1)


def test_a_row_grows_by_the_keys_and_values_of_each_layer(drafter: MoADrafter) -> None:
    config = drafter.config
    assert config.kv_heads == 2 * (1 + config.target_layers)
    assert drafter.reads.kv_layers == (*config.lsa_layers, *range(4 - config.target_layers, 4))
    assert drafter.frozen_parameters == sum(p.numel() for layer in drafter.tail for p in layer.buffers())


def test_a_configuration_without_the_field_has_no_target_layers(drafter: MoADrafter) -> None:
    raw = json.loads(drafter.config.to_json())
    del raw["target_layers"], raw["trained_target_layers"]
    plain = DrafterConfig.from_mapping(raw)
    assert not plain.target_layers and not plain.trained_target_layers


def test_what_an_older_version_wrote_opens_unless_it_has_first_layers(tiny_drafter: Path, tmp_path: Path) -> None:
    """A checkpoint, and the record of a training run."""
    old, record = tmp_path / "old", tmp_path / "training.yaml"
    shutil.copytree(tiny_drafter, old)
    raw = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps({**raw, "first_layers": 0}))
    record.write_text("settings: {steps: 2, first_layers: 0}")
    assert load_checkpoint(old).config == load_checkpoint(tiny_drafter).config
    assert read_settings(record) == {"steps": 2}
    (old / "config.json").write_text(json.dumps({**raw, "first_layers": 2}))
    record.write_text("settings: {steps: 2, first_layers: 2}")
    for opens in (lambda: load_checkpoint(old), lambda: read_settings(record)):
        with pytest.raises(MoaError, match="first_layers must be 0"):
            opens()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layers": 4}, "must lie in 0..3"),
        ({"target_layers": -1}, "must lie in 0..3"),
        ({"trained_target_layers": True}, "no layer of the target to train"),
        ({"target_layers": 1, "final_norm": False}, "set final_norm"),
        ({"target_layers": 1, "decoder": LayerDims(64, 4, 1, 16, 128)}, "a decoder of its shape"),
    ],
)
def test_what_cannot_be_is_refused(tiny_drafter: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(load_checkpoint(tiny_drafter).config, **changes)


def test_a_target_with_other_layers_is_refused(tiny_drafter: Path, target: Target) -> None:
    drafter = MoADrafter(dataclasses.replace(load_checkpoint(tiny_drafter).config, target_layers=1))
    with pytest.raises(FitError, match="bind them too"):
        drafter.bind_target(target.embedding, target.head)
    biased = copy.deepcopy(target.layers[-1])
    biased.self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(64))
    with pytest.raises(FitError, match=r"self_attn\.q_proj\.bias"):
        drafter.bind_target(target.embedding, target.head, [biased])


@pytest.mark.parametrize("scaling", [{"rope_type": "llama3"}, {"rope_type": "yarn"}])
def test_a_target_with_scaled_positions_is_refused(target: Target, scaling: dict[str, str]) -> None:
    config = copy.deepcopy(target.model.config)
    config.rope_parameters = {"rope_theta": 10000.0, **scaling}
    with pytest.raises(ConfigError, match=f"this one has '{scaling['rope_type']}' positions"):
        config_for_target(config, draft_vocab_size=64, target_layers=1)
    assert config_for_target(config, draft_vocab_size=64).target_layers == 0
