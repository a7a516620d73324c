"""``moa-export`` from the command line to a bundle that drafts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.config import drafter_fingerprint
from moa_drafter.model import MoADrafter
from moa_drafter.target import target_fingerprint
from moa_export import cli, pipeline
from moa_export.bundle_writer import rejected_path, staged_bundle
from moa_export.errors import ExportError, ParityError
from moa_export.offline_model import NONE, WriterSettings
from moa_export.progress import Progress
from moa_export.recipe import Tolerance
from moa_export.recordings import Recording
from moa_export.validation import compare, rehearse
from moa_runtime import optional_deps as extras
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle, tokenizer_fingerprint
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.errors import MoaError
from support import tiny
from support.drafted import draft_of


@pytest.fixture(scope="module")
def made(onnx_export: tuple[Path, str]) -> tuple[Bundle, dict]:
    """One export of the tiny drafter, and the report of it."""
    return Bundle.open(onnx_export[0]), json.loads(onnx_export[1])


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The line that a refused command prints, perhaps behind how far it was."""
    assert cli.main([str(arg) for arg in argv]) == 2
    *before, said = capsys.readouterr().err.splitlines()
    assert said.startswith("moa-export: error: ") and all(line.endswith(" s gone)") for line in before)
    return said


def test_the_report_matches_the_bundle(made: tuple[Bundle, dict]) -> None:
    bundle, report = made
    onnx_report, entry = report["targets"]["onnx"], bundle.manifest.targets["onnx"]
    assert report["bundle"] == str(bundle.folder)
    assert report["bytes"] == sum(path.stat().st_size for path in bundle.folder.iterdir())
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
    assert manifest.tools["torch"] == torch.__version__
    graph, entry = onnx.load(made[0].graph_path("onnx")).graph, manifest.targets["onnx"]
    for values, specs in ((graph.input, entry.inputs), (graph.output, entry.outputs)):
        shapes = [(v.name, tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim)) for v in values]
        assert shapes == [(spec.name, spec.shape) for spec in specs]


def test_the_graph_holds_8_bit_weights_and_nothing_of_this_machine(made: tuple[Bundle, dict]) -> None:
    path = made[0].graph_path("onnx")
    graph = onnx.load(path).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("MatMulNBits") == 13  # 7 in self-attention, 5 in cross-attention, the head
    large = {t.data_type for t in graph.initializer if np.prod(t.dims) >= 64 * 64}
    assert large <= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    assert str(Path(cli.__file__).parents[2]).encode() not in path.read_bytes()


def test_the_bundle_drafts_like_pytorch(made: tuple[Bundle, dict], drafter: MoADrafter) -> None:
    rng = np.random.default_rng(5)
    keys, values = rng.standard_normal((2, 9, 2, 16)).astype(np.float32)
    results = []
    for backend in (torch_backend_of(drafter, top_k=16), load_backend(made[0])):
        assert (backend.top_k, backend.kv_shape) == (16, (2, 16))
        runtime = MoaDrafter(backend, max_context=made[0].manifest.max_context)
        runtime.add_rows(0, keys, values)
        results.append(draft_of(runtime, list(range(20, 30)), 1) + draft_of(runtime, [*range(20, 26), 77], 1))
    for ours, theirs in zip(*results, strict=True):
        near = pytest.approx(theirs.logprob, abs=0.1)  # rounding may swap two that are almost as likely
        assert ours.token == theirs.token or ours.logprob == near
        assert ours.logprob == pytest.approx(theirs.logprob, abs=0.3)


def test_no_cached_tokens_and_one_row_are_enough(made: tuple[Bundle, dict]) -> None:
    backend = load_backend(made[0], threads=1)
    none, one = np.zeros((0, 2, 16), np.float32), np.zeros((1, 2, 16), np.float32)
    result = backend.step(StepInputs.chain([5], (none, none), (one, one)))
    assert result.top_tokens.shape == result.top_logprobs.shape == (1, 16)
    assert np.isfinite(result.top_logprobs).all()
    assert (np.diff(result.top_logprobs) <= 0).all()


