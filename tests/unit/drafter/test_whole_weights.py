"""Weights that lack a tensor, have one too many, or one of another shape: refused wherever they are loaded from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from safetensors.torch import load_file, save_file

from moa_drafter import target_source
from moa_drafter.checkpoint import load_checkpoint, save_checkpoint
from moa_drafter.config import CheckpointError
from moa_drafter.target import Target, load_target, target_facts, target_fingerprint
from moa_drafter.target_source import WEIGHTS_DIFFER, TargetError, check_scales, check_whole, resolve_target
from moa_runtime.bundle import sha256_of
from support.drafter.gguf_files import write_gguf
from support.refusals import refused
from support.tiny import make_tiny_target

Change = Callable[[dict], object]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def own_target(tmp_path: Path) -> Path:
    """A tiny target that a test may change."""
    return make_tiny_target(tmp_path / "target")


def changed(weights: Path, change: Change) -> None:
    state = load_file(weights)
    change(state)
    save_file(state, weights, metadata={"format": "pt"})


def without_a_layer(state: dict) -> None:
    for name in [name for name in state if "layers.2." in name]:
        del state[name]


def with_more(state: dict) -> None:
    state["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)


def in_another_shape(state: dict) -> None:
    state["model.layers.1.mlp.up_proj.weight"] = torch.ones(3, 64)


#: Changes of a target's tensors, and the part of a message that counts and names them.
DAMAGES = [
    (without_a_layer, "9 tensors are missing (model.layers.2.input_layernorm.weight; "),
    (with_more, "1 tensor is superfluous (model.layers.0.self_attn.q_proj.bias)"),
    (in_another_shape, "1 tensor is of another shape (model.layers.1.mlp.up_proj.weight [3, 64], not [128, 64])"),
]


@pytest.mark.parametrize("load", [load_target, target_facts])
@pytest.mark.parametrize(("change", "faults"), DAMAGES)
def test_a_target_of_other_tensors_is_refused(
    own_target: Path, load: Callable[[str], object], change: Change, faults: str
) -> None:
    """Also for an engine that reads the weights itself."""
    changed(own_target / "model.safetensors", change)
    with refused(WEIGHTS_DIFFER, TargetError) as caught:
        load(str(own_target))
    assert faults in str(caught.value)


@pytest.mark.parametrize("load", [load_target, target_facts])
def test_tied_embeddings_lack_nothing(own_target: Path, load: Callable[[str], object]) -> None:
    config = own_target / "config.json"
    changed(own_target / "model.safetensors", lambda state: state.pop("lm_head.weight"))
    with refused(WEIGHTS_DIFFER, TargetError) as caught:
        load(str(own_target))
    assert "lm_head.weight" in str(caught.value)
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    load(str(own_target))


def test_a_missing_shard_is_refused(own_target: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(own_target)
    (own_target / "model.safetensors").unlink()
    model.save_pretrained(own_target, max_shard_size="200KB")
    _first, second, *_ = sorted(own_target.glob("*.safetensors"))
    load_target(str(own_target))
    second.unlink()
    with refused("unreadable", TargetError) as caught:
        load_target(str(own_target))
    assert second.name in str(caught.value)


def test_files_beside_the_weights(own_target: Path) -> None:
    """Files that macOS writes beside others are ignored, a damaged second file is refused."""
    fingerprint = target_fingerprint(own_target)
    (own_target / "._model.safetensors").write_bytes(b"Mac OS X")
    assert load_target(str(own_target)).fingerprint == fingerprint
    (own_target / "consolidated.safetensors").write_bytes(b"half of a download")
    with refused("damaged", TargetError) as caught:
        load_target(str(own_target))
    assert "consolidated.safetensors" in str(caught.value)


def test_numbers_without_a_dimension_have_a_fingerprint(own_target: Path) -> None:
    prints = set()
    for value in (1.0, 2.0):
        changed(own_target / "model.safetensors", lambda state, value=value: state.update(scale=torch.tensor(value)))
        prints.add(target_fingerprint(own_target))
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.pop("Ekv2E.bias"), "(Ekv2E.bias)"),
        (lambda state: state.update(a=torch.ones(1), b=torch.ones(1)), "(a; b)"),
        (lambda state: state.update({"Ekv2E.bias": torch.ones(3)}), "(Ekv2E.bias [3], not [64])"),
    ],
)
def test_a_drafter_of_other_tensors_is_refused(tiny_drafter: Path, tmp_path: Path, change: Change, named: str) -> None:
    save_checkpoint(load_checkpoint(tiny_drafter), tmp_path)
    changed(tmp_path / "model.safetensors", change)
    with refused(WEIGHTS_DIFFER, CheckpointError) as caught:
        load_checkpoint(tmp_path)
    assert named in str(caught.value)


@pytest.mark.parametrize("count", [1, 3])
def test_a_gguf_file_gives_the_model_it_was_made_of(
    own_target: Path, tmp_path: Path, empty_cache: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """Whole or split, whichever part is named; the folder of an older version, which did not compare, is made again."""
    parts = write_gguf(own_target, tmp_path / "model.gguf", parts=count)
    assert len(parts) == count
    kept = old_cache(parts[0], empty_cache)
    made = load_target(str(parts[0]))
    same_model(made, own_target)
    assert kept.exists() == (count == 1)
    assert {resolve_target(str(part)) for part in parts} == {made.folder}
    assert capsys.readouterr().err.count(str(empty_cache)) == 1
    assert not list((empty_cache / "targets").rglob("*.gguf")), "the joined file is removed"


def old_cache(file: Path, cache: Path) -> Path:
    """Make a folder as older versions kept it of a GGUF file, without a comparison; here of another model."""
    return make_tiny_target(cache / "targets" / f"{file.stem}-{sha256_of(file)[:12]}", seed=9)


def same_model(made: Target, folder: Path) -> None:
    wanted = load_target(str(folder))
    state = made.model.state_dict()
    assert state.keys() == wanted.model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.model.state_dict().items())
    assert made.chat_template == wanted.chat_template and made.stop_tokens == wanted.stop_tokens
    assert made.tokenizer("Name three colours.")["input_ids"] == wanted.tokenizer("Name three colours.")["input_ids"]


def test_missing_parts_are_named(own_target: Path, tmp_path: Path) -> None:
    parts = write_gguf(own_target, tmp_path / "split.gguf", parts=3)
    parts[1].unlink()
    with refused("part_missing", TargetError) as caught:
        resolve_target(str(parts[0]))
    assert parts[1].name in str(caught.value)


@pytest.mark.parametrize(
    "named", ["alone.gguf", "split-00001-of-00000.gguf", "split-00001-of-00002.gguf", "split-00003-of-00003.gguf"]
)
def test_a_part_under_another_name_is_refused(own_target: Path, tmp_path: Path, named: str) -> None:
    first, second, third = write_gguf(own_target, tmp_path / "split.gguf", parts=3)
    third.unlink()
    second.rename(tmp_path / "split-00002-of-00002.gguf")
    first.rename(tmp_path / named)
    if named.endswith("-of-00003.gguf"):
        os.link(tmp_path / named, first)
        os.link(tmp_path / named, second)
    with refused("part_misplaced", TargetError):
        resolve_target(str(tmp_path / named))


def test_a_truncated_part_is_named(own_target: Path, tmp_path: Path, empty_cache: Path) -> None:
    parts = write_gguf(own_target, tmp_path / "split.gguf", parts=3)
    for size in (0, 20, parts[1].stat().st_size // 2):
        parts[1].write_bytes(parts[1].read_bytes()[:size])
        with refused("damaged", TargetError) as caught:
            resolve_target(str(parts[0]))
        assert parts[1].name in str(caught.value)
    assert not [path for path in (empty_cache / "targets").iterdir() if path.is_dir()]


def gguf_without_a_layer(tensors: dict) -> None:
    for name in [name for name in tensors if name.startswith("blk.2.")]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (gguf_without_a_layer, DAMAGES[0][1]),
        (lambda tensors: tensors.update({"rope_freqs.weight": np.ones(8, np.float32)}), "(rope_freqs)"),
        (lambda tensors: tensors.update({"blk.1.ffn_up.weight": np.ones((3, 64), np.float32)}), DAMAGES[2][1]),
    ],
)
def test_a_gguf_file_of_other_tensors_is_refused(
    own_target: Path, tmp_path: Path, empty_cache: Path, change: Change, faults: str
) -> None:
    (file,) = write_gguf(own_target, tmp_path / "other.gguf", change=change)
    old_cache(file, empty_cache)
    with refused(WEIGHTS_DIFFER, TargetError) as caught:
        resolve_target(str(file))
    assert faults in str(caught.value)
    assert not [path for path in (empty_cache / "targets").iterdir() if path.is_dir()], "nothing is kept"


def scaled_positions(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)


@pytest.mark.parametrize(
    ("add", "named"),
    [
        (scaled_positions, "rope.scaling (yarn, factor 4.0)"),
        (lambda writer: writer.add_rope_scaling_factor(4.0), "rope.scaling (linear, factor 4.0)"),
        (lambda writer: writer.add_final_logit_softcapping(30.0), "final_logit_softcapping"),
    ],
)
def test_a_gguf_file_with_scales_that_transformers_omits_is_refused(
    own_target: Path, tmp_path: Path, add: Callable[[GGUFWriter], object], named: str
) -> None:
    (file,) = write_gguf(own_target, tmp_path / "scaled.gguf", add=add)
    with refused("scales_differ", TargetError) as caught:
        resolve_target(str(file))
    assert named in str(caught.value)


def test_scales_that_change_nothing_are_accepted(own_target: Path, tmp_path: Path) -> None:
    """Nor do those that transformers has in its configuration, here of Gemma 2's layout."""
    (file,) = write_gguf(own_target, tmp_path / "one.gguf", add=lambda writer: writer.add_rope_scaling_factor(1.0))
    same_model(load_target(str(file)), own_target)
    held = {
        "general.architecture": "gemma2",
        "gemma2.final_logit_softcapping": 30.0,
        "gemma2.rope.scaling.type": "none",
    }
    reader = SimpleNamespace(fields={name: SimpleNamespace(contents=lambda v=v: v) for name, v in held.items()})
    check_scales("x.gguf", reader, SimpleNamespace(final_logit_softcapping=30.0, rope_parameters={}))


