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


DAMAGES = [
    (
        without_a_layer,
        "9 tensors are missing (model.layers.2.input_layernorm.weight; model.layers.2.mlp.down_proj.weight; "
        "model.layers.2.mlp.gate_proj.weight, ...)",
    ),
    (with_more, "1 tensor is superfluous (model.layers.0.self_attn.q_proj.bias)"),
    (in_another_shape, "1 tensor is of another shape (model.layers.1.mlp.up_proj.weight [3, 64], not [128, 64])"),
]


@pytest.mark.parametrize("load", [load_target, target_facts])
@pytest.mark.parametrize(("change", "said"), DAMAGES)
def test_a_target_of_other_tensors_is_refused(
    own_target: Path, load: Callable[[str], object], change: Change, said: str
) -> None:
    """Also for an engine that reads the weights itself."""
    changed(own_target / "model.safetensors", change)
    with pytest.raises(TargetError) as refused:
        load(str(own_target))
    assert refused.value.code == WEIGHTS_DIFFER
    assert str(refused.value) == (
        f"the weights in {own_target} are not those of its config.json: {said}; fetch the target again"
    )


@pytest.mark.parametrize("load", [load_target, target_facts])
def test_tied_embeddings_lack_nothing(own_target: Path, load: Callable[[str], object]) -> None:
    config = own_target / "config.json"
    changed(own_target / "model.safetensors", lambda state: state.pop("lm_head.weight"))
    with pytest.raises(TargetError, match=r"1 tensor is missing \(lm_head\.weight\)"):
        load(str(own_target))
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
    with pytest.raises(TargetError, match=f"cannot load the target in .*{second.name}"):
        load_target(str(own_target))


def test_files_beside_the_weights(own_target: Path) -> None:
    """What macOS writes beside a file counts for nothing, a damaged second file is told of."""
    fingerprint = target_fingerprint(own_target)
    (own_target / "._model.safetensors").write_bytes(b"Mac OS X")
    assert load_target(str(own_target)).fingerprint == fingerprint
    (own_target / "consolidated.safetensors").write_bytes(b"half of a download")
    with pytest.raises(TargetError, match=r"consolidated\.safetensors is damaged: fetch it again") as refused:
        load_target(str(own_target))
    assert refused.value.code == "damaged"


def test_numbers_without_a_dimension_have_a_fingerprint(own_target: Path) -> None:
    prints = set()
    for value in (1.0, 2.0):
        changed(own_target / "model.safetensors", lambda state, value=value: state.update(scale=torch.tensor(value)))
        prints.add(target_fingerprint(own_target))
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("Ekv2E.bias"), "1 tensor is missing (Ekv2E.bias)"),
        (lambda state: state.update(a=torch.ones(1), b=torch.ones(1)), "2 tensors are superfluous (a; b)"),
        (lambda state: state.update({"Ekv2E.bias": torch.ones(3)}), "(Ekv2E.bias [3], not [64])"),
    ],
)
def test_a_drafter_of_other_tensors_is_refused(tiny_drafter: Path, tmp_path: Path, change: Change, said: str) -> None:
    save_checkpoint(load_checkpoint(tiny_drafter), tmp_path)
    changed(tmp_path / "model.safetensors", change)
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(tmp_path)
    assert refused.value.code == WEIGHTS_DIFFER and said in str(refused.value)


def test_a_gguf_file_that_is_not_there_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=r"there is no file models/missing\.gguf"):
        resolve_target("models/missing.gguf")


def test_a_gguf_file_gives_the_model_it_was_made_of(own_target: Path, tmp_path: Path) -> None:
    (file,) = write_gguf(own_target, tmp_path / "whole.gguf")
    same_model(load_target(str(file)), own_target)


