"""A bundle without a graph is made of a target alone, without torch, and read like any other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import moa_runtime.bundle
from moa_drafter.target_facts import facts_of, parameters_of
from moa_export.cli import main
from moa_export.plain_bundle import cached_plain_bundle
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.drafters.factory import backend_for, drafter_for
from moa_runtime.drafters.sssd import SssdDrafter
from support.drafter.gguf_files import write_gguf
from support.refusals import refused

SCHEMA = json.loads(Path(moa_runtime.bundle.__file__).with_name("manifest.schema.json").read_text())


@pytest.mark.parametrize(("architecture", "drafts"), [("sssd", True), ("none", False)])
def test_it_says_what_a_client_needs(tiny_target, tmp_path, capsys, architecture, drafts) -> None:
    words = ["--drafter", architecture, "--model", str(tiny_target), "--out", str(tmp_path / "bundle")]
    assert main([*words, "--dry-run"]) == 0 and not (tmp_path / "bundle").exists()
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["targets"] == {}
    bundle, facts = Bundle.open(tmp_path / "bundle"), facts_of(tiny_target)
    raw = json.loads((bundle.folder / "manifest.json").read_text())
    assert not list(Draft202012Validator(SCHEMA).iter_errors(raw))
    manifest = bundle.manifest
    assert (manifest.fingerprints.target, manifest.fingerprints.drafter) == (facts.fingerprint, "")
    assert (manifest.target, manifest.stop_tokens) == (tiny_target.name, facts.stop_tokens)
    assert manifest.target_parameters == parameters_of(tiny_target) > 0
    assert manifest.max_context == facts.config.max_position_embeddings and not manifest.has_rows
    drafter = drafter_for(manifest, backend_for(bundle))
    assert isinstance(drafter, SssdDrafter) if drafts else drafter is None
    with refused("unknown_target"):
        load_backend(bundle)
    assert main(["inspect", str(bundle.folder)]) == main(["verify", str(bundle.folder)]) == 0
    assert f"{manifest.vocab_size if drafts else 0} of {manifest.vocab_size} tokens" in capsys.readouterr().out
    assert "example.json" not in (bundle.folder / "README.md").read_text()
    assert main(["example", str(bundle.folder)]) == 0
    assert json.loads(capsys.readouterr().out)["chat"]["tokens"] and "README.md" in manifest.files


def test_licences_travel_with_it(tiny_target, tmp_path, capsys) -> None:
    """Those in files; else the model card; else what a GGUF file says."""

    def licences(model: Path, name: str) -> dict[str, str]:
        out = tmp_path / name
        assert main(["--drafter", "sssd", "--model", str(model), "--out", str(out), "--quiet"]) == 0
        listed = [file for file in Bundle.open(out).manifest.files if file.startswith("licenses/")]
        assert main(["inspect", str(out)]) == 0
        assert (", ".join(listed) or "none named") in capsys.readouterr().out
        return {file: (out / file).read_text() for file in listed}

    assert licences(tiny_target, "own") == {"licenses/target/LICENSE": (tiny_target / "LICENSE").read_text()}
    model = shutil.copytree(tiny_target, tmp_path / "model")
    (model / "LICENSE").unlink()
    assert licences(model, "none") == {}
    (model / "README.md").write_text("license: mit")
    assert licences(model, "card") == {"licenses/target/README.md": "license: mit"}
    for name in ("LICENSE.txt", "NOTICE"):
        (model / name).write_text(name)
    assert licences(model, "files") == {
        "licenses/target/LICENSE.txt": "LICENSE.txt",
        "licenses/target/NOTICE": "NOTICE",
    }
    (said,) = write_gguf(tiny_target, tmp_path / "model.gguf", add=lambda writer: writer.add_license("apache-2.0"))
    assert "general.license: apache-2.0\n" in licences(said, "gguf")["licenses/target/LICENSE.txt"]


def test_a_new_chat_template_of_the_same_weights_makes_the_cached_one_anew(tiny_target, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))
    model = shutil.copytree(tiny_target, tmp_path / "model")
    made, template = cached_plain_bundle(str(model)), model / "chat_template.jinja"
    (made / "mark").touch()
    assert (cached_plain_bundle(str(model)) / "mark").exists()
    template.write_text(template.read_text() + "{# new #}")
    assert (cached_plain_bundle(str(model)) / "chat_template.jinja").read_text() == template.read_text()


def test_it_is_made_without_torch(tiny_target, tmp_path) -> None:
    code = (
        "import sys; from moa_export.cli import main\n"
        f"assert not main(['--drafter', 'sssd', '--model', {str(tiny_target)!r}, '--out', {str(tmp_path / 'b')!r}])\n"
        "assert not {'torch', 'transformers', 'onnx', 'onnxruntime'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "moa-train" in done.stderr, done.stderr


def test_a_writer_can_be_in_it(tiny_target, tmp_path) -> None:
    words = ["--drafter", "sssd", "--model", str(tiny_target), "--offline-model", "target", "--no-checks", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "bundle")]) == 0
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert manifest.writer is not None and not manifest.targets


def test_a_drafter_of_another_target_is_refused_with_a_way_out(tmp_path, tiny_target, capsys) -> None:
    assert main(["--model", str(tiny_target), "--out", str(tmp_path / "bundle"), "--quiet"]) == 2
    assert "--drafter sssd" in capsys.readouterr().err
