"""ONNX graphs: stored weights, what tracing and rounding cost in memory, and the offline writer; refused recipes."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from moa_decoder.checkpoint_weights import CheckpointWeights
from moa_decoder.errors import TargetError
from moa_decoder.rounded_weights import RoundedWeights, rounded_between
from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import load_bound, load_checkpoint, save_checkpoint
from moa_drafter.config import LayerDims
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target, load_target
from moa_export.cli import main
from moa_export.errors import ExportError
from moa_export.graph_files import GRAPH_FILE, TARGET, WRITER, WRITER_FILE, write_web_writer, write_writer
from moa_export.offline_model import NONE, WriterSettings, losses_of, make_writer, model_of
from moa_export.progress import Progress
from moa_export.recipe import PRESETS, Recipe, Weights
from moa_export.recordings import Recording, record
from moa_export.targets import target_of
from moa_export.targets.base import TargetOptions
from moa_export.targets.onnx import OnnxTarget
from moa_export.validation import Proof, compare, rehearse
from moa_runtime.backends.base import Backend, StepInputs
from moa_runtime.backends.load import SharedBackend, load_backend, load_writer, writer_backend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.bundle import Bundle
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.manifest import TargetEntry
from support.export.rounded import rounded_model
from support.refusals import refused
from support.tiny import make_tiny_bundle

TEXT = [1, 40, 50, 60, 70, 80, 90, 100, 110]


@pytest.mark.parametrize(("linear", "head", "symmetric"), [(8, 4, True), (4, 8, False), (8, 32, False), (32, 8, True)])
def test_every_part_has_its_own_bits(drafter, tmp_path, linear, head, symmetric):
    recipe = Recipe(Weights(linear, 32, symmetric), Weights(head, 32, symmetric), Weights(32))
    target = OnnxTarget(recipe, TargetOptions())
    (entry,) = target.export(drafter, tmp_path).values()
    products = {
        attribute.i
        for node in onnx.load(tmp_path / GRAPH_FILE).graph.node
        if node.op_type == "MatMulNBits"
        for attribute in node.attribute
        if attribute.name == "bits"
    }
    assert products == {linear, head} - {32}
    keys, values = np.random.default_rng(0).standard_normal((2, 30, 2, 16)).astype(np.float32)
    expected = [rehearse(torch_backend_of(drafter, top_k=16), Recording(list(range(10, 40)), 12, keys, values))]
    assert 0 < compare(expected, target.runner(tmp_path, entry)).mean_logprob_error < 0.25


def test_what_one_file_cannot_hold_is_refused_before_any_work(drafter: MoADrafter) -> None:
    llama = LayerDims(hidden_size=4096, num_heads=32, num_kv_heads=4, head_dim=128, intermediate_size=6144)
    config = dataclasses.replace(drafter.config, vocab_size=128256, draft_vocab_size=128256, decoder=llama)
    OnnxTarget(PRESETS["laptop"], TargetOptions()).check(config)
    with refused("too_large"):
        OnnxTarget(PRESETS["max-quality"], TargetOptions()).check(config)


def test_a_sharper_drafter_has_a_sharper_graph(tiny_target, tiny_drafter, target, tmp_path):
    drafter = load_checkpoint(tiny_drafter)
    drafter.config = dataclasses.replace(drafter.config, sharpness=1.5)
    save_checkpoint(drafter, tmp_path / "drafter")
    make_tiny_bundle(tmp_path / "bundle", tiny_target, tmp_path / "drafter", "none", preset="max-quality")

    def logprobs(backend: Backend) -> np.ndarray:
        nothing, row = (np.zeros((count, *backend.kv_shape), np.float32) for count in (0, 1))
        return backend.step(StepInputs.chain([7, 11, 13], (nothing, nothing), (row, row), asked=3)).top_logprobs

    graph = logprobs(load_backend(Bundle.open(tmp_path / "bundle")))
    sharp, plain = (
        logprobs(torch_backend_of(load_bound(folder, target), top_k=graph.shape[1]))
        for folder in (tmp_path / "drafter", tiny_drafter)
    )
    np.testing.assert_allclose(graph, sharp, atol=0.05)
    assert np.abs(sharp - plain).max() > 0.2


@pytest.mark.parametrize(
    ("name", "recipe", "options", "code"),
    [
        ("onnx", Recipe(Weights(8, 48)), {}, "unsupported_group"),
        ("web", Recipe(Weights(16)), {}, "unsupported_bits"),
        ("web", Recipe(head=Weights(8, 32, symmetric=False)), {}, "unsupported_offset"),
        ("web", Recipe(Weights(8, 48)), {}, "unsupported_group"),
        ("coreml", Recipe(linear=Weights(8, 48)), {}, "unsupported_group"),
        ("coreml", Recipe(head=Weights(4, 128)), {}, "unsupported_group"),
        ("coreml", Recipe(embedding=Weights(4, 48)), {}, "unsupported_group"),
        ("coreml", Recipe(linear=Weights(symmetric=False)), {}, "unsupported_offset"),
        ("coreml", Recipe(), {"context": 100}, "out_of_range"),
        ("coreml", Recipe(), {"context": 16384}, "out_of_range"),
        ("executorch", Recipe(Weights(16), Weights(16), activation_bits=32), {}, "unsupported_bits"),
        ("executorch", Recipe(), {"delegates": ("vulkan",)}, "unsupported_bits"),
        ("executorch", Recipe(Weights(4, 16)), {}, "unsupported_group"),
        ("executorch", Recipe(Weights(8, 32, symmetric=False)), {}, "unsupported_offset"),
        ("executorch", Recipe(activation_bits=32), {}, "unsupported_activations"),
        ("executorch", Recipe(embedding=Weights(16)), {}, "unsupported_bits"),
        ("executorch", Recipe(Weights(4, 96), Weights(4, 96)), {}, "unsupported_group"),
    ],
)
def test_a_recipe_that_a_target_cannot_carry_out_is_refused(drafter: MoADrafter, name, recipe, options, code) -> None:
    with refused(code):
        target_of(name)(recipe, TargetOptions(**options)).check(drafter.config)


# -- the offline writer ---------------------------------------------------------------------------


def stepped(backend, text=TEXT, asked=1):
    empty = np.zeros((0, *backend.kv_shape), np.float32)
    return backend.step(StepInputs.chain(text, (empty, empty), (empty, empty), asked=asked))


def logits_of(target: Target, text=TEXT) -> torch.Tensor:
    with torch.no_grad():
        return target.model(torch.tensor([text])).logits[0]


def writer_weights(folder: Path, bits: int, *, tied: bool = False) -> RoundedWeights:
    weights = CheckpointWeights(folder)
    if tied:
        weights.head = weights.embedding
    return RoundedWeights(weights, bits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_writer_computes_what_its_rounded_weights_do(target, tiny_target, tmp_path, bits, tied):
    weights = writer_weights(tiny_target, bits, tied=tied)
    entry = write_writer(weights, tmp_path)
    graph = writer_backend(tmp_path, entry, threads=1)
    assert not graph.needs_a_row and graph.heads_first and graph.kv_shape == (8, 16) and graph.top_k == 16
    ours = stepped(graph, asked=len(TEXT))
    with torch.no_grad():
        expected = rounded_model(target, weights)(torch.tensor([TEXT])).logits[0].log_softmax(-1).topk(16)
    # One cache for all layers, as graphs of older versions and for browsers have; floats are multiplied.
    other = writer_backend(tmp_path, write_web_writer(weights, tmp_path), threads=1)
    assert isinstance(other, OnnxBackend) and not other.heads_first and other.kv_shape == graph.kv_shape
    theirs = stepped(other, asked=len(TEXT))
    assert np.array_equal(theirs.top_tokens[:, 0], expected.indices.numpy()[:, 0])
    assert np.allclose(theirs.top_logprobs, expected.values.numpy(), atol=1e-3)
    # Here activations are rounded to 8 bits.
    assert np.abs(ours.top_logprobs - expected.values.numpy()).mean() < 0.04
    assert np.abs(ours.keys - theirs.keys).mean() < 0.03 * np.abs(theirs.keys).mean()
    # Step by step it says the same as at once, from a cache of any order in memory.
    for cache in ((ours.keys[:-1], ours.values[:-1]), (ours.keys[:-1].copy(), ours.values[:-1].copy())):
        last = graph.step(StepInputs.chain(TEXT[-1:], cache, cache))
        assert np.allclose(last.top_logprobs[0], ours.top_logprobs[-1], atol=1e-2)


def test_a_writer_s_drafts_do_not_depend_on_where_its_cache_lies(tiny_target, tmp_path):
    """Trees and chains, a text that is taken back, and caches that grow."""
    here = writer_backend(tmp_path, write_writer(writer_weights(tiny_target, 8), tmp_path), threads=1)
    copied = SharedBackend(here)
    copied.heads_first = False
    drafters = [MoaDrafter(backend, max_context=512) for backend in (here, copied)]
    long = [(7 * n) % 500 for n in range(300)]
    for text in ([*TEXT, 3], TEXT[:4], [*TEXT[:4], 9], long, [*long[:-20], 5], [*long, 5, 6]):
        for budget in (Budget.chain(3), Budget.tree(6, 3, 2)):
            ours, theirs = (drafter.propose(text, budget) for drafter in drafters)
            assert ours == theirs and len(ours.tokens) >= 3


def test_a_table_that_is_head_too_is_stored_once(tiny_target, tmp_path):
    sizes = [write_writer(writer_weights(tiny_target, 8, tied=tied), tmp_path).bytes for tied in (True, False)]
    assert sizes[1] - sizes[0] > 0.9 * 512 * 64


def test_what_lies_on_a_grid_of_four_bits_is_represented_exactly():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (24, 3, 32))
    codes[:, :, 0], codes[:, :, 1] = 0, 15  # as of any group that was rounded between its extremes
    scales, least = (rng.uniform(low, 1, (24, 3)).astype(np.float16).astype(np.float32) for low in (0.1, -1))
    matrix = (codes * scales[:, :, None] + least[:, :, None]).reshape(24, 96).astype(np.float32)
    found = rounded_between(matrix)
    assert np.array_equal(found.scales, scales) and np.allclose(found.dense(), matrix, atol=1e-6)


def test_a_bundle_has_its_writer(writing_bundle):
    entry = Bundle.open(writing_bundle).manifest.writer
    assert entry.details == {"model": "target", "bits": 8, "max_context": 512} and entry.file == WRITER_FILE
    assert entry.checks["perplexity"]["status"] == "passed" and entry.checks["perplexity"]["ratio"] < 1.05


def test_a_writer_s_memory_and_time_are_taken_when_it_writes(writing_bundle, onnx_bundle, monkeypatch):
    assert load_writer(Bundle.open(onnx_bundle)) is None
    made = []
    monkeypatch.setattr(
        "moa_runtime.backends.onnx_writer.OnnxWriter.__init__", lambda self, *_, **__: made.append(self)
    )
    backend = load_writer(Bundle.open(writing_bundle))
    assert backend.kv_shape == (8, 16) and backend.top_k == 16 and not backend.needs_a_row and not made
    with pytest.raises(AttributeError):
        stepped(backend)
    assert len(made) == 1


def test_which_model_writes(target: Target, monkeypatch):
    assert model_of(WriterSettings(), target) == (TARGET, "")
    assert model_of(WriterSettings("none"), target) == (NONE, "")
    monkeypatch.setattr(type(target.model), "num_parameters", lambda self: 8_000_000_000)
    model, note = model_of(WriterSettings(), target)
    assert model == NONE and "8.0 billion" in note and "--offline-model" in note
    assert model_of(WriterSettings("target"), target) == (TARGET, "")
    with refused("unsupported_bits"):
        WriterSettings(bits=3)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bits of graphs that are said to be written, with nothing in them."""
    bits_of = []

    def write(weights: RoundedWeights, folder: Path) -> TargetEntry:
        bits_of.append(weights.bits)
        (folder / WRITER_FILE).write_bytes(b"")
        return TargetEntry(WRITER_FILE, 0, (), ())

    monkeypatch.setattr("moa_export.targets.onnx.write_writer", write)
    return bits_of