def test_a_split_gguf_file_is_read_whole(
    own_target: Path, tmp_path: Path, empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever part is named."""
    parts = write_gguf(own_target, tmp_path / "split.gguf", parts=3)
    assert len(parts) == 3
    made = load_target(str(parts[0]))
    same_model(made, own_target)
    assert {resolve_target(str(part)) for part in parts} == {made.folder}
    assert capsys.readouterr().err.count("made ready") == 1
    assert not list((empty_cache / "targets").rglob("*.gguf")), "what the parts were joined in is removed"


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
    with pytest.raises(TargetError, match=r"one of 3 parts .* missing: split-00002-of-00003\.gguf;") as refused:
        resolve_target(str(parts[0]))
    assert refused.value.code == "part_missing"


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
    with pytest.raises(TargetError, match="holds part 1 of 3, not part") as refused:
        resolve_target(str(tmp_path / named))
    assert refused.value.code == "part_misplaced"


def test_a_truncated_part_is_named(own_target: Path, tmp_path: Path, empty_cache: Path) -> None:
    parts = write_gguf(own_target, tmp_path / "split.gguf", parts=3)
    for size in (0, 20, parts[1].stat().st_size // 2):
        parts[1].write_bytes(parts[1].read_bytes()[:size])
        with pytest.raises(TargetError, match=r"cannot read split-00002-of-00003\.gguf: it is damaged") as refused:
            resolve_target(str(parts[0]))
        assert refused.value.code == "damaged"
    assert not [path for path in (empty_cache / "targets").iterdir() if path.is_dir()]


def gguf_without_a_layer(tensors: dict) -> None:
    for name in [name for name in tensors if name.startswith("blk.2.")]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            gguf_without_a_layer,
            "9 tensors are missing (model.layers.2.input_layernorm.weight; model.layers.2.mlp.down_proj.weight; "
            "model.layers.2.mlp.gate_proj.weight, ...)",
        ),
        (
            lambda tensors: tensors.update({"rope_freqs.weight": np.ones(8, np.float32)}),
            "1 tensor is superfluous (rope_freqs)",
        ),
        (
            lambda tensors: tensors.update({"blk.1.ffn_up.weight": np.ones((3, 64), np.float32)}),
            "1 tensor is of another shape (model.layers.1.mlp.up_proj.weight [3, 64], not [128, 64])",
        ),
    ],
)
def test_a_gguf_file_of_other_tensors_is_refused(
    own_target: Path, tmp_path: Path, empty_cache: Path, change: Change, said: str
) -> None:
    (file,) = write_gguf(own_target, tmp_path / "other.gguf", change=change)
    with pytest.raises(TargetError) as refused:
        resolve_target(str(file))
    assert refused.value.code == WEIGHTS_DIFFER
    assert str(refused.value) == (
        f"the tensors of other.gguf are not those of the model that its metadata describes: {said}; take another file, "
        "or the model's folder or Hub id"
    )
    assert not [path for path in (empty_cache / "targets").iterdir() if path.is_dir()], "nothing is kept"


def scaled_positions(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)


@pytest.mark.parametrize(
    ("add", "said"),
    [
        (scaled_positions, "rope.scaling (yarn, factor 4.0)"),
        (lambda writer: writer.add_rope_scaling_factor(4.0), "rope.scaling (linear, factor 4.0)"),
        (lambda writer: writer.add_final_logit_softcapping(30.0), "final_logit_softcapping"),
    ],
)
def test_a_gguf_file_with_scales_that_transformers_leaves_out_is_refused(
    own_target: Path, tmp_path: Path, add: Callable[[GGUFWriter], object], said: str
) -> None:
    (file,) = write_gguf(own_target, tmp_path / "scaled.gguf", add=add)
    with pytest.raises(TargetError) as refused:
        resolve_target(str(file))
    assert refused.value.code == "scales_differ"
    assert str(refused.value).startswith(f"scaled.gguf has {said} in its metadata, which transformers leaves out")


def test_scales_that_change_nothing_are_none(own_target: Path, tmp_path: Path) -> None:
    """Nor are those that transformers has in its configuration, here of Gemma 2's layout."""
    (file,) = write_gguf(own_target, tmp_path / "one.gguf", add=lambda writer: writer.add_rope_scaling_factor(1.0))
    same_model(load_target(str(file)), own_target)
    held = {
        "general.architecture": "gemma2",
        "gemma2.final_logit_softcapping": 30.0,
        "gemma2.rope.scaling.type": "none",
    }
    reader = SimpleNamespace(fields={name: SimpleNamespace(contents=lambda v=v: v) for name, v in held.items()})
    check_scales("x.gguf", reader, SimpleNamespace(final_logit_softcapping=30.0, rope_parameters={}))


def test_a_gguf_file_of_sizes_that_cannot_be_is_refused(own_target: Path, tmp_path: Path) -> None:
    config = own_target / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_attention_heads": 1, "hidden_size": 0}))
    (file,) = write_gguf(own_target, tmp_path / "sizes.gguf")
    with pytest.raises(TargetError, match=r"sizes\.gguf"):
        resolve_target(str(file))


@pytest.mark.parametrize("load", [load_target, target_facts])
@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"num_key_value_heads": 0}, "ZeroDivisionError"),
        ({"hidden_size": "x"}, "expected int"),
        ({"vocab_size": 0}, "num_embeddings"),
        ({"dtype": "float99"}, "float99"),
        ({"rope_parameters": "x"}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'factor'"),
        ({"model_type": ["llama"]}, "of the architecture"),
    ],
)
def test_a_configuration_that_cannot_be_is_told(
    own_target: Path, load: Callable[[str], object], field: dict, said: str
) -> None:
    config = own_target / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **field}))
    with pytest.raises(TargetError) as refused:
        load(str(own_target))
    text = str(refused.value)
    assert said in text and "\n" not in text
    assert ("not supported" in text) == ("model_type" in field)


