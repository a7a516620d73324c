"""EAGLE-3 heads: both published formats, what is refused, and drafting step by step."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moa_drafter.architectures.registry import drafter_of, torch_backend_of
from moa_drafter.checkpoint import load_bound
from moa_drafter.config import CheckpointError, FitError, check_fit, drafter_fingerprint
from moa_drafter.drafter_weights import read_weights
from moa_drafter.target_features import target_states
from moa_runtime.backends.base import StepInputs
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from support.drafter.eagle3_heads import OPTIONS, write_head
from support.refusals import refused


def in_torch(folder, change=dict):
    """Replace the weights by a ``pytorch_model.bin`` of what ``change`` makes of them."""
    torch.save(change(load_file(folder / "model.safetensors")), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def changed(folder, change):
    """Write what ``change`` makes of the tensors instead of them."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


@pytest.fixture(params=OPTIONS)
def options(request):
    return OPTIONS[request.param]


def test_both_formats_are_one_head(tmp_path, options):
    folders = [write_head(tmp_path / of, options, of=of) for of in ("speculators", "authors")]
    folders.append(in_torch(write_head(tmp_path / "bin", options, of="authors")))
    first, *others = map(read_weights, folders)
    for other in others:
        assert other.config == first.config and set(other.names) == set(first.names)
        assert all(np.array_equal(first.array(name), other.array(name)) for name in first.names)
    assert first.config.architecture == "eagle3" and first.fingerprint == drafter_fingerprint(folders[0])
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 3, "files as they are"
    drafter_of(first.config).load_state_dict({name: torch.from_numpy(first.array(name)) for name in first.names})


def test_what_is_missing_has_a_default(tmp_path):
    missing = dict.fromkeys(("rope_theta", "head_dim", "max_position_embeddings", "num_key_value_heads"))
    config = read_weights(write_head(tmp_path, of="authors", layer=missing)).config
    assert config.rope["rope_theta"] == 10000.0 and config.decoder.head_dim == 16 and config.decoder.num_kv_heads == 2


def test_of_two_rotary_positions_those_count_that_transformers_takes(tmp_path):
    both = {"rope_parameters": {"rope_type": "default"}}
    assert read_weights(write_head(tmp_path, OPTIONS["llama3 rope"], layer=both)).config.rope["rope_type"] == "llama3"


@pytest.mark.parametrize(
    "without", ["layers.0.mlp.up_proj.weight", "fc.weight", "lm_head.weight", "d2t", "norm.weight"]
)
def test_a_head_that_is_one_tensor_short_is_refused(tmp_path, without):
    with refused("weights_differ", CheckpointError):
        read_weights(write_head(tmp_path, without=without))


@pytest.mark.parametrize(
    ("inside", "field", "value"),
    [
        ("config", "speculators_model_type", "dflash"),
        ("config", "speculators_model_type", "mtp"),
        ("config", "target_hidden_size", 128),
        ("layer", "num_hidden_layers", 2),
        ("layer", "hidden_act", "gelu"),
        ("layer", "layer_types", ["sliding_attention"]),
        ("layer", "layer_types", 5),
        ("layer", "attention_bias", True),
        ("layer", "model_type", "gemma3_text"),
        ("layer", "rope_theta", 1e999),
        ("layer", "rope_theta", 0),
        ("layer", "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("layer", "rope_scaling", {"rope_type": "longrope", "short_factor": [1.0] * 8}),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, inside, field, value):
    with refused("unsupported", CheckpointError):
        read_weights(write_head(tmp_path, **{inside: {field: value}}))


def test_a_switch_that_is_not_known_is_named(tmp_path, caplog):
    read_weights(write_head(tmp_path / "known", {"norm_output": True}, layer={"use_cache": True}))
    assert not caplog.records
    read_weights(write_head(tmp_path / "new", layer={"gated_attention": True}, config={"later": True, "off": False}))
    assert [record.args for record in caplog.records] == [("gated_attention, later",)]


BIG = 10**400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (name, value)
            for name in ("num_attention_heads", "head_dim", "max_position_embeddings")
            for value in (1e999, -4)
        ],
        *[("rms_norm_eps", value) for value in (BIG, 1e999, -1, "1e-5", True)],
        ("max_position_embeddings", BIG),
        ("eagle_aux_hidden_state_layer_ids", [1e999, 1, 2]),
        ("eagle_aux_hidden_state_layer_ids", "123"),
        ("rms_norm_eps", 0),
        ("num_key_value_heads", False),
    ],
)
def test_numbers_of_no_head_are_refused(tmp_path, field, value):
    with refused("wrong_type", CheckpointError):
        read_weights(write_head(tmp_path, layer={field: value}, without="t2d"))


