"""``moa-export`` from the command line to a bundle that drafts, and its commands on that bundle."""

from __future__ import annotations

import errno
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from filelock import FileLock

from moa_drafter.config import drafter_fingerprint
from moa_drafter.target_facts import target_fingerprint
from moa_export import cli, pipeline, progress
from moa_export.bundle_writer import rejected_path, staged_bundle
from moa_export.errors import ParityError
from moa_export.graph_files import NOT_ASKED
from moa_export.offline_model import NONE, WriterSettings
from moa_export.progress import Progress
from moa_runtime.bundle import Bundle, tokenizer_fingerprint, write_manifest
from moa_runtime.cli_main import own_program
from moa_runtime.manifest import read_manifest
from support import tiny
from support.export.commands import refuse, run, run_json
from support.refusals import refused


@pytest.fixture(scope="module")
def made(onnx_export: tuple[Path, str]) -> tuple[Bundle, dict]:
    """One export of the tiny drafter, and the report of it."""
    return Bundle.open(onnx_export[0]), json.loads(onnx_export[1])


@pytest.fixture
def bundle(onnx_export: tuple[Path, str]) -> Path:
    return onnx_export[0]


def test_the_report_matches_the_bundle(made: tuple[Bundle, dict]) -> None:
    bundle, report = made
    onnx_report, entry = report["targets"]["onnx"], bundle.manifest.targets["onnx"]
    assert report["bundle"] == str(bundle.folder)
    assert report["bytes"] == sum(path.stat().st_size for path in bundle.folder.rglob("*") if path.is_file())
    assert onnx_report["bytes"] == entry.bytes == bundle.graph_path("onnx").stat().st_size
    assert onnx_report["parity"] == entry.checks["parity"]
    assert onnx_report["parity"]["status"] == "passed" and onnx_report["parity"]["queries"] > 50
    assert onnx_report["tau"] == entry.checks["tau"]
    assert onnx_report["tau"]["prompts"] == 24 and onnx_report["tau"]["before"] >= 1
    assert onnx_report["step_ms"] > 0


def test_the_manifest_tells_the_truth(made: tuple[Bundle, dict], tiny_target: Path, tiny_drafter: Path) -> None:
    manifest = made[0].manifest
    assert manifest.fingerprints.target == target_fingerprint(tiny_target)
    assert manifest.fingerprints.drafter == drafter_fingerprint(tiny_drafter)
    assert manifest.fingerprints.tokenizer == tokenizer_fingerprint(tiny_target / "tokenizer.json")
    assert manifest.target == tiny_target.name  # a name, not a path
    assert (manifest.kv_heads, manifest.head_dim, manifest.top_k) == (2, 16, 16)
    assert (manifest.vocab_size, manifest.draft_vocab_size) == (tiny.VOCAB_SIZE, tiny.DRAFT_VOCAB_SIZE)
    assert manifest.stop_tokens == (2,)
    assert manifest.recipe["linear"] == {"bits": 8, "group_size": 32, "symmetric": True}
    assert manifest.tools["torch"] == torch.__version__ and manifest.manners is not None
    graph, entry = onnx.load(made[0].graph_path("onnx")).graph, manifest.targets["onnx"]
    for values, specs in ((graph.input, entry.inputs), (graph.output, entry.outputs)):
        shapes = [(v.name, tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim)) for v in values]
        assert shapes == [(spec.name, spec.shape) for spec in specs]


def test_the_graph_holds_8_bit_weights_and_nothing_of_this_machine(made: tuple[Bundle, dict]) -> None:
    path = made[0].graph_path("onnx")
    graph = onnx.load(path).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("MatMulNBits") == 10  # 5 in self-attention, 4 in cross-attention, the head
    large = {t.data_type for t in graph.initializer if np.prod(t.dims) >= 64 * 64}
    assert large <= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    assert str(Path(cli.__file__).parents[2]).encode() not in path.read_bytes()


