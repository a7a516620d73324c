"""``moa-export inspect``, ``verify`` and ``diff`` on a bundle of the tiny drafter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest

from moa_export import cli
from moa_runtime.bundle import Bundle, read_manifest, write_manifest
from support.export.commands import refuse, run, run_json
from support.tiny import make_tiny_drafter


@pytest.fixture
def bundle(onnx_export: tuple[Path, str]) -> Path:
    return onnx_export[0]


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bundle, tmp_path / "copy")


@pytest.fixture
def made_from(tiny_target: Path, tiny_drafter: Path) -> list[object]:
    return ["--model", tiny_target, "--drafter", tiny_drafter]


def test_inspect_prints_the_manifest_or_a_summary(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "inspect", bundle) == json.loads((bundle / "manifest.json").read_text())
    out = run(capsys, "inspect", bundle)
    assert "device_half.onnx" in out and Bundle.open(bundle).manifest.fingerprints.drafter in out


@pytest.mark.parametrize(
    ("architecture", "manners", "said"),
    [
        ("moa", {"least_probability": 0.5, "repeated": 12, "longest": 5}, "up to 5 tokens"),
        ("moa", None, "up to 8 tokens"),
        ("early-exit", None, "nothing writes"),
    ],
)
def test_inspect_says_what_writes_offline(copy, capsys, architecture, manners, said) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "manners": manners, "architecture": architecture}))
    assert said in run(capsys, "inspect", copy)


def test_verify_proves_the_graphs_again(
    bundle: Path, made_from: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(capsys, "verify", bundle, *made_from)
    checks = Bundle.open(bundle).manifest.targets["onnx"].checks
    assert {name: found["targets"]["onnx"][name] for name in checks} == checks
    assert found["files"] == {"status": "passed", "count": 3}
    assert run(capsys, "verify", bundle, "--files-only").startswith("3 ")


def test_verify_finds_a_graph_that_computes_something_else(
    copy: Path, made_from: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / "device_half.onnx"
    model = onnx.load(path)
    *_, scales = (tensor for tensor in model.graph.initializer if tensor.name.endswith("_scales"))
    scales.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scales)[::-1].copy(), scales.name))
    onnx.save(model, path)
    refuse(capsys, None, "verify", copy, "--files-only")  # the runtime's own error
    write_manifest(copy, read_manifest(copy))  # digests that fit the changed graph
    assert cli.main(list(map(str, ["verify", copy, *made_from]))) == 1
    assert "failed: onnx: " in capsys.readouterr().err


def test_verify_refuses_another_drafter(
    bundle: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_tiny_drafter(tiny_target, tmp_path / "other", seed=9)
    refuse(capsys, "other_model", "verify", bundle, "--model", tiny_target, "--drafter", other)


def test_diff_names_what_differs(bundle: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "diff", bundle, copy)
    (copy / "chat_template.jinja").write_text("other")
    write_manifest(copy, read_manifest(copy))
    keys = ["files/chat_template.jinja/bytes", "files/chat_template.jinja/sha256"]
    assert sorted(json.loads(run(capsys, "diff", bundle, copy, "--json", status=1))) == keys
    assert f"{keys[0]}:" in run(capsys, "diff", bundle, copy, status=1)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_folder_that_is_no_bundle_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert str(tmp_path) in refuse(capsys, None, command, tmp_path)


@pytest.mark.parametrize("backend", ["cuda", "coreml"])
def test_example_refuses_a_backend_that_is_unknown_or_has_no_graph(
    bundle: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert backend in refuse(
        capsys, "unknown_backend" if backend == "cuda" else None, "example", bundle, "--backend", backend
    )
