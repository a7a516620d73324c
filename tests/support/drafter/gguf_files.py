"""Tiny targets as GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from safetensors.numpy import load_file

Tensors = dict[str, np.ndarray]


def write_gguf(
    target: Path,
    file: Path,
    *,
    architecture: str = "llama",
    parts: int = 1,
    change: Callable[[Tensors], object] = lambda tensors: None,
    add: Callable[[GGUFWriter], object] = lambda writer: None,
    kinds: Mapping[str, GGMLQuantizationType] = MappingProxyType({}),
) -> list[Path]:
    """Write a target such as that of :func:`tiny.make_tiny_target` as GGUF, with its tokenizer and template; return the
    files.

    Args:
        parts: files into which it is split; ``file`` gives the first words of their names then.
        change: is given the tensors by their names in GGUF, before they are written.
        kinds: types of ggml by part of a name; the others stay as they are.
        add: adds metadata.
    """
    config = json.loads((target / "config.json").read_text())
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    state = load_file(target / "model.safetensors")
    tensors = {names.get_name(name, (".weight", ".bias")): tensor for name, tensor in state.items()}
    for name, tensor in tensors.items():
        if architecture in ("llama", "granite") and ("attn_q." in name or "attn_k." in name):
            heads = config["num_attention_heads" if "attn_q." in name else "num_key_value_heads"]
            halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
            tensors[name] = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        if architecture.startswith("gemma") and "norm" in name:
            tensors[name] = tensor + 1
    change(tensors)
    writer = GGUFWriter(file, architecture, split_max_tensors=-(-len(tensors) // parts) if parts > 1 else 0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    bpe = json.loads((target / "tokenizer.json").read_text())
    special = {token["id"] for token in bpe["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(bpe["model"]["vocab"], key=bpe["model"]["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number in special else 1 for number in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in bpe["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template((target / "chat_template.jinja").read_text())
    add(writer)
    for name, tensor in tensors.items():
        kind = next((kind for part, kind in kinds.items() if part in name), None)
        writer.add_tensor(name, tensor if kind is None else quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(file.parent.glob(f"{file.stem}*.gguf"))