def test_a_large_target_is_run_in_bfloat16(tiny_target, tiny_drafter, tmp_path, monkeypatch):
    settings = pipeline.ExportSettings(
        ("onnx",), tiny_drafter, str(tiny_target), questions=["Who are you?"], writer=WriterSettings(NONE)
    )
    assert pipeline.load(settings)[1].model.dtype == torch.float32
    monkeypatch.setattr(pipeline, "_LARGE", 0)
    drafter, target, _ = pipeline.load(settings)
    assert target.model.dtype == torch.bfloat16
    assert drafter.embedding.dtype == drafter.head.dtype == torch.float32
    report = pipeline.export_bundle(tmp_path / "bundle", settings, Progress(sys.stderr, quiet=True))
    assert report.made["onnx"].proof.failures == []


@pytest.mark.usefixtures("few_questions")
def test_without_checks_nothing_is_compared_and_verify_does_it_later(
    tiny_target, tiny_drafter, tmp_path, capsys, monkeypatch
):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("something is compared")

    out, inputs = tmp_path / "bundle", ["--model", tiny_target, "--drafter", tiny_drafter]
    with monkeypatch.context() as patched:
        for name in ("record", "reference_of", "fit_stopping_rule", "prove"):
            patched.setattr(pipeline, name, never)
        report = run_json(capsys, "--out", out, *inputs, "--no-checks")
    assert report["targets"]["onnx"]["parity"]["status"] == report["writer"]["perplexity"]["status"] == "not run"
    assert report["targets"]["onnx"]["step_ms"] is None and report["writer"]["bits"] == 4
    checks = Bundle.open(out).manifest.targets["onnx"].checks
    assert checks["tau"] == {"status": "not run", "reason": NOT_ASKED}
    cli.main(["verify", str(out), *map(str, inputs), "--json"])
    found = json.loads(capsys.readouterr().out)["targets"]
    assert found["onnx"]["parity"]["status"] == "passed" and found["writer"]["perplexity"]["ratio"] > 1


@pytest.mark.usefixtures("few_questions")
def test_a_graph_beyond_the_tolerance_is_set_aside_with_exit_code_1(tiny_target, tiny_drafter, tmp_path, capsys):
    (tmp_path / "strict.yaml").write_text("tolerance: {mean_logprob_error: 0.0}")
    out = tmp_path / "place" / "bundle"
    argv = ["--out", out, "--config", tmp_path / "strict.yaml", "--model", tiny_target, "--drafter", tiny_drafter]
    assert cli.main([*map(str, argv), "--offline-model", "none"]) == 1
    assert capsys.readouterr().err.endswith("  [too_far]\n")
    assert [path.name for path in out.parent.iterdir()] == ["bundle.rejected"]
    check = Bundle.open(rejected_path(out)).manifest.targets["onnx"].checks["parity"]
    assert check["status"] == "failed" and check["mean_logprob_error"] > 0


@pytest.mark.parametrize(
    ("options", "code", "names"),
    [
        (["--target", ""], "unknown_target", "''"),
        (["--target", "onnx,tflite"], "unknown_target", "'tflite'"),
        (["--target", "executorch", "--backend", "qnn"], "unknown_backend", "'qnn'"),
        (["--preset", "watch"], "unknown_preset", "'watch'"),
        (["--bits", "5"], "unsupported_bits", "5"),
        (["--context", "1"], "out_of_range", "--context"),
        (["--bits", "4", "--group-size", "128"], "unsupported_group", "128"),
        (["--model", "nonsense"], None, "'nonsense'"),
        (["--drafter", "nowhere"], None, "nowhere"),
    ],
)
def test_bad_input_is_refused_before_any_work(tiny_target, tiny_drafter, tmp_path, capsys, options, code, names):
    inputs = ["--out", tmp_path / "out", "--model", tiny_target, "--drafter", tiny_drafter]
    assert names in refuse(capsys, code, *inputs, *options)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_checks_and_writes_nothing(tiny_target, tiny_drafter, tmp_path, capsys):
    argv = ["--out", tmp_path / "out", "--model", tiny_target, "--dry-run"]  # for onnx
    argv += ["--drafter", tiny_drafter, "--preset", "phone", "--head-bits", "8"]
    plan = run_json(capsys, *argv)
    assert (plan["targets"], plan["drafter"]) == (["onnx"], drafter_fingerprint(tiny_drafter))
    assert (plan["recipe"]["linear"]["bits"], plan["recipe"]["head"]["bits"]) == (4, 8)
    assert str(tmp_path / "out") in run(capsys, *argv)
    refuse(capsys, "unsupported_group", *argv, "--group-size", "128")
    refuse(capsys, "unknown_target", *argv, "--model", "nothing")
    assert list(tmp_path.iterdir()) == []


