"""Checkpoints in the layout of the paper's authors."""

from __future__ import annotations

import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moa_drafter.checkpoint import load_checkpoint, published_config
from moa_drafter.config import CheckpointError
from moa_drafter.llama import DecoderLayer, rotary_angles
from moa_drafter.model import MoADrafter
from random_target import published_drafter
from support.refusals import refused

HIDDEN, HEADS, HEAD_DIM, KV_HEADS, LAYERS, VOCAB = 64, 4, 16, 2, 3, 512
KV_SIZE = 2 * KV_HEADS * HEAD_DIM
#: The target's own configuration, as ``save_pretrained`` of the authors' training code writes it.
LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
}
#: As their inference code wants it: ``num_attention_heads`` is the drafter's number of key-value heads there.
MOA_SPEC = {"model_type": "moa_spec", "num_attention_heads": 1, "head_dim": HEAD_DIM, "vocab_size": VOCAB}


def decoder(name: str, width: int, kv_heads: int, ffn: int) -> dict[str, Tensor]:
    head_dim = width // HEADS
    shapes = {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (kv_heads * head_dim, width),
        "self_attn.v_proj.weight": (kv_heads * head_dim, width),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (ffn, width),
        "mlp.up_proj.weight": (ffn, width),
        "mlp.down_proj.weight": (width, ffn),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    return {f"{name}.{part}": 0.3 * torch.randn(shape) for part, shape in shapes.items()}


@pytest.fixture
def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        **decoder("self_attention", HIDDEN, 1, 96),
        **decoder("cross_attention", HIDDEN, 1, 96),
        **decoder("layer_self_attention", KV_SIZE, 2, 48),
        "Ekv2E.weight": torch.randn(HIDDEN, KV_SIZE),
        "Ekv2E.bias": torch.randn(HIDDEN),
    }


def written(folder: Path, state: dict[str, Tensor], config: dict = LLAMA) -> Path:
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", [LLAMA, {**MOA_SPEC, "target_num_layers": LAYERS, "rope_theta": 10000.0}])
def test_dimensions_are_read_off_the_tensors(tmp_path: Path, state: dict[str, Tensor], config: dict) -> None:
    drafter = load_checkpoint(written(tmp_path, state, config))
    dims = drafter.config
    assert (dims.decoder.num_heads, dims.decoder.num_kv_heads, dims.decoder.intermediate_size) == (4, 1, 96)
    assert (dims.layer_attention.num_kv_heads, dims.layer_attention.intermediate_size) == (2, 48)
    assert (dims.lsa_layers, dims.draft_vocab_size, dims.final_norm) == ((0, 1, 2), VOCAB, False)


def test_it_computes_on_keys_and_values_what_the_authors_compute_on_theirs(
    tmp_path: Path, state: dict[str, Tensor]
) -> None:
    drafter = load_checkpoint(written(tmp_path, state))
    keys, values = torch.randn(2, 5, LAYERS, KV_HEADS, HEAD_DIM)
    # Theirs: key and value of one head side by side, head after head.
    x = torch.cat((keys, values), dim=-1).flatten(2)
    layer = DecoderLayer(drafter.config.layer_attention, 1e-5)
    own = {name.partition(".")[2]: t for name, t in state.items() if name.startswith("layer_self_attention.")}
    layer.load_state_dict(own)
    angles = rotary_angles(torch.arange(LAYERS), KV_SIZE // HEADS, 10000.0)
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
def test_a_missing_field_or_tensor_is_named(tmp_path: Path, state: dict[str, Tensor], name: str, code: str) -> None:
    config = LLAMA if state.pop(name, None) is not None else MOA_SPEC
    with refused(code, CheckpointError) as caught:
        load_checkpoint(written(tmp_path, state, config))
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["layer_self_attention.self_attn.o_proj.weight", "Ekv2E.weight"])
def test_other_shapes_are_refused(tmp_path: Path, state: dict[str, Tensor], name: str) -> None:
    """Before heads are taken apart."""
    state[name] = torch.zeros(3)
    with refused("weights_differ", CheckpointError):
        load_checkpoint(written(tmp_path, state))


def published_state() -> dict[str, Tensor]:
    """Names and shapes of ``huawei-noah/MOASpec-Llama-3-8B-Instruct``, in bfloat16."""
    with torch.device("meta"):
        parameters = dict(MoADrafter(published_drafter()).named_parameters())
    return {name: (0.02 * torch.randn(p.shape)).bfloat16() for name, p in parameters.items()}


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
def test_the_published_dimensions_export_on_a_laptop(tmp_path: Path) -> None:
    """Random weights, and a target of two layers with Llama 3's sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from support import tiny

    target = tmp_path / "target"
    tiny.make_tiny_target(target)  # for its tokenizer and template
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").bfloat16()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(target)
    del model
    folder = tmp_path / "drafter"
    folder.mkdir()
    written(folder, published_state(), {**LLAMA, "hidden_size": 4096, "num_attention_heads": 32,
            "num_hidden_layers": 2, "vocab_size": 128256, "rope_theta": 500000.0})  # fmt: skip
    # In a process of its own, whose memory is that of the export alone.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        parity, most_memory = process.submit(exported, target, folder, tmp_path / "bundle").result()
    assert parity == "passed"
    assert most_memory < 12


def test_the_published_shapes_give_the_published_dimensions() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in MoADrafter(published_drafter()).named_parameters()}
    assert (shapes["Ekv2E.weight"], shapes["self_attention.self_attn.k_proj.weight"]) == ((4096, 2048), (512, 4096))
    config = {**LLAMA, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 128256, "rope_theta": 500000.0}
    assert published_config(config, shapes) == published_drafter()
