"""The bundle refuses whatever is not exactly what the exporter wrote."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import moa_runtime.bundle
from moa_runtime.bundle import (
    Bundle,
    BundleError,
    Fingerprints,
    Manifest,
    RecommendedSampling,
    TargetEntry,
    TensorSpec,
    tokenizer_fingerprint,
    write_manifest,
)
from moa_runtime.offline_stopping import StoppingRule

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
def test_one_changed_byte_is_found_and_its_file_named(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(BundleError, match=f"^{name} in the bundle .* was changed"):
        Bundle.open(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "graph.onnx").unlink()
    with pytest.raises(BundleError, match=r"lacks its file graph\.onnx"):
        Bundle.open(folder)


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"is no bundle: it has no manifest\.json; make one with moa-export"):
        Bundle.open(tmp_path)
    with pytest.raises(BundleError, match="is no bundle: there is no such folder"):
        Bundle.open(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "not json", '"schema_version"', "[" * 10**5, "9" * 5000])
def test_a_file_that_is_no_manifest(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(BundleError, match="no bundle manifest"):
        Bundle.open(folder)


@pytest.mark.parametrize("version", [3, 1, "2", None])
def test_another_schema_version_is_refused(folder: Path, version: object) -> None:
    edit(folder, schema_version=version)
    with pytest.raises(BundleError, match=f"schema version {version!r}, this moa-edge reads version 2"):
        Bundle.open(folder)


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
def test_a_malformed_field_is_named_and_no_crash(folder: Path, fields: dict[str, object]) -> None:
    edit(folder, **fields)
    with pytest.raises(BundleError, match=r"^manifest\.json is malformed \(") as caught:
        Bundle.open(folder)
    [name] = fields
    assert "leaves the bundle" in str(caught.value) or f"{name!r} is not of the form that an" in str(caught.value)


def test_a_field_that_is_missing_is_named(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = json.loads(path.read_text())
    for name in whole.keys() - {"schema_version", "writer", "web_writer", "manners", "sampling", "architecture"}:
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
        with pytest.raises(BundleError, match=rf"malformed \(it lacks '{name}'\): export the bundle again"):
            Bundle.open(folder)


def test_a_graph_must_be_among_the_checked_files(folder: Path) -> None:
    entry = {"file": "../elsewhere.onnx", "bytes": 1, "inputs": [], "outputs": [], "states": []}
    edit(folder, targets={"onnx": entry})
    with pytest.raises(BundleError, match=r"malformed.*does not list"):
        Bundle.open(folder)


def test_a_graph_that_was_not_made(folder: Path) -> None:
    with pytest.raises(BundleError, match="no graph for 'executorch'; it has: coreml, onnx"):
        Bundle.open(folder).graph_path("executorch")


def test_the_tokenizer_fingerprint_is_its_digests_first_half(folder: Path) -> None:
    assert tokenizer_fingerprint(folder / "tokenizer.json") == hashlib.sha256(b"{}").hexdigest()[:32]
    with pytest.raises(BundleError, match="there is no tokenizer file"):
        tokenizer_fingerprint(folder / "none.json")


SCHEMA = json.loads(Path(moa_runtime.bundle.__file__).with_name("manifest.schema.json").read_text())


def schema_errors(folder: Path) -> list[str]:
    manifest = json.loads((folder / "manifest.json").read_text())
    return [error.json_path for error in Draft202012Validator(SCHEMA).iter_errors(manifest)]


def test_the_json_schema_takes_what_is_written(folder: Path) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert schema_errors(folder) == []


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
        ({"files": {"../outside": {"sha256": "0" * 64, "bytes": 0}}}, "$.files"),
        ({"files": {"a": {"sha256": "xyz", "bytes": 0}}}, "$.files.a.sha256"),
    ],
)
def test_the_json_schema_refuses_what_the_reader_refuses(folder: Path, fields: dict, where: str) -> None:
    edit(folder, **fields)
    assert schema_errors(folder) == [where]


def test_a_check_that_was_not_run_says_why(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["targets"]["coreml"]["checks"]["parity"]["reason"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert schema_errors(folder) == ["$.targets.coreml.checks.parity"]


def test_what_nobody_fitted_writes_as_the_built_in_drafter_or_nothing() -> None:
    assert MANIFEST.stopping_rule == MANIFEST.manners
    unfitted = dataclasses.replace(MANIFEST, manners=None)
    assert unfitted.stopping_rule == StoppingRule()
    for architecture in ("early-exit", "independent"):
        one = dataclasses.replace(unfitted, architecture=architecture)
        assert not one.stopping_rule.may_continue([1, 2, 3], 0, 0.0)