def test_a_drafter_made_for_another_target_is_refused(tiny_target, tiny_drafter, tmp_path, capsys):
    drafter = shutil.copytree(tiny_drafter, tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, "target_num_layers": 30}))
    said = refuse(capsys, None, "--out", tmp_path / "out", "--model", tiny_target, "--drafter", drafter)
    assert "layers 30" in said


def test_an_existing_folder_is_replaced_only_if_it_is_a_bundle_and_forced(made, tmp_path, capsys):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    refuse(capsys, "exists", "--out", precious)
    refuse(capsys, "no_bundle", "--out", precious, "--force")
    (precious / "manifest.json").write_bytes((made[0].folder / "manifest.json").read_bytes())
    assert "thesis.txt" in refuse(capsys, "foreign_file", "--out", precious, "--force")
    (precious / "thesis.txt").rename(tmp_path / "thesis.txt")
    with staged_bundle(precious, force=True) as stage:
        (stage / "new").write_text("new")
    assert [path.name for path in precious.iterdir()] == ["new"]


def test_a_failure_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    with pytest.raises(RuntimeError, match="power cut"), staged_bundle(out, force=False) as stage:
        (stage / "half").write_text("half")
        raise RuntimeError("power cut")
    for number, code in ((errno.ENOSPC, "disk_full"), (errno.EROFS, "unwritable")):
        with refused(code), staged_bundle(out, force=False):
            raise OSError(number, "no")
    assert list(tmp_path.iterdir()) == []


def test_the_rejected_name_is_replaced_only_if_it_is_a_bundle(tmp_path: Path) -> None:
    kept = tmp_path / "bundle.rejected"
    kept.mkdir()
    (kept / "notes.txt").write_text("mine")
    with refused("no_bundle"), staged_bundle(tmp_path / "bundle", force=False):
        raise ParityError("too far", code="refused")
    assert (kept / "notes.txt").read_text() == "mine"


def shown(titles: list[tuple[str, int]], **options: object) -> list[str]:
    out = io.StringIO()
    drawn = Progress(out, **{"quiet": False, **options})
    for title, steps in titles:
        with drawn.stage(title, steps) as advance:
            for _ in range(steps):
                advance()
    return out.getvalue().splitlines()