def test_experts_that_lack_a_half_are_refused() -> None:
    """transformers makes one matrix of two tensors, with zeros for one that is missing, and reports nothing; its newer
    reader reports everything, but for what it leaves out rightly, such as layers that predict several tokens.
    """
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
    with pytest.raises(TargetError, match=r"1 tensor is missing \(blk\.1\.ffn_up_exps\)"):
        check_whole("x.gguf", [SimpleNamespace(fields=architecture, tensors=tensors)], model, reported)
    model.hf_quantizer = SimpleNamespace(supported=True)
    check_whole("x.gguf", [SimpleNamespace(fields=architecture, tensors=tensors)], model, reported)


def old_cache(file: Path, cache: Path) -> Path:
    """What older versions kept of a GGUF file: made without a comparison, here another model."""
    return make_tiny_target(cache / "targets" / f"{file.stem}-{sha256_of(file)[:12]}", seed=9)


def test_what_older_versions_kept_is_made_again(own_target: Path, tmp_path: Path, empty_cache: Path) -> None:
    (file,) = write_gguf(own_target, tmp_path / "whole.gguf")
    kept = old_cache(file, empty_cache)
    assert resolve_target(str(file)) == kept
    same_model(load_target(str(file)), own_target)


def test_what_older_versions_kept_of_a_first_part_is_removed(
    own_target: Path, tmp_path: Path, empty_cache: Path
) -> None:
    parts = write_gguf(own_target, tmp_path / "split.gguf", parts=3)
    kept = old_cache(parts[0], empty_cache)
    same_model(load_target(str(parts[0])), own_target)
    assert not kept.exists()


def test_what_older_versions_kept_of_an_incomplete_file_is_removed(
    own_target: Path, tmp_path: Path, empty_cache: Path
) -> None:
    (file,) = write_gguf(own_target, tmp_path / "other.gguf", change=gguf_without_a_layer)
    kept = old_cache(file, empty_cache)
    with pytest.raises(TargetError, match="9 tensors are missing"):
        resolve_target(str(file))
    assert not kept.exists()


def test_the_built_in_target_stays_where_there_is_no_network(
    own_target: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sources are complete, so older versions' folder is taken."""
    name = target_source.DEFAULT_TARGET
    kept = own_target.rename(empty_cache.parent / "kept")
    (empty_cache / "targets").mkdir(parents=True)
    kept.rename(empty_cache / "targets" / name)
    monkeypatch.setattr(target_source, "_make_builtin", None)
    assert resolve_target() == empty_cache / "targets" / name