@pytest.mark.parametrize(
    ("options", "config", "layer"),
    [
        ({}, {"draft_vocab_size": 128}, {}),
        ({}, {}, {"num_key_value_heads": 4}),
        ({}, {}, {"hidden_size": 32}),
        ({}, {}, {"intermediate_size": 64}),
        ({"norm_before_fc": True}, {"norm_before_fc": False}, {}),
        ({"fc_norm": True}, {"fc_norm": False}, {}),
        ({}, {"fc_norm": True}, {}),
    ],
)
def test_a_configuration_that_contradicts_the_tensors_is_refused(tmp_path, options, config, layer):
    with refused("weights_differ", CheckpointError):
        read_weights(write_head(tmp_path, options, config=config, layer=layer))


@pytest.mark.parametrize(
    ("field", "values"),
    [("norm_output", (True, False)), ("eagle_aux_hidden_state_layer_ids", ([1, 2, 3], [1, 1, 2]))],
)
def test_objects_of_a_configuration_agree(tmp_path, field, values):
    inner, outer = ({"eagle_config": {field: value}} for value in values)
    said = write_head(tmp_path / "said", of="authors", config={**inner, field: None})
    assert values[0] in (read_weights(said).config.norm_output, list(read_weights(said).config.aux_layers))
    with refused("inconsistent", CheckpointError):
        read_weights(write_head(tmp_path / "twice", of="authors", config={**outer, field: values[0]}))


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("unsupported_type", lambda head: {**head, "lm_head.weight": head["lm_head.weight"].to(torch.int8)}),
        ("unsupported_type", lambda head: {**head, "norm.weight": head["norm.weight"].to(torch.bool)}),
        ("not_finite", lambda head: {**head, "norm.weight": head["norm.weight"].double() * 1e300}),
        ("weights_differ", lambda head: {**head, "fc.weight": head["fc.weight"].flatten()}),
        ("weights_differ", lambda head: {**head, "d2t": head["d2t"].flip(0)}),
        ("weights_differ", lambda head: {**head, "layers.1.norm.weight": head["norm.weight"].clone()}),
        ("not_finite", lambda head: {**head, "fc.weight": head["fc.weight"] / 0}),
        ("out_of_range", lambda head: {**head, "d2t": head["d2t"] + 2**62}),
        ("out_of_range", lambda head: {**head, "d2t": head["d2t"] - 500}),
    ],
)
def test_tensors_of_no_head_are_refused(tmp_path, code, change):
    with refused(code, CheckpointError):
        read_weights(changed(write_head(tmp_path), change))


def test_tokens_are_mapped_in_a_whole_vocabulary_too(tmp_path):
    turned = torch.arange(511, -512, -2)
    folder = changed(write_head(tmp_path, OPTIONS["whole vocabulary"]), lambda head: {**head, "d2t": turned})
    assert read_weights(folder).array("draft_to_target").tolist() == list(range(511, -1, -1))


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize(
    "change",
    [
        lambda head: {**head, "more": Code()},
        lambda head: {1: head["fc.weight"]},
        lambda head: list(head.values()),
        lambda head: {**head, "fc.weight": head["fc.weight"].to_sparse()},
        lambda head: {**head, "fc.weight": head["fc.weight"].to(torch.complex64)},
        lambda head: {**head, "fc.weight": torch.zeros(1).expand(1 << 40)},
    ],
)
def test_torch_files_hold_tensors_alone_and_nothing_runs(tmp_path, change):
    with refused("damaged", CheckpointError):
        read_weights(in_torch(write_head(tmp_path, of="authors"), change))


@pytest.mark.parametrize("broken", [b"\x80\x02h\x05.", b"\x80\x02."])
def test_a_torch_file_that_is_broken_inside_is_refused(tmp_path, broken):
    folder = in_torch(write_head(tmp_path, of="authors"))
    plain, other = folder / "pytorch_model.bin", folder / "other"
    with zipfile.ZipFile(plain) as read, zipfile.ZipFile(other, "w") as written:
        for member in read.infolist():
            written.writestr(member.filename, broken if member.filename.endswith("data.pkl") else read.read(member))
    other.replace(plain)
    with refused("damaged", CheckpointError):
        read_weights(folder)


@pytest.mark.parametrize("value", [BIG, (1 << 31) - 1])
def test_no_memory_is_taken_for_tokens_that_no_head_has(tmp_path, value):
    with refused("out_of_range", CheckpointError, "vocab_size"):
        read_weights(write_head(tmp_path, config={"draft_vocab_size": value}, layer={"vocab_size": value}))


