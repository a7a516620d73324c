"""Make targets and drafters with random weights in published shapes, directly on their device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from moa_drafter.config import DrafterConfig, LayerDims, config_for_target
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_runtime.manifest import TOKENIZER_FILE

#: Arguments of LlamaConfig.
SHAPES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}


def random_target(shape: str, device: str, dtype: torch.dtype) -> Target:
    """Make a target of one of :data:`SHAPES`, without a tokenizer; its weights are in memory only."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=8192, eos_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    folder = Path(tempfile.mkdtemp(prefix="random-target-"))
    (folder / TOKENIZER_FILE).write_text("{}")  # the engine computes its fingerprint
    return Target(folder, model.eval(), SimpleNamespace(eos_token_id=0), f"random {shape}")


def published_drafter() -> DrafterConfig:
    """Return the dimensions of huawei-noah/MOASpec-Llama-3-8B-Instruct, as its paper and code give them."""
    return DrafterConfig(
        target_num_layers=32,
        target_kv_size=2048,
        vocab_size=128256,
        draft_vocab_size=128256,
        decoder=LayerDims(4096, 32, 4, 128, 6144),
        layer_attention=LayerDims(2048, 32, 8, 64, 3072),
        lsa_layers=tuple(range(32)),
        rope_theta=500000.0,
        final_norm=False,
        layer_scale=False,
    )


def random_drafter(shape: str, target: Target) -> MoADrafter:
    """Make a drafter for ``target``: "llama-3-8b" has the published sizes, other shapes the default ones."""
    if shape == "llama-3-8b":
        config = published_drafter()
    else:
        config = config_for_target(target.config, draft_vocab_size=target.config.vocab_size)
    with torch.device(target.device):
        return MoADrafter(config).eval()
