"""Descriptions of decoders: spellings of configurations and GGUF metadata, and fields that are refused.

That the descriptions are right is shown by ``tests/integration/server/test_families.py``, beside transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from moa_decoder.errors import TargetError
from moa_decoder.families import spec_of_config, spec_of_gguf
from support.refusals import refused

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}
LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}
LINEAR = {"rope_type": "linear", "rope_theta": 1e3}
#: Rotary positions by kinds of layers, of which transformers reads less than of others.
NESTED = {"full_attention": {"rope_type": "yarn", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}
TRUNCATED = {**NESTED, "full_attention": {**NESTED["full_attention"], "truncate": False}}
LONG = {"short_factor": [1.0, 1.5, 2.0] * 2, "long_factor": [8.0] * 6}
PART = {**LONG, "partial_rotary_factor": 0.75}
METADATA = {
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 6,
    "attention.head_count": 4,
    "attention.head_count_kv": np.array([2] * 6),
    "attention.key_length": 16,
    "attention.value_length": 16,
    "context_length": 8192,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 16,
}


def config(family: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **fields}


def described(spec: Any) -> Any:
    """A description that can be compared."""
    plain = dataclasses.asdict(spec)
    for layer in plain["layers"]:
        if layer["rotary"]:
            layer["rotary"]["frequencies"] = [float(f"{each:.5g}") for each in layer["rotary"]["frequencies"]]
    return plain


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            config("llama", rope_theta=5e5, rope_scaling={**LLAMA_3, "rope_type": "llama3"}),
            config("llama", rope_parameters={**LLAMA_3, "rope_type": "llama3", "rope_theta": 5e5}),
        ),
        (
            config(
                "gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"type": "linear", "factor": 8}
            ),
            config(
                "gemma3_text",
                layer_types=["sliding_attention"] * 5 + ["full_attention"],
                rope_parameters={
                    "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            ),
        ),
        (
            config(
                "phi3",
                partial_rotary_factor=0.75,
                original_max_position_embeddings=4096,
                rope_scaling={"type": "su", **LONG},
                rope_theta=1e4,
            ),
            config(
                "phi3",
                original_max_position_embeddings=4096,
                rope_parameters={"rope_type": "longrope", "partial_rotary_factor": 0.75, "rope_theta": 1e4, **LONG},
            ),
        ),
        (
            config("phi3", partial_rotary_factor=0.5, rope_parameters={"partial_rotary_factor": 0.75}),
            config("phi3", partial_rotary_factor=0.75),
        ),
        (config("mistral"), config("mistral", sliding_window=4096)),
        (config("qwen2", use_sliding_window=True, sliding_window=None), config("qwen2")),
        (
            config(
                "llama",
                **{
                    "is_causal": True,
                    "is_llama_config": True,
                    "rope_interleaved": False,
                    "transformers.js_config": {"a": 1},
                },
            ),
            config("llama"),
        ),
    ],
)
def test_spellings_mean_the_same(old, new):
    assert described(spec_of_config(old)) == described(spec_of_config(new))


@pytest.mark.parametrize(
    ("architecture", "metadata", "tensors", "same"),
    [
        ("llama", {}, {}, config("llama")),
        (
            "llama",
            {"rope.freq_base": 5e5},
            {"rope_freqs.weight": np.full(8, 4.0, np.float32)},
            config("llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0}),
        ),
        (
            "gemma3",
            {"attention.sliding_window": 512, "rope.freq_base": 1e6, "rope.scaling.type": "linear"}
            | {"rope.scaling.factor": 8.0},
            {},
            config(
                "gemma3_text",
                sliding_window=512,
                query_pre_attn_scalar=16,
                rope_scaling={"type": "linear", "factor": 8.0},
            ),
        ),
        (
            "phi3",
            {"rope.dimension_count": 12, "attention.sliding_window": 2047, "rope.freq_base": 1e4}
            | {"rope.scaling.original_context_length": 4096},
            {f"rope_factors_{name}.weight": np.array(LONG[f"{name}_factor"], np.float32) for name in ("short", "long")},
            config(
                "phi3",
                partial_rotary_factor=0.75,
                sliding_window=2047,
                original_max_position_embeddings=4096,
                rope_scaling={"type": "longrope", **LONG},
            ),
        ),
        (
            "granite",
            {"attention.scale": 0.25, "embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 8.0},
            {},
            config(
                "granite",
                attention_multiplier=0.25,
                embedding_multiplier=12.0,
                residual_multiplier=0.5,
                logits_scaling=8.0,
            ),
        ),
    ],
)
def test_metadata_of_gguf_files_mean_a_configuration(architecture, metadata, tensors, same):
    values = {f"{architecture}.{key}": value for key, value in {**METADATA, **metadata}.items()}
    values |= {"general.architecture": architecture, "tokenizer.ggml.model": "gpt2"}
    shapes = {"token_embd.weight": (512, 64), **{name: tensor.shape for name, tensor in tensors.items()}}
    assert described(spec_of_gguf(values, shapes, tensors.__getitem__)) == described(spec_of_config(same))


@pytest.mark.parametrize(
    ("code", "wrong", "named"),
    [
        ("unsupported_target", config("cohere"), "cohere"),
        ("unsupported_target", config("llama", quantization_config={"bits": 4}), "quantization_config"),
        ("unsupported_target", config("llama", residual_multiplier=0.5), "residual_multiplier"),
        ("unsupported_target", config("gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (
            "unsupported_target",
            config("gemma3_text", rope_scaling={"factor": 4}, rope_parameters={"full_attention": {}}),
            "rope_scaling beside rope_parameters",
        ),
        ("unsupported_target", config("ministral3"), "llama_4_scaling_beta"),
        ("unsupported_target", config("gemma3_text", rope_parameters={"factor": 4.0, **LINEAR}), "rope_parameters"),
        ("unsupported_target", config("gemma3_text", rope_parameters={**NESTED, "truncate": False}), "truncate"),
        ("unsupported_target", config("gemma3_text", rope_parameters=TRUNCATED), "truncate"),
        (
            "unsupported_target",
            config("gemma3_text", rope_parameters=NESTED, original_max_position_embeddings=16),
            "original_max_position_embeddings",
        ),
        ("unsupported_target", config("llama", rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
        ("unsupported_target", config("llama", rope_scaling={"mrope_section": [1]}), "rope_parameters.mrope_section"),
        ("unsupported_target", config("llama", hidden_act="relu2"), "relu2"),
        ("unsupported_target", config("llama", partial_rotary_factor=0.5), "partial_rotary_factor"),
        ("unsupported_target", config("llama", is_causal=False), "is_causal"),
        ("wrong_type", config("llama", num_hidden_layers=1 << 40), "num_hidden_layers"),
        ("wrong_type", config("llama", num_key_value_heads=3), "num_key_value_heads"),
        ("wrong_type", config("llama", rms_norm_eps="1e-6"), "rms_norm_eps"),
        ("wrong_type", config("llama", rope_scaling=[]) | {"rope_parameters": [1]}, "rope_parameters"),
        ("wrong_type", config("qwen3", use_sliding_window=True, layer_types=["chunked_attention"] * 6), "layer_types"),
        ("wrong_type", config("phi3", rope_scaling={"type": "longrope", "short_factor": [1]}), "short_factor"),
        ("missing_field", {"model_type": "llama"}, "num_attention_heads"),
        ("missing_field", config("llama", rope_scaling={"type": "linear"}), "rope_parameters.factor"),
    ],
)
def test_a_configuration_that_is_not_known_whole_is_refused(code, wrong, named):
    with refused(code, TargetError, named):
        spec_of_config(wrong)


@pytest.mark.parametrize(
    ("unread", "same"),
    [
        (config("gemma3_text", _sliding_window_pattern=3), config("gemma3_text")),
        (
            config("phi3", rope_parameters={"type": "longrope", **PART, "original_max_position_embeddings": 24}),
            config("phi3", rope_parameters={"type": "longrope", **PART}, original_max_position_embeddings=4096),
        ),
    ],
)
def test_fields_that_transformers_passes_over_mean_nothing(unread, same):
    """The class of Phi 3 has an original context of its own, which comes before that of its rotary positions."""
    assert described(spec_of_config(unread)) == described(spec_of_config(same))


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("mistral", "num_key_value_heads"),
        ("qwen2", "num_key_value_heads"),
        ("qwen3", "head_dim"),
        ("gemma", "head_dim"),
    ],
)
def test_sizes_are_not_guessed(family, missing):
    """transformers has numbers for them, llama.cpp what the other sizes give."""
    with refused("missing_field", TargetError, missing):
        spec_of_config({name: value for name, value in config(family).items() if name != missing})
    if family == "mistral":
        return
    gone = {"head_dim": "attention.key_length", "num_key_value_heads": "attention.head_count_kv"}[missing]
    values = {f"{family}.{key}": value for key, value in METADATA.items() if key != gone}
    values["general.architecture"] = family
    layer = spec_of_gguf(values, {"token_embd.weight": (512, 64)}, {}.__getitem__).layers[0]
    assert (layer.head_dim, layer.kv_heads) == (16, 2 if missing == "head_dim" else 4)


@pytest.mark.parametrize(("family", "field"), [("gemma", "hidden_act"), ("gemma2", "hidden_activation")])
def test_the_activation_is_in_the_field_that_transformers_reads(family, field):
    other = {"hidden_act": "silu", "hidden_activation": "silu"}
    assert spec_of_config(config(family, **{**other, field: "gelu_tanh"})).layers[0].activation == "gelu_tanh"


@pytest.mark.parametrize(
    "metadata",
    [
        {"attention.causal": False},
        {"rope.scaling.attn_factor": 2.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 2.0},
    ],
)
def test_metadata_that_no_configuration_says_are_refused(metadata):
    values = {f"llama.{key}": value for key, value in {**METADATA, **metadata}.items()}
    with refused("unsupported_target", TargetError, [*metadata][-1]):
        spec_of_gguf({**values, "general.architecture": "llama"}, {"token_embd.weight": (512, 64)}, {}.__getitem__)


def test_damage_is_told_in_a_sentence():
    """Any fields and metadata of any types: never another error."""
    chance = random.Random(0)
    odd = [None, True, False, 0, -1, 3, 1 << 70, 1e-320, 1e308, float("nan"), "x", [], [1], [[]], {}, {"a": 1}]
    fields = [*SIZES, "hidden_act", "layer_types", "sliding_window", "no_rope_layers", "model_type", "rope_theta"]
    scaling = [*LLAMA_3, *LONG, "beta_fast", "attention_factor", "mscale", "rope_theta", "partial_rotary_factor"]
    keys = [*METADATA, "rope.scaling.type", "rope.scaling.factor", "attention.sliding_window", "logit_scale"]
    for number in range(3000):
        family = chance.choice(("llama", "qwen3", "gemma2", "smollm3", "phi3", "granite"))
        kind = chance.choice(("linear", "llama3", "yarn", "longrope", []))
        rope = {name: chance.choice([*odd, 4.0, [1.0] * 8]) for name in chance.sample(scaling, number % 5)}
        wrong = config(family, rope_scaling={**rope, "type": kind}, **{chance.choice(fields): chance.choice(odd)})
        values = {f"{family}.{key}": value for key, value in METADATA.items()}
        values |= {f"{family}.{chance.choice(keys)}": chance.choice([*odd, np.array([]), np.array([1, 2])])}
        values["general.architecture"] = chance.choice((family, [], None)) if number % 9 == 0 else family
        for read in (spec_of_config, lambda own: spec_of_gguf(own, {"token_embd.weight": (512, 64)}, np.array)):
            with contextlib.suppress(TargetError):
                read(wrong if read is spec_of_config else values)
