"""The drafter's modules, its configuration and its checkpoints, ours and in the layout of the paper's authors."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moa_drafter.checkpoint import load_bound, load_checkpoint, save_checkpoint
from moa_drafter.config import CheckpointError, ConfigError, DrafterConfig, LayerDims
from moa_drafter.drafter_weights import published_config
from moa_drafter.llama import DecoderLayer, rotary_angles
from moa_drafter.model import MoADrafter
from random_target import SHAPES, published_drafter
from support import tiny
from support.refusals import refused


@pytest.mark.parametrize("training", [False, True])  # training has a fused attention
def test_our_decoder_layer_computes_what_transformers_does(training):
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


def test_a_head_of_the_whole_vocabulary_is_the_targets_own_memory(tiny_drafter, target):
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


def test_memory_rows_depend_on_their_own_token_alone(tiny_drafter):
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
def saved(tiny_drafter, tmp_path):
    save_checkpoint(load_checkpoint(tiny_drafter), tmp_path / "run" / "drafter")
    return tmp_path / "run" / "drafter"


def test_a_checkpoint_comes_back(tiny_drafter, saved):
    drafter, again = load_checkpoint(tiny_drafter), load_checkpoint(saved)
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor)


def test_sharpness_multiplies_the_logits(tiny_drafter, target, tmp_path):
    drafter = load_checkpoint(tiny_drafter)
    drafter.config = dataclasses.replace(drafter.config, sharpness=1.5)
    save_checkpoint(drafter, tmp_path / "sharp")
    plain, sharp = load_bound(tiny_drafter, target), load_bound(tmp_path / "sharp", target)
    hidden = torch.randn(3, target.model.config.hidden_size)
    (tokens, before), (same, after) = plain.candidates(hidden, 5), sharp.candidates(hidden, 5)
    assert torch.equal(tokens, same) and not torch.allclose(before, after)
    expected = (1.5 * plain.logits(hidden)).log_softmax(-1).topk(5).values
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)


def test_damaged_weights_are_named(saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with refused("damaged", CheckpointError, str(weights)):
        load_checkpoint(saved)
    weights.unlink()
    with refused("file_missing", CheckpointError):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.pop("Ekv2E.bias"), "(Ekv2E.bias)"),
        (lambda state: state.update(a=torch.ones(1), b=torch.ones(1)), "(a; b)"),
        (lambda state: state.update({"Ekv2E.bias": torch.ones(3)}), "(Ekv2E.bias [3], not [64])"),
    ],
)
def test_other_tensors_are_refused(saved, change, named):
    state = load_file(saved / "model.safetensors")
    change(state)
    save_file(state, saved / "model.safetensors")
    with refused("weights_differ", CheckpointError, named):
        load_checkpoint(saved)


def test_a_run_in_place_of_its_checkpoint_names_the_checkpoint(saved):
    with refused("unreadable", CheckpointError, str(saved)):
        load_checkpoint(saved.parent)


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
def test_a_wrong_configuration_is_named(saved, content, code, named):
    file = saved / "config.json"
    if isinstance(content, dict):
        content = json.dumps({**json.loads(file.read_text()), **content}).encode()
    file.write_bytes(content)
    with refused(code, CheckpointError, named):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("Ekv2E.bias", math.nan, "not_finite"),
        ("Ekv2E.bias", -math.inf, "not_finite"),
        ("Ekv2E.bias", 1j, "unsupported_type"),
        ("draft_to_target", 512, "out_of_range"),
        ("draft_to_target", -2, "out_of_range"),
    ],
)
def test_weights_that_cannot_draft_are_refused(saved, name, value, code):
    state = load_file(saved / "model.safetensors")
    if isinstance(value, complex):
        state[name] = state[name].to(torch.complex64)
    state[name][1] = value
    save_file(state, saved / "model.safetensors")
    with refused(code, CheckpointError, name):
        load_checkpoint(saved)


def test_an_impossible_configuration_is_refused():
    with refused("inconsistent", ConfigError):
        LayerDims(32, 5, 2, 8, 48)
    with refused("out_of_range", ConfigError):
        dataclasses.replace(published_drafter(), lsa_layers=(32,))


LAYERS, KV_HEADS, HEAD_DIM, HEADS = 3, 2, 16, 4
#: Small dimensions in the authors' layout.
DIMENSIONS = DrafterConfig(
    target_num_layers=LAYERS, target_kv_size=64, vocab_size=512, draft_vocab_size=512, lsa_layers=(0, 1, 2),
    decoder=LayerDims(64, HEADS, 1, 16, 96), layer_attention=LayerDims(64, HEADS, 2, 16, 48),
    final_norm=False, layer_scale=False,
)  # fmt: skip
#: The target's own configuration, as ``save_pretrained`` of the authors' training code writes it.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": 512,
    "rope_theta": 10000.0,
}
#: As their inference code wants it: ``num_attention_heads`` is the drafter's number of key-value heads there.
MOA_SPEC = {"model_type": "moa_spec", "num_attention_heads": 1, "head_dim": HEAD_DIM, "vocab_size": 512}


def random_state(dimensions: DrafterConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        parameters = dict(MoADrafter(dimensions).named_parameters())
    return {name: 0.3 * torch.randn(p.shape) for name, p in parameters.items()}


@pytest.fixture
def state():
    torch.manual_seed(0)
    return random_state(DIMENSIONS)


def written(folder: Path, state: dict[str, Tensor], config: dict = LLAMA) -> Path:
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", [LLAMA, {**MOA_SPEC, "target_num_layers": LAYERS, "rope_theta": 10000.0}])
def test_dimensions_are_read_off_the_tensors(tmp_path, state, config):
    assert load_checkpoint(written(tmp_path, state, config)).config == DIMENSIONS


def test_it_computes_on_keys_and_values_what_the_authors_compute_on_theirs(tmp_path, state):
    drafter = load_checkpoint(written(tmp_path, state))
    keys, values = torch.randn(2, 5, LAYERS, KV_HEADS, HEAD_DIM)
    # Theirs: key and value of one head side by side, head after head.
    x = torch.cat((keys, values), dim=-1).flatten(2)
    layer = DecoderLayer(drafter.config.layer_attention, 1e-5)
    own = {name.partition(".")[2]: t for name, t in state.items() if name.startswith("layer_self_attention.")}
    layer.load_state_dict(own)
    angles = rotary_angles(torch.arange(LAYERS), 16, 10000.0)
    expected = layer(x, *layer.keys_values(x, angles), angles).mean(1) @ state["Ekv2E.weight"].T + state["Ekv2E.bias"]
    ours = drafter.aggregate(torch.cat((keys.flatten(2), values.flatten(2)), dim=-1))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("target_num_layers", "missing_field"),
        ("cross_attention.mlp.up_proj.weight", "weights_differ"),
        ("Ekv2E.weight", "weights_differ"),
    ],
)
def test_a_missing_field_or_tensor_is_named(tmp_path, state, name, code):
    config = LLAMA if state.pop(name, None) is not None else MOA_SPEC
    with refused(code, CheckpointError, name):
        load_checkpoint(written(tmp_path, state, config))


@pytest.mark.parametrize("name", ["layer_self_attention.self_attn.o_proj.weight", "Ekv2E.weight"])
def test_other_shapes_are_refused(tmp_path, state, name):
    """Before heads are taken apart."""
    state[name] = torch.zeros(3)
    with refused("weights_differ", CheckpointError):
        load_checkpoint(written(tmp_path, state))


def exported(target: Path, drafter: Path, out: Path) -> tuple[str, float]:
    """Export for onnx; return the status of parity and the peak memory of this process (GB)."""
    import resource  # not on Windows

    from moa_export.pipeline import ExportSettings, export_bundle
    from moa_export.progress import Progress

    settings = ExportSettings(("onnx",), drafter, model=str(target), questions=["Name three colours."])
    report = export_bundle(out, settings, Progress(sys.stderr, quiet=True))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return report.made["onnx"].proof.checks["parity"]["status"], most / 1e9


@pytest.mark.slow
def test_the_published_dimensions_export_on_a_laptop(tmp_path):
    """Random weights, and a target of two layers with Llama 3's sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    target = tiny.make_tiny_target(tmp_path / "target")  # for its tokenizer and template
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES["llama-3-8b"] | {"num_hidden_layers": 2}, eos_token_id=2))
    model = model.to_empty(device="cpu").bfloat16()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(target)
    del model
    folder = tmp_path / "drafter"
    folder.mkdir()
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2, "vocab_size": 128256}
    # Small enough that the sums of 4,096 products stay near 1, as a trained drafter's do.
    state = {name: (tensor / 20).bfloat16() for name, tensor in random_state(published_drafter()).items()}
    written(folder, state, {**LLAMA, **sizes, "rope_theta": 500000.0})
    # In a process of its own, whose memory is that of the export alone.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        parity, most_memory = process.submit(exported, target, folder, tmp_path / "bundle").result()
    assert parity == "passed"
    assert most_memory < 12


def test_the_published_shapes_give_the_published_dimensions():
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in MoADrafter(published_drafter()).named_parameters()}
    assert (shapes["Ekv2E.weight"], shapes["self_attention.self_attn.k_proj.weight"]) == ((4096, 2048), (512, 4096))
    config = {**LLAMA, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 128256, "rope_theta": 500000.0}
    assert published_config(config, shapes) == published_drafter()
