"""The target ``web``: graphs of few bits and no float16, that onnxruntime-web in Node computes as PyTorch does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest

from moa_decoder.checkpoint_weights import CheckpointWeights
from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.architectures.registry import torch_backend_of
from moa_export.errors import ExportError
from moa_export.graph_files import SESSION, WEB_GRAPH_FILE, WEB_WRITER_FILE, WRITER_SESSION, write_web_writer
from moa_export.recipe import Recipe, Weights
from moa_export.targets.base import NotRun, TargetOptions
from moa_export.targets.web import (
    FOLDER_VARIABLE,
    VERSION,
    WebBackend,
    WebEngine,
    WebTarget,
    find_engine,
    web_runner,
)
from moa_runtime.backends.base import StepInputs
from moa_runtime.backends.load import load_backend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.bundle import Bundle
from moa_runtime.manifest import TargetEntry
from support.export.commands import run, run_json
from support.refusals import refused
from support.tiny import tiny_with_layers

TEXT = [1, 40, 50, 60, 70, 80, 90, 100, 110]


def stepped(backend, text=TEXT, asked=1, rows=0):
    empty = np.zeros((0, *backend.kv_shape), np.float32)
    memory = np.random.default_rng(3).standard_normal((2, rows, *backend.row_shape)).astype(np.float32)
    return backend.step(StepInputs.chain(text, (empty, empty), tuple(memory), asked=asked))


def assert_alike(ours, theirs, error: float) -> None:
    assert np.abs(ours.keys - theirs.keys).max() < error and np.abs(ours.values - theirs.values).max() < error
    assert np.array_equal(ours.top_tokens[:, 0], theirs.top_tokens[:, 0])
    assert np.abs(ours.top_logprobs[:, 0] - theirs.top_logprobs[:, 0]).max() < error


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_the_graph_computes_what_the_drafter_computes(drafter, tmp_path, web_engine_here, bits):
    weights = Weights(bits)
    target = WebTarget(Recipe(weights, weights, Weights(bits, 0 if bits == 8 else 32)), TargetOptions())
    target.check(drafter.config)
    (entry,) = target.export(drafter, tmp_path).values()
    here, there = OnnxBackend(tmp_path / WEB_GRAPH_FILE, threads=1), target.runner(tmp_path, entry)
    assert isinstance(there, WebBackend)
    reference = stepped(torch_backend_of(drafter, top_k=16), asked=3, rows=7)
    for asked, rows in ((1, 1), (3, 7)):
        ours = stepped(there, asked=asked, rows=rows)
        assert_alike(ours, stepped(here, asked=asked, rows=rows), 1e-3)
    error = np.abs(ours.keys - reference.keys).mean() / np.abs(reference.keys).mean()
    assert error < {4: 0.3, 8: 0.03, 32: 1e-4}[bits]


@pytest.mark.parametrize("count", [1, 3])
def test_layers_of_the_target_are_in_the_graph(tiny_drafter, target, tmp_path, web_engine_here, count):
    drafter, weights = tiny_with_layers(tiny_drafter, target, count), Weights(32)
    own = WebTarget(Recipe(weights, weights, weights), TargetOptions())
    own.check(drafter.config)
    (entry,) = own.export(drafter, tmp_path).values()
    there = own.runner(tmp_path, entry)
    assert there.kv_shape == there.row_shape == (2 * (1 + count), 16)
    for rows in (7, 1):
        reference = stepped(torch_backend_of(drafter, top_k=16), asked=3, rows=rows)
        assert_alike(stepped(there, asked=3, rows=rows), reference, 1e-3)


@pytest.fixture(scope="module")
def exported(drafter, tmp_path_factory) -> tuple[Path, TargetEntry]:
    """The graph of the usual recipe, in a folder."""
    folder = tmp_path_factory.mktemp("web")
    (entry,) = WebTarget(Recipe(), TargetOptions()).export(drafter, folder).values()
    return folder, entry


def test_no_graph_holds_float16_and_codes_are_small(exported, tiny_target, tmp_path):
    write_web_writer(RoundedWeights(CheckpointWeights(tiny_target), 4), tmp_path)
    for file in (exported[0] / WEB_GRAPH_FILE, tmp_path / WEB_WRITER_FILE):
        graph = onnx.load(file).graph
        kinds = {tensor.data_type for tensor in graph.initializer}
        casts = {onnx.helper.get_attribute_value(a) for n in graph.node if n.op_type == "Cast" for a in n.attribute}
        assert onnx.TensorProto.FLOAT16 not in kinds | casts
        assert not {node.op_type for node in graph.node} & {"MatMulNBits"}
        wide = [t for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) == 2]
        codes = [t for t in graph.initializer if t.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.INT4)]
        assert sum(np.prod(t.dims) for t in wide) < 0.15 * sum(np.prod(t.dims) for t in codes)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_engine_computes_what_python_does_with_a_writer(tiny_target, tmp_path, web_engine_here, bits, tied):
    weights = CheckpointWeights(tiny_target)
    if tied:
        weights.head = weights.embedding
    entry = write_web_writer(RoundedWeights(weights, bits), tmp_path)
    there, here = web_runner(tmp_path, entry, npm=False), OnnxBackend(tmp_path / WEB_WRITER_FILE, threads=1)
    ours = stepped(there, asked=len(TEXT))
    assert_alike(ours, stepped(here, asked=len(TEXT)), 1e-3)
    cache = ours.keys[:-1], ours.values[:-1]
    last = there.step(StepInputs.chain(TEXT[-1:], cache, cache))
    assert np.allclose(last.top_logprobs, ours.top_logprobs[-1:], atol=1e-3)


def test_without_the_setting_a_graph_computes_the_same(exported, web_engine_here):
    folder, entry = exported
    specs = (*entry.inputs, *entry.outputs)
    plain = WebBackend(web_engine_here, folder / WEB_GRAPH_FILE, specs, {"graphOptimizationLevel": "all"})
    assert_alike(stepped(plain, rows=3), stepped(OnnxBackend(folder / WEB_GRAPH_FILE), rows=3), 0.1)


# -- the engine ----------------------------------------------------------------------------------


def test_a_process_that_fails_is_a_sentence(tmp_path, exported, web_engine_here):
    folder, entry = exported
    specs = (*entry.inputs, *entry.outputs)
    (tmp_path / "none.onnx").write_bytes(b"no graph")
    with refused("engine_failed") as caught:
        WebBackend(web_engine_here, tmp_path / "none.onnx", specs)
    assert "\n" not in str(caught.value)
    backend = WebBackend(web_engine_here, folder / WEB_GRAPH_FILE, specs)
    backend.close()
    with pytest.raises((ExportError, ValueError)):
        stepped(backend, rows=1)
    with refused("engine_failed"):
        WebBackend(WebEngine("true", web_engine_here.module), folder / WEB_GRAPH_FILE, specs)


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "none"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert isinstance(find_engine(npm=True), NotRun)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/node" if name == "node" else None)
    missing = find_engine(npm=False)
    assert isinstance(missing, NotRun) and "--npm" in missing.reason and str(tmp_path) not in missing.reason
    with refused("npm_missing"):
        find_engine(npm=True)


def test_npm_that_fails_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "deep" / "engine"))
    monkeypatch.setattr("shutil.which", lambda name: name)
    failed = subprocess.CompletedProcess([], 1, "", "npm error code E404\nnpm error 404 Not Found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with refused("npm_failed") as caught:
        find_engine(npm=True)
    assert str(caught.value).endswith(f"{VERSION}: code E404")
    assert not list((tmp_path / "deep").iterdir())


# -- from the command line -----------------------------------------------------------------------


def options(out: Path, tiny_target: Path, tiny_drafter: Path) -> list[object]:
    words = ["--target", "web", "--model", tiny_target, "--drafter", tiny_drafter, "--out", out, "--offline-bits", "8"]
    return [*words, "--quiet"]


@pytest.mark.slow
@pytest.mark.usefixtures("few_questions")
def test_a_bundle_is_proved_by_the_engine_itself(tmp_path, tiny_target, tiny_drafter, web_engine_here, capsys):
    out = tmp_path / "bundle"
    report = run_json(capsys, *options(out, tiny_target, tiny_drafter))
    assert report["targets"]["web"]["parity"]["status"] == report["targets"]["web"]["tau"]["status"] == "passed"
    assert report["web_writer"]["perplexity"]["status"] == "passed" and report["web_writer"]["bits"] == 8
    assert "engine" not in report["targets"]["web"]
    bundle = Bundle.open(out)
    entry, writer = bundle.manifest.targets["web"], bundle.manifest.web_writer
    assert entry.details["session"] == SESSION and writer.details["session"] == WRITER_SESSION
    assert stepped(load_backend(bundle), rows=2).top_tokens.shape == (1, 16)  # the only graph, found without a name
    assert WEB_WRITER_FILE in run(capsys, "inspect", out)
    found = run_json(capsys, "verify", out, "--model", tiny_target, "--drafter", tiny_drafter, "--quiet")["targets"]
    assert found["web"]["parity"]["status"] == found["web writer"]["perplexity"]["status"] == "passed"
    assert len(json.loads(run(capsys, "example", out, "--backend", "web"))["steps"]) == 3


@pytest.mark.usefixtures("few_questions")
def test_without_node_python_compares_and_the_report_says_so(tmp_path, tiny_target, tiny_drafter, monkeypatch, capsys):
    monkeypatch.setattr("moa_export.targets.web.shutil.which", lambda name: None)
    shown = run(capsys, *options(tmp_path / "bundle", tiny_target, tiny_drafter)).splitlines()
    checks = Bundle.open(tmp_path / "bundle").manifest.targets["web"].checks
    assert checks["parity"]["status"] == "passed" and checks["engine"]["status"] == "not run"
    assert {f"{name}: not run: {checks['engine']['reason']}" for name in ("web", "web writer")} <= set(shown)
