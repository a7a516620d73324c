"""A bundle is read as it was written, or refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import moa_runtime.bundle
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle, tokenizer_fingerprint, write_manifest
from moa_runtime.manifest import BundleError, Fingerprints, Manifest, RecommendedSampling, TargetEntry, TensorSpec
from moa_runtime.offline_stopping import StoppingRule
from support.refusals import refused

MANIFEST = Manifest(
    fingerprints=Fingerprints(target="aa", tokenizer="bb", drafter="cc"),
    target="some-model",
    kv_heads=2,
    head_dim=16,
    top_k=8,
    vocab_size=512,
    draft_vocab_size=384,
    max_context=512,
    stop_tokens=(2, 0),
    special_tokens={"eos_token": "<|im_end|>"},
    recipe={
        "linear": {"bits": 8, "group_size": 32, "symmetric": True},
        "head": {"bits": 8, "group_size": 32, "symmetric": True},
        "embedding": {"bits": 8, "group_size": 0, "symmetric": True},
        "activation_bits": 8,
        "top_k": 8,
        "tolerance": {"tau_loss": 0.02},
    },
    tools={"torch": "2.13.0"},
    targets={
        "onnx": TargetEntry(
            "graph.onnx",
            4,
            inputs=(TensorSpec("tokens", "int64", ("T",)), TensorSpec("self_keys", "float32", ("S", 2, 16))),
            outputs=(TensorSpec("keys", "float32", ("T", 2, 16)),),
            details={"opsets": {"ai.onnx": 18}},
            checks={"parity": {"status": "passed", "queries": 10}},
        ),
        "coreml": TargetEntry(
            "Half.mlpackage", 3, (), (), checks={"parity": {"status": "not run", "reason": "no Mac"}}
        ),
    },
    files={},
    manners=StoppingRule(0.4, 12, 8),
    sampling=RecommendedSampling(0.2, 0.9),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "graph.onnx").write_bytes(b"\x00\x01\x02\x03")
    (tmp_path / "Half.mlpackage").mkdir()
    (tmp_path / "Half.mlpackage" / "model.mlmodel").write_bytes(b"\x04\x05\x06")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    write_manifest(tmp_path, MANIFEST)
    return tmp_path


def edit(folder: Path, **fields: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_what_was_written_is_read_back(folder: Path) -> None:
    bundle = Bundle.open(str(folder))
    names = ["Half.mlpackage/model.mlmodel", "chat_template.jinja", "graph.onnx", "tokenizer.json"]
    assert sorted(bundle.manifest.files) == names
    assert bundle.manifest.files["tokenizer.json"].sha256 == hashlib.sha256(b"{}").hexdigest()
    assert bundle.graph_path("onnx") == folder / "graph.onnx"
    assert Manifest.from_json(bundle.manifest.to_json()) == bundle.manifest
    assert bundle.graph_path("coreml") == folder / "Half.mlpackage"
    assert bundle.manifest.targets == MANIFEST.targets
    assert bundle.manifest.manners == MANIFEST.manners and bundle.manifest.sampling == MANIFEST.sampling
    assert bundle.manifest.stop_tokens == (2, 0)


@pytest.mark.parametrize(
    "name", ["graph.onnx", "Half.mlpackage/model.mlmodel", "tokenizer.json", "chat_template.jinja"]
)
def test_a_changed_or_missing_file_is_named(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    with refused("damaged", BundleError) as caught:
        Bundle.open(folder)
    assert name in str(caught.value)
    (folder / name).unlink()
    with refused("file_missing", BundleError) as caught:
        Bundle.open(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["graph.onnx", "tokenizer.json", "manifest.json", "Half.mlpackage/model.mlmodel"])
def test_a_link_out_of_the_bundle_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    with refused("no_bundle" if name == "manifest.json" else "unreadable", BundleError):
        Bundle.open(folder)
    elsewhere.rename(folder / "other")
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "other")
    Bundle.open(folder)


def test_a_missing_bundle_graph_or_tokenizer_is_named(folder: Path) -> None:
    missing = folder / "nowhere"
    for other in (missing, folder / "Half.mlpackage"):
        with refused("no_bundle", BundleError) as caught:
            Bundle.open(other)
        assert str(other) in str(caught.value)
    with refused("unknown_target", BundleError) as caught:
        Bundle.open(folder).graph_path("executorch")
    assert "'executorch'" in str(caught.value) and "coreml, onnx" in str(caught.value)
    with refused("unknown_target", BundleError) as caught:
        load_backend(Bundle.open(folder), "coreml")
    assert "onnx" in str(caught.value) and "stateless" not in str(caught.value)  # the graph's name, which no option has
    assert tokenizer_fingerprint(folder / "tokenizer.json") == hashlib.sha256(b"{}").hexdigest()[:32]
    with refused("file_missing", BundleError):
        tokenizer_fingerprint(missing)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "not json", '"schema_version"', "[" * 10**5, "9" * 5000])
def test_a_file_that_is_no_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with refused("damaged", BundleError):
        Bundle.open(folder)


@pytest.mark.parametrize("version", [3, 1, "2", None])
def test_another_schema_version_is_refused(folder: Path, version: object) -> None:
    edit(folder, schema_version=version)
    with refused("unknown_version", BundleError) as caught:
        Bundle.open(folder)
    assert repr(version) in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"fingerprints": {"target": "aa"}},
        {"kv_heads": None},
        {"top_k": "many"},
        {"recipe": 3},
        {"tools": []},
        {"targets": {"onnx": {"file": "x"}}},
        {"files": []},
        {"manners": {"least_probability": 0.4}},
        {"manners": {"least_probability": 2, "repeated": 12, "longest": 8}},
        {"manners": {"least_probability": 0.4, "repeated": "twelve", "longest": 8}},
        {"manners": 3},
        {"sampling": {"temperature": 0.2}},
        {"sampling": {"temperature": -1, "top_p": 1}},
        {"sampling": {"temperature": 0.2, "top_p": 0}},
        {"sampling": "greedy"},
        {"files": {"../outside": {"sha256": "", "bytes": 0}}},
        {"files": {"/etc/passwd": {"sha256": "", "bytes": 0}}},
        *({"files": {name: {"sha256": "", "bytes": 0}}} for name in (".", "./a", "a//b", "a\n", "\x1b[2J", "\ud800")),
        *({"files": {"a": {"sha256": "", "bytes": size}}} for size in (-1, 0.5, "1")),
        {"fingerprints": {"target": "aa", "tokenizer": "bb", "surprise": "cc"}},
        {"max_context": True},
        {"max_context": -1},
        {"vocab_size": 1.5},
        {"target": ["a"]},
        {"stop_tokens": 2},
        {"stop_tokens": [None]},
        {"special_tokens": "bos"},
        {"targets": {"onnx": {"file": ["x"], "bytes": 1, "inputs": [], "outputs": [], "states": []}}},
        {"writer": {"file": "graph.onnx", "bytes": 1, "inputs": [], "outputs": [], "states": [], "details": {}}},
    ],
)
def test_a_malformed_field_is_named(folder: Path, fields: dict[str, object]) -> None:
    edit(folder, **fields)
    with refused("damaged", BundleError) as caught:
        Bundle.open(folder)
    [(name, value)] = fields.items()
    assert repr(name) in str(caught.value) or (name == "files" and repr(next(iter(value))) in str(caught.value))


def test_a_missing_field_and_an_unlisted_graph_are_named(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = json.loads(path.read_text())
    optional = {"schema_version", "manners", "sampling", "architecture", "target_parameters"}
    optional |= {name for name in whole if name.endswith("writer")}
    for name in whole.keys() - optional:
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
        with refused("damaged", BundleError) as caught:
            Bundle.open(folder)
        assert repr(name) in str(caught.value)
    for file in ("../elsewhere.onnx", "."):
        entry = {"file": file, "bytes": 1, "inputs": [], "outputs": [], "states": []}
        path.write_text(json.dumps({**whole, "targets": {"onnx": entry}}))
        with refused("damaged", BundleError) as caught:
            Bundle.open(folder)
        assert repr(file) in str(caught.value)


SCHEMA = json.loads(Path(moa_runtime.bundle.__file__).with_name("manifest.schema.json").read_text())


def schema_errors(folder: Path) -> list[str]:
    manifest = json.loads((folder / "manifest.json").read_text())
    return [error.json_path for error in Draft202012Validator(SCHEMA).iter_errors(manifest)]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"schema_version": 1}, "$.schema_version"),
        ({"surprise": 1}, "$"),
        ({"top_k": 0}, "$.top_k"),
        ({"manners": {"least_probability": 2, "repeated": 12, "longest": 8}}, "$.manners"),
        ({"manners": {"least_probability": 0.4, "repeated": 12}}, "$.manners"),
        ({"sampling": {"temperature": 0.2, "top_p": 0}}, "$.sampling"),
        ({"sampling": {"temperature": 0.2}}, "$.sampling"),
        *(
            ({"files": {name: {"sha256": "0" * 64, "bytes": 0}}}, "$.files")
            for name in ("../outside", "a/..", "/a", "./a", ".", "a//b", "a/", "a\\b", "c:a", "\x1b[2J")
        ),
        ({"files": {"a": {"sha256": "xyz", "bytes": 0}}}, "$.files.a.sha256"),
    ],
)
def test_the_json_schema_refuses_what_the_reader_refuses(folder: Path, fields: dict, where: str) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert schema_errors(folder) == []
    edit(folder, **fields)
    assert schema_errors(folder) == [where]


def test_a_check_that_was_not_run_has_a_reason(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["targets"]["coreml"]["checks"]["parity"]["reason"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert schema_errors(folder) == ["$.targets.coreml.checks.parity"]


def test_an_unfitted_drafter_writes_as_the_built_in_one_or_nothing() -> None:
    assert MANIFEST.stopping_rule == MANIFEST.manners
    unfitted = dataclasses.replace(MANIFEST, manners=None)
    assert unfitted.stopping_rule == StoppingRule()
    for architecture in ("early-exit", "independent"):
        one = dataclasses.replace(unfitted, architecture=architecture)
        assert not one.stopping_rule.may_continue([1, 2, 3], 0, 0.0)
