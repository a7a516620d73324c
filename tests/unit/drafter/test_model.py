"""The drafter's modules, its configuration and its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moa_drafter.checkpoint import load_checkpoint, save_checkpoint
from moa_drafter.config import CheckpointError, ConfigError, DrafterConfig, LayerDims
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from random_target import published_drafter


def test_names_and_shapes_are_those_of_the_published_checkpoint() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in MoADrafter(published_drafter()).named_parameters()}
    assert shapes["Ekv2E.weight"] == (4096, 2048)
    assert shapes["Ekv2E.bias"] == (4096,)
    assert shapes["self_attention.self_attn.k_proj.weight"] == (512, 4096)
    assert shapes["cross_attention.self_attn.q_proj.weight"] == (4096, 4096)
    assert shapes["cross_attention.mlp.gate_proj.weight"] == (6144, 4096)
    assert shapes["layer_self_attention.self_attn.k_proj.weight"] == (512, 2048)
    assert shapes["layer_self_attention.mlp.down_proj.weight"] == (2048, 3072)
    assert not any(name.startswith(("norm.", "layer_scale")) for name in shapes)


@pytest.mark.parametrize("training", [False, True])  # training has a fused attention
def test_our_decoder_layer_computes_what_transformers_does(training: bool) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    from moa_drafter.llama import DecoderLayer, rotary_angles

    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        rms_norm_eps=1e-5, attn_implementation="eager",
    )  # fmt: skip
    theirs = LlamaDecoderLayer(config, 0).eval()
    ours = DecoderLayer(LayerDims(32, 4, 2, 8, 48), 1e-5).train(training)
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(7, 32), torch.arange(3, 10)
    causal = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    rope = LlamaRotaryEmbedding(config)(x, positions[None])
    expected = theirs(x[None], attention_mask=causal, position_embeddings=rope)
    expected = expected[0] if isinstance(expected, tuple) else expected
    angles = rotary_angles(positions, 8, 10000.0)
    got = ours(x, *ours.keys_values(x, angles), angles, causal[0, 0] == 0)
    torch.testing.assert_close(got, expected.reshape(7, 32), rtol=1e-4, atol=1e-5)
    weight = torch.randn(7, 32)
    for result in (got, expected.reshape(7, 32)):
        (result * weight).sum().backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs.get_parameter(name).grad, rtol=1e-4, atol=1e-4)


def test_a_head_of_the_whole_vocabulary_is_the_targets_own_memory(tiny_drafter: Path, target: Target) -> None:
    config = dataclasses.replace(load_checkpoint(tiny_drafter).config, draft_vocab_size=512)
    drafter = MoADrafter(config)
    drafter.bind_target(target.embedding, target.head)
    assert drafter.head.data_ptr() == target.head.data_ptr()
    # All tokens in another order have to be picked, and so has a part in order.
    drafter.draft_to_target.copy_(torch.arange(512).flip(0))
    drafter.bind_target(target.embedding, target.head)
    assert torch.equal(drafter.head, target.head.flip(0))
    part = MoADrafter(dataclasses.replace(config, draft_vocab_size=300))
    part.bind_target(target.embedding, target.head)
    assert torch.equal(part.head, target.head[:300])


def test_memory_rows_depend_on_their_own_token_alone(tiny_drafter: Path) -> None:
    drafter = load_checkpoint(tiny_drafter)
    config = drafter.config
    torch.manual_seed(0)
    kv = torch.randn(5, len(config.lsa_layers), config.target_kv_size)
    positions = torch.arange(5)
    whole = drafter.memory_rows(kv, positions)
    alone = drafter.memory_rows(kv[3:4], positions[3:4])
    for all_rows, row in zip(whole, alone, strict=True):
        torch.testing.assert_close(all_rows[3:4], row, rtol=1e-4, atol=1e-5)
    moved = drafter.memory_rows(kv[3:4], positions[4:5])
    assert not torch.allclose(moved[0], alone[0])  # keys turn with the position,
    torch.testing.assert_close(moved[1], alone[1])  # values do not


def test_checkpoint_round_trip(tiny_drafter: Path, tmp_path: Path) -> None:
    drafter = load_checkpoint(tiny_drafter)
    save_checkpoint(drafter, tmp_path / "copy")
    again = load_checkpoint(tmp_path / "copy")
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor)


@pytest.mark.parametrize("damage", ["truncated", "no config", "no weights", "not json"])
def test_a_damaged_checkpoint_is_named(tiny_drafter: Path, tmp_path: Path, damage: str) -> None:
    save_checkpoint(load_checkpoint(tiny_drafter), tmp_path)
    weights = tmp_path / "model.safetensors"
    expected = {
        "truncated": "may be truncated",
        "no config": r"cannot read the drafter's config.json in .*: No such file or directory; expected a folder",
        "no weights": "has no model.safetensors: expected a folder written by moa-train",
        "not json": "no JSON",
    }[damage]
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "no config":
        (tmp_path / "config.json").unlink()
    elif damage == "no weights":
        weights.unlink()
    else:
        (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=expected):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\xff", "it is no UTF-8 text"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "expected one JSON object"),
        ({"colour": 1}, "the field 'colour' is unknown"),
        ({"vocab_size": None}, "vocab_size must be a whole number from 0 on, not None"),
        ({"target_kv_size": 64.0}, "target_kv_size must be a whole number from 0 on, not 64.0"),
        ({"target_layers": True}, "target_layers must be a whole number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a positive number, not 'x'"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive number"),
        ({"final_norm": 1}, "final_norm must be true or false"),
        ({"target_fingerprint": 5}, "target_fingerprint must be a string"),
        ({"lsa_layers": "123"}, "lsa_layers must be a list of whole numbers"),
        ({"decoder": [1]}, "decoder must be an object"),
        ({"decoder": {}}, "the field 'decoder.hidden_size' is missing"),
    ],
)
def test_a_configuration_of_other_kinds_is_named(
    tiny_drafter: Path, tmp_path: Path, content: bytes | dict, said: str
) -> None:
    save_checkpoint(load_checkpoint(tiny_drafter), tmp_path)
    file = tmp_path / "config.json"
    if isinstance(content, dict):
        content = json.dumps({**json.loads(file.read_text()), **content}).encode()
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("Ekv2E.bias", math.nan, "'Ekv2E.bias' holds something else than finite real numbers"),
        ("Ekv2E.bias", -math.inf, "'Ekv2E.bias' holds something else than finite real numbers"),
        ("Ekv2E.bias", 1j, "'Ekv2E.bias' holds something else than finite real numbers"),
        ("draft_to_target", 512, r"draft_to_target must hold tokens from 0 to 511, not 512"),
        ("draft_to_target", -2, r"draft_to_target must hold tokens from 0 to 511, not -2"),
    ],
)
def test_weights_that_cannot_draft_are_refused(
    tiny_drafter: Path, tmp_path: Path, name: str, value: complex, said: str
) -> None:
    save_checkpoint(load_checkpoint(tiny_drafter), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    if isinstance(value, complex):
        state[name] = state[name].to(torch.complex64)
    state[name][1] = value
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(tmp_path)


def test_a_run_in_place_of_its_checkpoint_says_where_that_is(tiny_drafter: Path, tmp_path: Path) -> None:
    save_checkpoint(load_checkpoint(tiny_drafter), tmp_path / "run" / "drafter")
    with pytest.raises(CheckpointError, match=r"name the checkpoint of the run, .*run.drafter"):
        load_checkpoint(tmp_path / "run")


def test_a_configuration_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of num_kv_heads"):
        LayerDims(32, 5, 2, 8, 48)
    config = published_drafter()
    with pytest.raises(ConfigError, match="lsa_layers"):
        DrafterConfig(**{**vars(config), "lsa_layers": (32,)})
    assert DrafterConfig.from_mapping(json.loads(config.to_json())) == config