def test_each_stage_is_a_line_and_a_long_one_has_more(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [("reading", 1), ("comparing", 3)]
    first = ["1/2 reading, then comparing; 7 s to go", "2/2 comparing 0/3"]
    assert shown(stages, plan={"reading": 4.0, "comparing": 3.0}) == [
        f"moa-export: {each} (0 s gone)" for each in first
    ]
    assert shown(stages, quiet=True) == []
    monkeypatch.setattr(progress, "_EVERY_S", 0.001)
    out = io.StringIO()
    with Progress(out).stage("waiting"):
        while out.getvalue().count("moa-export: waiting (0 s gone)") < 3:
            time.sleep(0.001)


def test_on_a_terminal_the_line_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_MOVES_S", 0.001)
    out = io.StringIO()
    out.isatty = lambda: True
    with Progress(out).stage("comparing", 2) as advance:
        advance()
        while "comparing 1/2" not in out.getvalue():
            time.sleep(0.001)
    assert len(set(out.getvalue().replace("\n", "\r").split("\r"))) == 3, "nothing, and two states"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends programs without asking them")
def test_an_export_that_is_terminated_leaves_nothing(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    options = ("--model", tiny_target, "--drafter", tiny_drafter, "--out", tmp_path / "bundle")
    exporting = subprocess.Popen(own_program("moa_export.cli", *map(str, options)), stderr=subprocess.PIPE, text=True)
    while exporting.poll() is None and not list(tmp_path.iterdir()):
        time.sleep(0.01)
    exporting.terminate()
    said = exporting.communicate()[1]
    assert exporting.returncode == 128 + 15 and "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """A running one keeps its folder."""
    left, running = tmp_path / ".bundle-abcdefgh", tmp_path / ".bundle-ijklmnop"
    for folder in (left, running):
        (folder / "bundle").mkdir(parents=True)
        (folder / "running.lock").touch()
    with FileLock(running / "running.lock"), staged_bundle(tmp_path / "bundle", force=False) as stage:
        (stage / "new").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [running.name, "bundle"]


# -- inspect, verify, diff, example ---------------------------------------------------------------


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


def test_verify_proves_the_graphs_again(bundle, made_from, capsys):
    found = run_json(capsys, "verify", bundle, *made_from)
    checks = Bundle.open(bundle).manifest.targets["onnx"].checks
    assert {name: found["targets"]["onnx"][name] for name in checks} == checks
    assert found["files"] == {"status": "passed", "count": 6}
    assert run(capsys, "verify", bundle, "--files-only").startswith("6 ")


@pytest.mark.usefixtures("few_questions")
def test_verify_finds_a_graph_that_computes_something_else(copy, made_from, capsys):
    path = copy / "device_half.onnx"
    model = onnx.load(path)
    *_, head = (node.input[1] for node in model.graph.node if node.op_type == "MatMulNBits")
    (codes,) = (tensor for tensor in model.graph.initializer if tensor.name == head)
    codes.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(codes)[::-1].copy(), head))
    onnx.save(model, path)
    refuse(capsys, None, "verify", copy, "--files-only")  # the runtime's own error
    write_manifest(copy, read_manifest(copy))  # digests that fit the changed graph
    assert cli.main(list(map(str, ["verify", copy, *made_from]))) == 1
    assert "failed: onnx: " in capsys.readouterr().err


def test_verify_refuses_another_drafter(bundle, tiny_target, tmp_path, capsys):
    other = tiny.make_tiny_drafter(tiny_target, tmp_path / "other", seed=9)
    refuse(capsys, "other_model", "verify", bundle, "--model", tiny_target, "--drafter", other)


def test_diff_names_what_differs(bundle: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "diff", bundle, copy)
    (copy / "chat_template.jinja").write_text("other")
    write_manifest(copy, read_manifest(copy))
    keys = ["files/chat_template.jinja/bytes", "files/chat_template.jinja/sha256"]
    assert sorted(json.loads(run(capsys, "diff", bundle, copy, "--json", status=1))) == keys
    assert f"{keys[0]}:" in run(capsys, "diff", bundle, copy, status=1)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_folder_that_is_no_bundle_is_refused(command, tmp_path, capsys):
    assert str(tmp_path) in refuse(capsys, None, command, tmp_path)


@pytest.mark.parametrize("backend", ["cuda", "coreml"])
def test_example_refuses_a_backend_that_is_unknown_or_has_no_graph(bundle, backend, capsys):
    assert backend in refuse(
        capsys, "unknown_backend" if backend == "cuda" else None, "example", bundle, "--backend", backend
    )


@pytest.mark.slow
def test_the_default_target_exports_small_and_close(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "--out", tmp_path / "bundle")["targets"]["onnx"]
    assert report["bytes"] <= 48_000_000
    assert report["tau"]["loss"] <= 0.02