@pytest.mark.parametrize(
    ("model", "fails", "bits"),
    [(None, (4, 8), None), ("target", (4, 8), 8), (None, (4,), 8)],
    ids=["none if too much is lost", "one that was asked for", "of 8 bits, with a note"],
)
def test_four_bits_then_eight_then_none(model, fails, bits, written, target, tmp_path, monkeypatch):
    def prove(*_):
        lost = {"perplexity": {"status": "failed", "reason": f"lost in {written[-1]}"}}
        return Proof(lost if written[-1] in fails else {}, 1.0)

    monkeypatch.setattr("moa_export.offline_model._prove", prove)
    made, notes = make_writer(WriterSettings(model), target, [], tmp_path, Progress(io.StringIO(), quiet=True))
    assert written == [4, 8] and list(made) == ([] if bits is None else [WRITER])
    if bits is None:
        assert "lost in 8" in notes[0] and not list(tmp_path.iterdir())
    else:
        assert made[WRITER].entry.details["bits"] == bits
        assert any("lost in 4" in note for note in notes) == (model is None)
        assert bool(made[WRITER].proof.failures) == (8 in fails)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("model", [None, "target"])
def test_an_engine_that_loses_too_much_or_cannot_have_the_writer_is_left_out(
    model, refuses, written, target, tmp_path, monkeypatch
):
    class Lossy(OnnxTarget):
        def export_writer(self, weights: RoundedWeights, folder: Path) -> TargetEntry:
            if refuses:
                raise ExportError("its layers are odd", code="unsupported_writer")
            package = folder / "Writer.mlpackage"
            package.mkdir()
            (package / "weights").write_bytes(b"")
            return TargetEntry(package.name, 0, (), ())

    def prove(exporter: OnnxTarget, *_):
        lost = {"perplexity": {"status": "failed", "reason": "lost"}}
        return Proof(lost if isinstance(exporter, Lossy) else {}, 1.0)

    monkeypatch.setattr("moa_export.offline_model._prove", prove)
    exporters = {"onnx": OnnxTarget(Recipe(), TargetOptions()), "coreml": Lossy(Recipe(), TargetOptions())}
    made, notes = make_writer(
        WriterSettings(model), target, [], tmp_path, Progress(io.StringIO(), quiet=True), exporters
    )
    if model and not refuses:  # it was asked for: the export fails with its proof
        assert made["coreml writer"].proof.failures and not notes
    else:
        assert list(made) == [WRITER] and [file.name for file in tmp_path.iterdir()] == [WRITER_FILE]
        (note,) = notes
        assert "coreml writer" in note and ("odd" if refuses else "lost") in note


