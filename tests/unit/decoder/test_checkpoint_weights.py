"""Weights of a folder with config.json and safetensors, and rounding as exports do it."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from transformers import AutoModelForCausalLM

from moa_decoder.checkpoint_weights import CheckpointWeights, SafetensorsFile
from moa_decoder.errors import TargetError
from moa_export.quantize import round_symmetric
from support.refusals import refused


def fused(state):
    """The tensors of a Llama as Phi 3 has them."""
    for name in [name for name in state if name.endswith(("q_proj.weight", "gate_proj.weight"))]:
        parts = ("q_proj", "k_proj", "v_proj") if "q_proj" in name else ("gate_proj", "up_proj")
        joined = [state.pop(name.replace(parts[0], part)) for part in parts]
        state[name.replace(parts[0], "qkv_proj" if "q_proj" in name else "gate_up_proj")] = np.concatenate(joined)


@pytest.mark.parametrize("kind", ["llama", "phi3", "gemma", "bfloat16", "sharded"])
def test_weights_are_those_of_the_tensors(tiny_target, tmp_path, kind):
    """Fused matrices are cut, norms have what their family adds, and embeddings are multiplied."""
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    state = load_file(folder / "model.safetensors")
    wanted = dict(state)
    config = json.loads((folder / "config.json").read_text())
    if kind == "phi3":
        fused(state)
    if kind in ("phi3", "gemma"):
        config = {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")}
        (folder / "config.json").write_text(json.dumps({**config, "model_type": kind, "tie_word_embeddings": False}))
    if kind == "bfloat16":
        half = {name: torch.from_numpy(tensor).bfloat16() for name, tensor in state.items()}
        save_torch(half, folder / "model.safetensors")
        wanted = {name: tensor.float().numpy() for name, tensor in half.items()}
    elif kind == "sharded":
        (folder / "model.safetensors").unlink()
        names = sorted(state)
        for number, part in enumerate((names[:20], names[20:])):
            save_file({name: state[name] for name in part}, folder / f"model-{number}.safetensors")
        index = {name: f"model-{int(name not in names[:20])}.safetensors" for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        save_file(state, folder / "consolidated.safetensors")  # another program's copy
    else:
        save_file(state, folder / "model.safetensors")
    weights, more = CheckpointWeights(folder), np.float32(kind == "gemma")
    for role, name in {"k": "self_attn.k_proj", "up": "mlp.up_proj", "out": "self_attn.o_proj"}.items():
        assert np.array_equal(weights.matrix(2, role).dense(), wanted[f"model.layers.2.{name}.weight"])
    assert np.array_equal(weights.vector(1, "attention_norm"), wanted["model.layers.1.input_layernorm.weight"] + more)
    assert np.array_equal(weights.last_norm(), wanted["model.norm.weight"] + more)
    assert np.array_equal(weights.head().dense(), wanted["lm_head.weight"])
    scale = np.float32(8 if kind == "gemma" else 1)
    assert np.array_equal(weights.embed([7, 3]), wanted["model.embed_tokens.weight"][[7, 3]] * scale)


@pytest.mark.parametrize("own", [True, False])
def test_a_head_beside_a_tied_embedding_is_transformers_one(tiny_target, tmp_path, own):
    """It is taken if it differs, whatever the configuration says."""
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    state, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    if not own:
        save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert np.array_equal(CheckpointWeights(folder).head().dense(), model.get_output_embeddings().weight.detach())
    assert own != np.array_equal(model.get_output_embeddings().weight.detach(), state["model.embed_tokens.weight"])


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_that_of_exports(tiny_target, bits):
    weights, exact = CheckpointWeights(tiny_target, bits), CheckpointWeights(tiny_target)
    matrix = weights.matrix(0, "down")
    codes, scales = round_symmetric(torch.from_numpy(exact.matrix(0, "down").dense()), bits, 32)
    wanted = codes.float().unflatten(1, (-1, 32)) * scales.float()[..., None]
    assert matrix.bits == bits and np.array_equal(matrix.dense(), wanted.flatten(1).numpy())
    assert weights.head().bits == 8 and np.array_equal(weights.embed([5]), exact.embed([5]))


def test_a_folder_of_other_tensors_is_refused(tiny_target, tmp_path):
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    state = load_file(folder / "model.safetensors")
    computed = {"model.rotary_emb.inv_freq": np.ones(8, np.float32)}
    save_file({**state, **computed}, folder / "model.safetensors")
    CheckpointWeights(folder)
    save_file({**state, "x": state["model.norm.weight"]}, folder / "model.safetensors")
    with refused("weights_differ", TargetError, "(x)"):
        CheckpointWeights(folder)
    save_file({**state, "model.norm.weight": np.ones(64, np.int8)}, folder / "model.safetensors")
    with refused("unsupported_type", TargetError, "I8"):
        CheckpointWeights(folder).last_norm()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "x.safetensors"}}')
    with refused("file_missing", TargetError, "x.safetensors"):
        CheckpointWeights(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with refused("unreadable", TargetError):
        CheckpointWeights(folder)


def test_damage_is_told_in_a_sentence(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.float16([1])}, path)
    content, chance = path.read_bytes(), random.Random(0)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with refused("damaged", TargetError):
            SafetensorsFile(path)
    for at in range(len(content) - 26):
        path.write_bytes(content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :])
        try:
            tensors = SafetensorsFile(path).tensors
        except TargetError as error:
            assert error.code == "damaged" and "\n" not in str(error)
        else:
            assert all(len(tensor.first_row()) <= 32 for tensor in tensors.values())