def test_a_gguf_file_of_impossible_sizes_is_refused(own_target: Path, tmp_path: Path) -> None:
    config = own_target / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_attention_heads": 1, "hidden_size": 0}))
    (file,) = write_gguf(own_target, tmp_path / "sizes.gguf")
    with refused("unreadable", TargetError):
        resolve_target(str(file))


@pytest.mark.parametrize("load", [load_target, target_facts])
@pytest.mark.parametrize(
    ("field", "named"),
    [
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"num_attention_heads": 3}, "multiple"),
        ({"num_key_value_heads": 0}, "ZeroDivisionError"),
        ({"hidden_size": "x"}, "int"),
        ({"vocab_size": 0}, "num_embeddings"),
        ({"dtype": "float99"}, "float99"),
        ({"rope_parameters": "x"}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'factor'"),
        ({"model_type": ["llama"]}, "llama"),
    ],
)
def test_an_impossible_configuration_is_refused(
    own_target: Path, load: Callable[[str], object], field: dict, named: str
) -> None:
    config = own_target / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **field}))
    with refused("unsupported_target" if "model_type" in field else "unreadable", TargetError) as caught:
        load(str(own_target))
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_experts_that_lack_a_half_are_refused() -> None:
    """transformers makes one matrix of two tensors, with zeros for a missing one, and reports nothing; its newer reader
    reports everything but tensors that it rightly omits, such as layers that predict several tokens."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, get_gguf_hf_weights_map

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16, "head_dim": 4}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_experts=4, moe_intermediate_size=8)
    )
    state = model.state_dict()
    halves = ("ffn_gate_exps", "ffn_up_exps")
    tensors = [
        SimpleNamespace(name=name, n_elements=state[place].numel() // (2 if name.endswith(halves) else 1))
        for name, place in get_gguf_hf_weights_map(model, TENSOR_PROCESSORS["qwen3moe"]()).items()
    ]
    architecture = {"general.architecture": SimpleNamespace(contents=lambda: "qwen3moe")}
    reported = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
    check_whole("x.gguf", [SimpleNamespace(fields=architecture, tensors=tensors)], model, reported)
    tensors = [tensor for tensor in tensors if tensor.name != "blk.1.ffn_up_exps"]
    with refused(WEIGHTS_DIFFER, TargetError) as caught:
        check_whole("x.gguf", [SimpleNamespace(fields=architecture, tensors=tensors)], model, reported)
    assert "(blk.1.ffn_up_exps)" in str(caught.value)
    model.hf_quantizer = SimpleNamespace(supported=True)
    check_whole("x.gguf", [SimpleNamespace(fields=architecture, tensors=tensors)], model, reported)


def test_the_built_in_target_stays_where_there_is_no_network(
    own_target: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sources are complete, so a folder of older versions is used."""
    place = empty_cache / "targets" / target_source.DEFAULT_TARGET
    place.parent.mkdir(parents=True)
    own_target.rename(place)
    monkeypatch.setattr(target_source, "_make_builtin", None)
    assert resolve_target() == place