def test_an_unknown_backend_and_one_whose_graph_is_not_there(made: tuple[Bundle, dict]) -> None:
    with pytest.raises(MoaError, match="unknown backend 'cuda': choose one of onnx, executorch, web, coreml"):
        load_backend(made[0], "cuda")
    with pytest.raises(MoaError, match="has no graph for 'coreml-stateless'; it has: onnx"):
        load_backend(made[0], "coreml")


class _Skewed:
    """A backend whose log-probabilities are off by a tenth."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.kv_shape = backend.kv_shape

    def step(self, inputs: StepInputs) -> StepResult:
        result = self._backend.step(inputs)
        result.top_logprobs[:] += 0.1
        return result


def test_parity_measures_the_error_it_is_given(drafter: MoADrafter) -> None:
    keys, values = np.random.default_rng(0).standard_normal((2, 30, 2, 16)).astype(np.float32)
    recording = Recording(list(range(10, 40)), 12, keys, values)
    backend = torch_backend_of(drafter, top_k=16)
    expected = [rehearse(backend, recording)]
    same, skewed = compare(expected, backend), compare(expected, _Skewed(backend))
    assert (same.max_logprob_error, same.top1_agreement, same.top_k_overlap) == (0, 1, 1)
    assert skewed.mean_logprob_error == pytest.approx(0.1, abs=1e-5)
    assert same.failures(Tolerance()) == []
    assert skewed.failures(Tolerance(mean_logprob_error=0.05)) == ["mean log-prob error 0.1000 > 0.05"]


def test_a_large_target_is_run_in_bfloat16(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = pipeline.ExportSettings(
        ("onnx",), tiny_drafter, str(tiny_target), questions=["Who are you?"], writer=WriterSettings(NONE)
    )
    assert pipeline.load(settings)[1].model.dtype == torch.float32
    monkeypatch.setattr(pipeline, "_LARGE", 0)
    drafter, target, _ = pipeline.load(settings)
    assert target.model.dtype == torch.bfloat16
    assert drafter.embedding.dtype == drafter.head.dtype == torch.float32
    report = pipeline.export_bundle(tmp_path / "bundle", settings, Progress(sys.stderr, quiet=True))
    assert report.made[0].proof.failures == []


def test_without_checks_nothing_is_compared_and_verify_does_it_later(
    tiny_target: Path,
    tiny_drafter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("something is compared")

    out, inputs = tmp_path / "bundle", ["--model", str(tiny_target), "--drafter", str(tiny_drafter)]
    with monkeypatch.context() as patched:
        for name in ("record", "reference_of", "fit_stopping_rule", "prove"):
            patched.setattr(pipeline, name, never)
        assert cli.main(["--target", "onnx", "--out", str(out), *inputs, "--no-checks", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["targets"]["onnx"]["parity"]["status"] == report["writer"]["perplexity"]["status"] == "not run"
    assert report["targets"]["onnx"]["step_ms"] is None and report["writer"]["bits"] == 4
    checks = Bundle.open(out).manifest.targets["onnx"].checks
    assert checks["tau"] == {"status": "not run", "reason": "nobody asked for checks; moa-export verify makes them"}
    cli.main(["verify", str(out), *inputs, "--json"])
    found = json.loads(capsys.readouterr().out)["targets"]
    assert found["onnx"]["parity"]["status"] == "passed" and found["writer"]["perplexity"]["ratio"] > 1


def test_a_graph_beyond_the_tolerance_is_set_aside_with_exit_code_1(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "strict.yaml").write_text("tolerance: {mean_logprob_error: 0.0}")
    out = tmp_path / "place" / "bundle"
    argv = ["--target", "onnx", "--out", str(out), "--config", str(tmp_path / "strict.yaml")]
    assert (
        cli.main([*argv, "--model", str(tiny_target), "--drafter", str(tiny_drafter), "--offline-model", "none"]) == 1
    )
    assert "differs too much from PyTorch (onnx: mean log-prob error" in capsys.readouterr().err
    assert [path.name for path in out.parent.iterdir()] == ["bundle.rejected"]
    check = Bundle.open(rejected_path(out)).manifest.targets["onnx"].checks["parity"]
    assert check["status"] == "failed" and check["mean_logprob_error"] > 0


def test_bad_input_is_one_sentence(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert "unknown --target ''" in refused(capsys, "--target", "", "--out", out)
    assert "unknown --target 'tflite': choose one of onnx, web, executorch, coreml, all" in refused(
        capsys, "--target", "onnx,tflite", "--out", out
    )
    assert "unknown --backend 'qnn': choose one of xnnpack, coreml, vulkan" in refused(
        capsys, "--target", "executorch", "--backend", "qnn", "--out", out
    )
    assert "unknown preset 'watch'" in refused(capsys, "--target", "onnx", "--preset", "watch", "--out", out)
    assert "bits, not 5" in refused(capsys, "--target", "onnx", "--bits", "5", "--out", out)
    assert "--context must be" in refused(capsys, "--target", "onnx", "--context", "1", "--out", out)
    assert "a group size of 128 does not divide the drafter's hidden size of 64" in refused(
        capsys, "--target", "onnx", "--bits", "4", "--group-size", "128", "--drafter", tiny_drafter,
        "--model", tiny_target, "--out", out,
    )  # fmt: skip
    assert "unknown target 'nonsense'" in refused(
        capsys, "--target", "onnx", "--out", out, "--model", "nonsense", "--drafter", tiny_drafter
    )
    assert "config.json" in refused(
        capsys, "--target", "onnx", "--out", out, "--model", tiny_target, "--drafter", tmp_path / "nowhere"
    )
    assert not out.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_checks_and_writes_nothing(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--out", str(tmp_path / "out"), "--model", str(tiny_target), "--dry-run"]  # for onnx
    argv += ["--drafter", str(tiny_drafter), "--preset", "phone", "--head-bits", "8"]
    assert cli.main([*argv, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["targets"], plan["drafter"]) == (["onnx"], drafter_fingerprint(tiny_drafter))
    assert (plan["recipe"]["linear"]["bits"], plan["recipe"]["head"]["bits"]) == (4, 8)
    assert cli.main(argv) == 0
    assert "would export" in capsys.readouterr().out
    assert "does not divide" in refused(capsys, *argv, "--group-size", "128")
    assert list(tmp_path.iterdir()) == []


def test_a_drafter_made_for_another_target_is_refused(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_drafter / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "target_num_layers": 30}))
    err = refused(capsys, "--target", "onnx", "--out", tmp_path / "out", "--model", tiny_target, "--drafter", tmp_path)
    assert "made for number of layers 30, the target has 4" in err


def test_a_missing_toolchain_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(extras.MODULES, "export", ("torch", "onnxscript_of_another_world"))
    err = refused(capsys, "--target", "onnx", "--out", tmp_path / "out")
    assert 'needs onnxscript_of_another_world: pip install "moa-edge[export]"' in err


def test_an_existing_folder_is_replaced_only_if_it_is_a_bundle_and_forced(
    made: tuple[Bundle, dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = (made[0].folder / "manifest.json").read_bytes()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    assert "--force to replace" in refused(capsys, "--target", "onnx", "--out", precious)
    assert "not a bundle" in refused(capsys, "--target", "onnx", "--out", precious, "--force")
    (precious / "manifest.json").write_bytes(manifest)
    assert "holds thesis.txt" in refused(capsys, "--target", "onnx", "--out", precious, "--force")
    (precious / "thesis.txt").rename(tmp_path / "thesis.txt")
    with staged_bundle(precious, force=True) as stage:
        (stage / "new").write_text("new")
    assert [path.name for path in precious.iterdir()] == ["new"]


def test_a_failure_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    with pytest.raises(RuntimeError, match="power cut"), staged_bundle(out, force=False) as stage:
        (stage / "half").write_text("half")
        raise RuntimeError("power cut")
    with (
        pytest.raises(ExportError, match=r"cannot write .*: No space left"),
        staged_bundle(out, force=False),
    ):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_what_lies_under_the_rejected_name_is_not_deleted_unless_it_is_a_bundle(tmp_path: Path) -> None:
    kept = tmp_path / "bundle.rejected"
    kept.mkdir()
    (kept / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="not a bundle"), staged_bundle(tmp_path / "bundle", force=False):
        raise ParityError("too far")
    assert (kept / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_the_default_target_exports_small_and_close(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--target", "onnx", "--out", str(tmp_path / "bundle"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["targets"]["onnx"]
    assert report["bytes"] <= 48_000_000
    assert report["tau"]["loss"] <= 0.02