def test_a_target_without_a_description_has_no_writer(target, tmp_path, monkeypatch):
    def refuse(folder: Path) -> CheckpointWeights:
        raise TargetError("no such family", code="unsupported_target")

    monkeypatch.setattr("moa_export.offline_model.weights_of", refuse)
    arguments = (target, [], tmp_path, Progress(io.StringIO(), quiet=True))
    made, (note,) = make_writer(WriterSettings(), *arguments)
    assert not made and "no such family" in note
    with refused("unsupported_target", ExportError):
        make_writer(WriterSettings("target"), *arguments)


@pytest.mark.parametrize(("change", "code"), [({"hidden_size": 72}, "unsupported_group"), ({}, "too_large")])
def test_a_writer_that_no_file_or_operator_holds_is_refused(tiny_target, tmp_path, change, code):
    weights = writer_weights(tiny_target, 8)
    size = {"vocab_size": 512} if change else {"vocab_size": 2**30}
    weights.weights._spec = dataclasses.replace(weights.spec, **change, **size)
    with refused(code):
        write_writer(weights, tmp_path)


def test_what_is_recorded_has_the_loss_of_the_target(target, drafter):
    recordings = record(target, drafter, ["Who are you?"])
    (recording,) = recordings
    assert len(recording.losses) == len(recording.tokens) - recording.prompt
    assert np.mean(recording.losses) == pytest.approx(np.mean(losses_of(target, recording)), rel=1e-5)


def test_a_model_with_another_tokenizer_is_refused(tiny_target, tiny_drafter, tmp_path, capsys):
    other = tmp_path / "other"
    model = load_target(str(tiny_target))
    model.model.save_pretrained(other)
    model.tokenizer.add_tokens(["<extra>"])
    model.tokenizer.save_pretrained(other)
    words = ["--target", "onnx", "--model", tiny_target, "--drafter", tiny_drafter, "--out", tmp_path / "bundle"]
    assert main([*map(str, words), "--offline-model", str(other), "--quiet"]) != 0
    assert "[other_tokenizer]" in capsys.readouterr().err


def test_verify_and_inspect_know_the_writer(writing_bundle, tiny_target, tiny_drafter, capsys):
    assert main(["inspect", str(writing_bundle)]) == 0
    shown = capsys.readouterr().out
    assert "target" in shown and WRITER_FILE in shown
    words = ["verify", writing_bundle, "--model", tiny_target, "--drafter", tiny_drafter, "--json", "--quiet"]
    assert main(list(map(str, words))) == 0
    found = json.loads(capsys.readouterr().out)["targets"]["writer"]
    assert found["perplexity"]["status"] == "passed" and found["step_ms"] > 0
