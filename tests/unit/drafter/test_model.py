"""The drafter's modules, its configuration and its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moa_drafter.checkpoint import load_bound, load_checkpoint, save_checkpoint
from moa_drafter.config import CheckpointError, ConfigError, DrafterConfig, LayerDims
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from random_target import published_drafter
from support.refusals import refused
from support.tiny import make_tiny_rival


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
    torch.manual_seed(0)
    kv, positions = torch.randn(5, len(drafter.config.lsa_layers), drafter.config.target_kv_size), torch.arange(5)
    whole = drafter.memory_rows(kv, positions)
    alone = drafter.memory_rows(kv[3:4], positions[3:4])
    for all_rows, row in zip(whole, alone, strict=True):
        torch.testing.assert_close(all_rows[3:4], row, rtol=1e-4, atol=1e-5)
    moved = drafter.memory_rows(kv[3:4], positions[4:5])
    assert not torch.allclose(moved[0], alone[0])  # keys turn with the position,
    torch.testing.assert_close(moved[1], alone[1])  # values do not


@pytest.fixture
def saved(tiny_drafter: Path, tmp_path: Path) -> Path:
    save_checkpoint(load_checkpoint(tiny_drafter), tmp_path / "run" / "drafter")
    return tmp_path / "run" / "drafter"


def test_a_checkpoint_comes_back(tiny_drafter: Path, saved: Path) -> None:
    drafter, again = load_checkpoint(tiny_drafter), load_checkpoint(saved)
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor)


@pytest.mark.parametrize("architecture", ["moa", "eagle", "independent"])
def test_sharpness_multiplies_the_logits(
    tiny_target: Path, tiny_drafter: Path, target: Target, tmp_path: Path, architecture: str
) -> None:
    folder = tiny_drafter if architecture == "moa" else make_tiny_rival(architecture, tiny_target, tmp_path / "plain")
    drafter = load_checkpoint(folder)
    drafter.config = dataclasses.replace(drafter.config, sharpness=1.5)
    save_checkpoint(drafter, tmp_path / "sharp")
    plain, sharp = load_bound(folder, target), load_bound(tmp_path / "sharp", target)
    hidden = torch.randn(3, target.model.config.hidden_size)
    (tokens, before), (same, after) = plain.candidates(hidden, 5), sharp.candidates(hidden, 5)
    assert torch.equal(tokens, same) and not torch.allclose(before, after)
    expected = (1.5 * plain.logits(hidden)).log_softmax(-1).topk(5).values
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)


def test_damaged_weights_are_named(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with refused("damaged", CheckpointError) as caught:
        load_checkpoint(saved)
    assert str(weights) in str(caught.value)
    weights.unlink()
    with refused("file_missing", CheckpointError):
        load_checkpoint(saved)


def test_a_run_in_place_of_its_checkpoint_names_the_checkpoint(saved: Path) -> None:
    with refused("unreadable", CheckpointError) as caught:
        load_checkpoint(saved.parent)
    assert str(saved) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        (b"\xff\xfe\xff", "not_utf8", "config.json"),
        (b"{", "not_json", "config.json"),
        (b"[" * 100_000, "not_json", "config.json"),
        (b"[]", "wrong_type", "config.json"),
        ({"colour": 1}, "unknown_field", "'colour'"),
        ({"vocab_size": None}, "wrong_type", "vocab_size"),
        ({"target_kv_size": 64.0}, "wrong_type", "64.0"),
        ({"target_layers": True}, "wrong_type", "target_layers"),
        ({"rms_norm_eps": "x"}, "wrong_type", "'x'"),
        ({"rope_theta": float("inf")}, "wrong_type", "rope_theta"),
        ({"sharpness": 0}, "wrong_type", "sharpness"),
        ({"final_norm": 1}, "wrong_type", "final_norm"),
        ({"target_fingerprint": 5}, "wrong_type", "target_fingerprint"),
        ({"lsa_layers": "123"}, "wrong_type", "lsa_layers"),
        ({"decoder": [1]}, "wrong_type", "decoder"),
        ({"decoder": {}}, "missing_field", "'decoder.hidden_size'"),
        ({"draft_vocab_size": 0}, "out_of_range", "draft_vocab_size"),
        ({"architecture": "hydra"}, "unknown_arch", "'hydra'"),
    ],
)
def test_a_wrong_configuration_is_named(saved: Path, content: bytes | dict, code: str, named: str) -> None:
    file = saved / "config.json"
    if isinstance(content, dict):
        content = json.dumps({**json.loads(file.read_text()), **content}).encode()
    file.write_bytes(content)
    with refused(code, CheckpointError) as caught:
        load_checkpoint(saved)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("Ekv2E.bias", math.nan, "not_finite"),
        ("Ekv2E.bias", -math.inf, "not_finite"),
        ("Ekv2E.bias", 1j, "not_finite"),
        ("draft_to_target", 512, "out_of_range"),
        ("draft_to_target", -2, "out_of_range"),
    ],
)
def test_weights_that_cannot_draft_are_refused(saved: Path, name: str, value: complex, code: str) -> None:
    state = load_file(saved / "model.safetensors")
    if isinstance(value, complex):
        state[name] = state[name].to(torch.complex64)
    state[name][1] = value
    save_file(state, saved / "model.safetensors")
    with refused(code, CheckpointError) as caught:
        load_checkpoint(saved)
    assert name in str(caught.value)


def test_an_impossible_configuration_is_refused() -> None:
    with refused("inconsistent", ConfigError):
        LayerDims(32, 5, 2, 8, 48)
    config = published_drafter()
    with refused("out_of_range", ConfigError):
        DrafterConfig(**{**vars(config), "lsa_layers": (32,)})
    assert DrafterConfig.from_mapping(json.loads(config.to_json())) == config
