"""First weights of a drafter from targets of many families."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moa_drafter.architectures.registry import initialise, new_drafter
from moa_drafter.config import ConfigError, LayerDims
from moa_drafter.llama import DecoderLayer
from moa_drafter.target import Target, load_target
from moa_drafter.target_features import target_states
from moa_drafter.training.target_parts import norm_weight, start_layer
from support.families import make_target
from support.refusals import refused

FAMILIES = ["Llama", "Phi 3", "Gemma", "Gemma 3", "Gemma 3n (soft cap)", "OLMo", "OLMo 2", "OLMo 3", "EXAONE 4"]
FAMILIES += ["Mixtral (window)", "Qwen 3 MoE", "GLM 4", "GLM 4 MoE", "Granite MoE", "gpt-oss", "Nemotron", "Phi 2"]
FAMILIES += ["Cohere 2 (scaled logits)", "Llama 4 (chunks)", "Gemma 4", "LFM 2", "Qwen 3 Next", "Granite 4 (hybrid)"]
TEXT = torch.randint(3, 500, (36,), generator=torch.Generator().manual_seed(1))
DIMS = LayerDims(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64)
ONES = torch.ones(32)


def target_of(family: str, tiny_target: Path, folder: Path) -> Target:
    return load_target(str(make_target(family, tiny_target, folder)))


@pytest.mark.parametrize("architecture", ["moa", "eagle3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_of_any_family_begins_from_its_weights(architecture, family, tiny_target, tmp_path) -> None:
    """Over texts longer than a window."""
    target = target_of(family, tiny_target, tmp_path)
    drafter = new_drafter(architecture, target, draft_vocab_size=256)
    drafter.bind_target(target.embedding, target.head, target.layers, target.logits)
    if architecture == "eagle3" and family.startswith("Gemma 3n"):  # several hidden states between layers
        with refused("unsupported_target"):
            target_states(target, TEXT.tolist(), drafter.reads)
        return
    states = target_states(target, TEXT.tolist(), drafter.reads)
    assert len(states.kv) == len(states.last) == len(TEXT)
    initialise(drafter, target, [(TEXT, states)])
    assert all(weight.isfinite().all() for weight in drafter.parameters())


def test_parts_are_those_of_the_targets_layer(tiny_target, tmp_path) -> None:
    """Fused matrices are split; a form that ours has not adds nothing at first."""
    layers = {}
    for family in ("Phi 3", "OLMo 2", "Gemma 3", "Mixtral (window)"):
        theirs = target_of(family, tiny_target, tmp_path / family).layers[0]
        start_layer(ours := DecoderLayer(DIMS, 1e-5), theirs)
        layers[family] = ours, theirs
    ours, theirs = layers["Phi 3"]
    own = ours.self_attn
    assert torch.cat([each.weight for each in (own.q_proj, own.k_proj, own.v_proj)]).equal(
        theirs.self_attn.qkv_proj.weight
    )
    assert torch.cat([ours.mlp.gate_proj.weight, ours.mlp.up_proj.weight]).equal(theirs.mlp.gate_up_proj.weight)
    ours, theirs = layers["OLMo 2"]  # its norms come after attention and feed-forward
    assert ours.input_layernorm.weight.equal(ONES) and ours.post_attention_layernorm.weight.equal(ONES)
    ours, theirs = layers["Gemma 3"]
    assert ours.input_layernorm.weight.equal(1 + theirs.input_layernorm.weight)
    assert ours.post_attention_layernorm.weight.equal(1 + theirs.pre_feedforward_layernorm.weight)
    ours, theirs = layers["Mixtral (window)"]
    assert ours.self_attn.o_proj.weight.equal(theirs.self_attn.o_proj.weight)
    assert not ours.mlp.down_proj.weight.any() and ours.mlp.gate_proj.weight.any()


def test_factors_of_norms_are_found() -> None:
    norm = torch.nn.LayerNorm(32)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    assert norm_weight(norm, 32).equal(norm.weight) and norm_weight(None, 32).equal(ONES)
    assert norm_weight(torch.nn.LayerNorm(32, elementwise_affine=False), 32).equal(ONES)


def test_latent_attention_has_no_rows(tiny_target, tmp_path) -> None:
    target = target_of("MiniCPM 3 (latent attention)", tiny_target, tmp_path)
    with refused("unsupported_target", ConfigError):
        new_drafter("moa", target, draft_vocab_size=256)
