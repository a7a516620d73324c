"""``moa-export inspect``, ``verify`` and ``diff`` on a bundle of the tiny drafter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moa_export import cli
from moa_runtime.bundle import Bundle, read_manifest, write_manifest


@pytest.fixture
def bundle(onnx_export: tuple[Path, str]) -> Path:
    return onnx_export[0]


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bundle, tmp_path / "copy")


def test_inspect_prints_the_manifest_or_a_summary(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((bundle / "manifest.json").read_text())
    assert cli.main(["inspect", str(bundle)]) == 0
    out = capsys.readouterr().out
    assert "device_half.onnx" in out and Bundle.open(bundle).manifest.fingerprints.drafter in out


@pytest.mark.parametrize(
    ("architecture", "manners", "said"),
    [
        ("moa", {"least_probability": 0.5, "repeated": 12, "longest": 5}, "while it is sure, up to 5 tokens"),
        ("moa", None, "while it is sure, up to 8 tokens"),
        ("early-exit", None, "nothing writes: the drafter alone is wrong more often than right"),
    ],
)
def test_inspect_says_what_writes_offline(copy, capsys, architecture, manners, said) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "manners": manners, "architecture": architecture}))
    assert cli.main(["inspect", str(copy)]) == 0
    assert said in capsys.readouterr().out


def test_verify_proves_the_graphs_again(
    bundle: Path, tiny_target: Path, tiny_drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--model", str(tiny_target), "--drafter", str(tiny_drafter)]
    assert cli.main(["verify", str(bundle), "--json", *where]) == 0
    found = json.loads(capsys.readouterr().out)
    checks = Bundle.open(bundle).manifest.targets["onnx"].checks
    assert {name: found["targets"]["onnx"][name] for name in checks} == checks
    assert found["files"] == {"status": "passed", "count": 3}


def test_verify_finds_a_graph_that_computes_something_else(
    copy: Path, tiny_target: Path, tiny_drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnx
    from onnx import numpy_helper

    path = copy / "device_half.onnx"
    model = onnx.load(path)
    scales = [tensor for tensor in model.graph.initializer if tensor.name.endswith("_scales")]
    scales[-1].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scales[-1])[::-1].copy(), scales[-1].name))
    onnx.save(model, path)
    assert cli.main(["verify", str(copy), "--files-only"]) == 2
    assert "was changed" in capsys.readouterr().err
    write_manifest(copy, read_manifest(copy))  # digests that fit the changed graph
    where = ["--model", str(tiny_target), "--drafter", str(tiny_drafter)]
    assert cli.main(["verify", str(copy), *where]) == 1
    assert "failed: onnx: mean log-prob error" in capsys.readouterr().err


def test_verify_refuses_another_drafter(
    bundle: Path, tiny_target: Path, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from support import tiny

    other = tiny.make_tiny_drafter(tiny_target, tmp_path / "other", seed=9)
    assert cli.main(["verify", str(bundle), "--model", str(tiny_target), "--drafter", str(other)]) == 2
    assert "was made from the drafter" in capsys.readouterr().err


def test_files_only_needs_no_torch(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(bundle), "--files-only"]) == 0
    assert capsys.readouterr().out == "3 files are whole\n"


def test_diff_names_what_differs(bundle: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", str(bundle), str(copy)]) == 0
    assert capsys.readouterr().out == "the bundles are the same\n"
    (copy / "chat_template.jinja").write_text("other")
    write_manifest(copy, read_manifest(copy))
    assert cli.main(["diff", str(bundle), str(copy), "--json"]) == 1
    assert sorted(json.loads(capsys.readouterr().out)) == [
        "files/chat_template.jinja/bytes",
        "files/chat_template.jinja/sha256",
    ]
    assert cli.main(["diff", str(bundle), str(copy)]) == 1
    assert "files/chat_template.jinja/bytes:" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_folder_that_is_no_bundle(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, str(tmp_path)]) == 2
    assert "is no bundle" in capsys.readouterr().err