@pytest.mark.parametrize("field", ["layers", "target_num_layers", "target_layers", "exit_layer"])
def test_no_memory_is_taken_for_layers_that_no_drafter_has(tmp_path, tiny_drafter, field):
    folder = shutil.copytree(tiny_drafter, tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: (1 << 31) - 1}))
    with refused("out_of_range", CheckpointError, field):
        read_weights(folder)


def test_torch_files_take_no_more_memory_than_they_are_long(tmp_path):
    folder = in_torch(write_head(tmp_path, of="authors"))
    plain, packed = folder / "pytorch_model.bin", folder / "packed"
    with zipfile.ZipFile(plain) as read, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as written:
        for member in read.infolist():
            written.writestr(member.filename, read.read(member))
    packed.replace(plain)
    with refused("damaged", CheckpointError):
        read_weights(folder)


def test_weights_that_are_no_file_are_refused(tmp_path):
    folder = write_head(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with refused("unreadable", CheckpointError):
        read_weights(folder)


def test_weights_in_several_files_are_refused(tmp_path):
    folder = write_head(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with refused("file_missing", CheckpointError):
        read_weights(folder)


def test_a_head_of_eagle_1_is_no_head_of_eagle_3(tmp_path):
    with refused("weights_differ", CheckpointError):
        read_weights(write_head(tmp_path, of="authors", without="midlayer.hidden_norm.weight"))


def test_weights_of_torch_need_torch(tmp_path, monkeypatch):
    folder = in_torch(write_head(tmp_path, of="authors"))
    monkeypatch.setitem(sys.modules, "torch", None)
    with refused("needs_torch", CheckpointError):
        read_weights(folder)


def test_a_head_fits_by_width_and_vocabulary(tmp_path, target):
    config = read_weights(write_head(tmp_path)).config
    assert check_fit(config, target) == "" and config.for_layers(32).aux_layers == (2, 16, 29)
    assert config.for_layers(4).row_reads.inner_layers == (1, 1, 0)
    with refused("wrong_target", FitError):
        config.for_layers(2)


@pytest.fixture
def head(tmp_path, target, options):
    return load_bound(write_head(tmp_path, options), target)


def test_steps_are_one_whole_pass_cut_up(head, target):
    """Chains in one step, in several, without rows one by one; a tree's paths as chains."""
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 512, 12)]
    states = target_states(target, tokens, head.row_reads)
    with torch.no_grad():
        rows = [half.numpy() for half in head.rows(states, torch.arange(len(tokens)))]
    backend = torch_backend_of(head, top_k=8)

    def steps(*cuts):
        cache = [np.zeros((0, *backend.kv_shape), np.float32)] * 2
        for start, stop in pairwise(cuts):
            result = backend.step(StepInputs.chain(tokens[start:stop], tuple(cache), tuple(half[:9] for half in rows)))
            cache = [np.concatenate((old, new)) for old, new in zip(cache, (result.keys, result.values), strict=True)]
        return result, cache

    whole, cache = steps(0, 12)
    for cuts in ((0, 1, 12), (0, 5, 9, 10, 12), range(13)):
        cut, other = steps(*cuts)
        np.testing.assert_allclose(cut.top_logprobs, whole.top_logprobs, atol=2e-5)
        assert (cut.top_tokens == whole.top_tokens).all()
        keys = backend.kv_shape[1] - 32
        np.testing.assert_allclose(other[0][..., :keys], cache[0][..., :keys], atol=2e-5)


def test_paths_of_a_tree_are_as_likely_as_chains(head, target):
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, 512, 10)]
    with torch.no_grad():
        states = target_states(target, tokens, head.row_reads)
        rows = tuple(half[:9].numpy() for half in head.rows(states, torch.arange(len(tokens))))
    backend = torch_backend_of(head, top_k=8)
    drafter = MoaDrafter(backend, max_context=64)
    drafter.add_rows(0, *rows)
    tree = drafter.propose(tokens, Budget.tree(40, 4, 8))
    paths, empty = {0: ()}, (np.zeros((0, *backend.kv_shape), np.float32),) * 2
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), 1):
        paths[node] = (*paths[parent], token)
        if len(paths[node]) > 1:
            found = backend.step(StepInputs.chain([*tokens, *paths[parent]], empty, rows))
            logprob = found.top_logprobs[0, found.top_tokens[0].tolist().index(token)]
            assert tree.scores[node - 1] - tree.scores[parent - 1] == pytest.approx(logprob, abs=1e-4)
    assert max(map(len, paths.values())) == tree.depth > 1
