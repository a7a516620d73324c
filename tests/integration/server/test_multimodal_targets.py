"""Multimodal checkpoints: their text part is served, and equals the whole model on text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_drafter.target import load_target, target_facts
from moa_server.engine.baseline import next_logits
from moa_server.engine.load import load_local
from support.families import FAMILIES, SIZES

_IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_heads": 2}
_LAYERS = {"num_hidden_layers": 1, "depth": 1, "image_size": 28, "patch_size": 14, "out_hidden_size": 32}
#: Types, those of their text parts, and a family with their fields.
MULTIMODAL = {
    "gemma3": ("gemma3_text", "Gemma 3"),
    "gemma4": ("gemma4_text", "Gemma 4"),
    "mistral3": ("ministral3", "Mistral"),
    "qwen2_5_vl": ("", "Qwen 2"),
    "qwen3_vl": ("", "Qwen 3"),
    "qwen3_5": ("", "Qwen 3.5"),
    "llava": ("llama", "Llama"),
    "internvl": ("qwen2", "Qwen 2"),
    "llama4": ("", "Llama 4 (chunks)"),
}
TEXT = list(range(20, 36))


def whole_model(kind: str, tokenizer: Path, folder: Path) -> Any:
    """Write a random multimodal model; return it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    part, family = MULTIMODAL[kind]
    text = {**SIZES, **FAMILIES[family][1], **({"model_type": part} if part else {})}
    if kind == "qwen2_5_vl":  # three positions a token
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    images = {**_IMAGES, **_LAYERS, "deepstack_visual_indexes": [0]}
    config = AutoConfig.for_model(kind, text_config=text, vision_config={} if kind in ("llava", "internvl") else images)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.data += torch.randn_like(parameter) / 4
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder)
    return model.eval()


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_text_part_is_computed_as_in_the_whole_model(kind: str, tiny_target: Path, tmp_path: Path) -> None:
    """Without torch if the text part is of a described family."""
    whole = whole_model(kind, tiny_target, tmp_path)
    with torch.no_grad():
        own = whole.language_model if kind == "llama4" else whole  # of which transformers' own forward fails
        wanted = own(input_ids=torch.tensor([TEXT])).logits[0, -1].numpy()
    engine = load_local(str(tmp_path), None)
    described = kind in ("gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl", "llava", "internvl")
    assert type(engine.target_pass).__name__ == ("OnnxPass" if described else "GeneralPass")
    assert np.abs(next_logits(engine, TEXT) - wanted).max() < 1e-3 * np.abs(wanted).max()
    target = load_target(str(tmp_path))
    assert target.fingerprint == target_facts(str(tmp_path)).fingerprint == engine.fingerprints.target
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([TEXT])).logits[0, -1].numpy()
    assert np.abs(logits - wanted).max() < 1e-3 * np.abs(wanted).max()
