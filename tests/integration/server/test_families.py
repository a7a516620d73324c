"""Targets of many families: the logits and the texts are those of transformers, or the target is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moa_drafter.target import load_target
from moa_runtime.errors import MoaError
from moa_server.engine.base import EngineError
from moa_server.engine.torch_engine import target_pass
from support.families import CONTEXT, FAMILIES, ORIGINAL, WINDOW, computed, make_target
from support.refusals import refused

FUSED = {"Llama", "Llama 3 (llama3 positions)", "Llama (yarn)", "Qwen 2", "Mistral", "Mistral (window)"}
FUSED |= {"Ministral 3 (scaled queries)"}
REFUSED = {"MiniCPM 3 (latent attention)": "minicpm3", "GPT-2": "gpt2", "GPT-NeoX": "gpt_neox", "Falcon": "falcon"}
SHORTER = {"Phi 3 (longrope)": (ORIGINAL, "(longrope)"), "Llama 4 (chunks)": (WINDOW, "attention_chunk_size")}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in REFUSED])
def test_a_target_is_computed_as_transformers_does(family: str, tiny_target: Path, tmp_path: Path) -> None:
    """To the end of its context, over the end of an original one, and to that of a window; no further."""
    found = computed(make_target(family, tiny_target, tmp_path))
    assert found.runs == ("FusedLlama" if family in FUSED else "GeneralPass")
    window = FAMILIES[family][1].get("sliding_window")
    context, why = SHORTER.get(family, (WINDOW, "sliding_window") if window else (CONTEXT, "max_position_embeddings"))
    assert (found.context, why in found.why) == (context, True)
    assert found.variation < 0.01
    assert found.equal


@pytest.mark.parametrize("family", REFUSED)
def test_a_target_that_is_not_computed_is_refused(family: str, tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(MoaError) as caught:
        computed(make_target(family, tiny_target, tmp_path))
    assert REFUSED[family] in str(caught.value) and "\n" not in str(caught.value)


def test_a_target_that_computes_no_numbers_is_refused(tiny_target: Path) -> None:
    target = load_target(str(tiny_target))
    target.model.model.norm.weight.data[0] = torch.nan
    with refused("wrong_results", EngineError):
        target_pass(target, torch.float32)
