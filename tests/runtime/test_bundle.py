"""The bundle refuses whatever is not exactly what the exporter wrote."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from moa_runtime.bundle import (
    Bundle,
    BundleError,
    Fingerprints,
    Manifest,
    TargetEntry,
    TensorSpec,
    tokenizer_fingerprint,
    write_manifest,
)

MANIFEST = Manifest(
    fingerprints=Fingerprints(target="aa", tokenizer="bb", drafter="cc"),
    target="some-model",
    inputs=(TensorSpec("tokens", "int64", ("T",)), TensorSpec("self_keys", "float32", ("S", 2, 16))),
    outputs=(TensorSpec("keys", "float32", ("T", 2, 16)),),
    kv_heads=2,
    head_dim=16,
    top_k=8,
    vocab_size=512,
    draft_vocab_size=384,
    max_context=512,
    stop_tokens=(2, 0),
    special_tokens={"eos_token": "<|im_end|>"},
    targets={"onnx": TargetEntry("graph.onnx", 4, {"weight_bits": 8}, {"queries": 10})},
    files={},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "graph.onnx").write_bytes(b"\x00\x01\x02\x03")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    write_manifest(tmp_path, MANIFEST)
    return tmp_path


def edit(folder: Path, **fields: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_what_was_written_is_read_back(folder: Path) -> None:
    bundle = Bundle.open(str(folder))
    assert sorted(bundle.manifest.files) == ["chat_template.jinja", "graph.onnx", "tokenizer.json"]
    assert bundle.manifest.files["tokenizer.json"].sha256 == hashlib.sha256(b"{}").hexdigest()
    assert bundle.graph_path("onnx") == folder / "graph.onnx"
    assert Manifest.from_json(bundle.manifest.to_json()) == bundle.manifest
    assert bundle.manifest.inputs == MANIFEST.inputs
    assert bundle.manifest.stop_tokens == (2, 0)


@pytest.mark.parametrize("name", ["graph.onnx", "tokenizer.json", "chat_template.jinja"])
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


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "not json", '"schema_version"'])
def test_a_file_that_is_no_manifest(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(BundleError, match="no bundle manifest"):
        Bundle.open(folder)


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_another_schema_version_is_refused(folder: Path, version: object) -> None:
    edit(folder, schema_version=version)
    with pytest.raises(BundleError, match=f"schema version {version!r}, this moa-edge reads version 1"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"fingerprints": {"target": "aa"}},
        {"kv_heads": None},
        {"top_k": "many"},
        {"inputs": 3},
        {"targets": {"onnx": {"file": "x"}}},
        {"files": []},
        {"files": {"../outside": {"sha256": "", "bytes": 0}}},
        {"files": {"/etc/passwd": {"sha256": "", "bytes": 0}}},
    ],
)
def test_a_malformed_field_is_an_error_not_a_crash(folder: Path, fields: dict[str, object]) -> None:
    edit(folder, **fields)
    with pytest.raises(BundleError, match="malformed"):
        Bundle.open(folder)


def test_a_graph_must_be_among_the_checked_files(folder: Path) -> None:
    entry = {"file": "../elsewhere.onnx", "bytes": 1, "quantisation": {}, "parity": {}}
    edit(folder, targets={"onnx": entry})
    with pytest.raises(BundleError, match=r"malformed.*does not list"):
        Bundle.open(folder)


def test_a_graph_that_was_not_made(folder: Path) -> None:
    with pytest.raises(BundleError, match="no graph for 'coreml'; it has: onnx"):
        Bundle.open(folder).graph_path("coreml")


def test_the_tokenizer_fingerprint_is_its_digests_first_half(folder: Path) -> None:
    assert tokenizer_fingerprint(folder / "tokenizer.json") == hashlib.sha256(b"{}").hexdigest()[:32]
    with pytest.raises(BundleError, match="there is no tokenizer file"):
        tokenizer_fingerprint(folder / "none.json")
