"""The offline writer for ExecuTorch computes what its description says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.target import load_target
from moa_drafter.target_folder import weights_of
from moa_drafter.target_source import DEFAULT_TARGET
from moa_export.bundle_readme import _described
from moa_export.errors import ExportError
from moa_export.graph_files import usual_bits, write_web_writer
from moa_export.recipe import Recipe
from moa_export.targets.base import TargetOptions
from moa_runtime.backends.base import StepResult
from moa_runtime.backends.executorch_writer import ExecutorchWriter
from moa_runtime.backends.load import load_backend, load_writer, writer_backend
from moa_runtime.bundle import Bundle, write_manifest
from moa_runtime.manifest import MANIFEST_FILE, BundleError, TargetEntry, read_manifest
from support.export.rounded import model_of_integer_products
from support.export.writers import (
    CAPPED,
    TEXT,
    compare,
    described,
    make_proved_bundle,
    stepped,
    write_alike,
    written_by,
)
from support.late import Late
from support.refusals import refused
from support.tiny import make_tiny_target

executorch, program = Late("moa_export.targets.executorch"), Late("moa_export.targets.executorch_writer")
Written = tuple[RoundedWeights, Path, TargetEntry]


def written(weights: RoundedWeights, folder: Path) -> Written:
    return weights, folder, executorch.ExecutorchTarget(Recipe(), TargetOptions()).export_writer(weights, folder)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of one layer: each takes ten seconds or more to lower."""
    return make_tiny_target(tmp_path_factory.mktemp("shallow") / "target", layers=1)


@pytest.fixture(scope="module")
def four_bits(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(described(shallow, 4), tmp_path_factory.mktemp("writer"))


def compared(weights: RoundedWeights, folder: Path, entry: TargetEntry) -> StepResult:
    """Compare a program, which rounds activations to 8 bits, with a graph that multiplies floats."""
    ours = writer_backend(folder, entry, threads=1)
    theirs = writer_backend(folder, write_web_writer(weights, folder), threads=1)
    assert stepped(ours, [(7 * n) % 500 for n in range(300)]).top_tokens.shape == (1, ours.top_k)  # in parts
    return compare(ours, theirs, logprobs=0.05, keys=0.03, values=0.05)


def test_the_program_computes_what_its_rounded_weights_do(shallow, four_bits):
    weights, folder, entry = four_bits
    step = compared(weights, folder, entry)
    model, backend = model_of_integer_products(load_target(str(shallow)), weights), writer_backend(folder, entry)
    values: list[np.ndarray] = []
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *given: values.append(given[2][0].numpy()))
    with torch.no_grad():
        model(torch.tensor([TEXT]))
    expected = values[0]
    write_alike(backend, model, tie=0.15)
    size = expected.shape[1] // backend.kv_shape[1]
    errors = np.abs(step.values[:, :size].reshape(len(TEXT), -1) - expected)
    assert np.median(errors) < 1e-5  # the rest is activations that lie between two levels


@pytest.mark.slow
def test_another_family_in_eight_bits_computes_its_description(tiny_target, tmp_path):
    compared(*written(described(tiny_target, 8, windows=(None, 4), **CAPPED), tmp_path))


def bundle_with_writer(made: Written, plain: Path, path: Path) -> None:
    """Copy a bundle without the program, and add it."""
    _, folder, entry = made
    shutil.copytree(plain, path)
    shutil.copy(folder / entry.file, path)
    write_manifest(path, replace(read_manifest(plain), executorch_writer=entry))


def test_the_engine_of_the_drafter_runs_the_writer(four_bits, writing_bundle, tmp_path):
    _, folder, entry = four_bits
    bundle_with_writer(four_bits, writing_bundle, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    ours = load_writer(bundle, SimpleNamespace(writer="executorch_writer"))
    direct = writer_backend(folder, entry)
    assert (ours.kv_shape, ours.top_k, ours.max_positions) == (direct.kv_shape, direct.top_k, direct.max_positions)
    assert not ours.heads_first and load_writer(bundle).heads_first  # onnxruntime's
    np.testing.assert_array_equal(stepped(ours).top_tokens, stepped(direct).top_tokens)


@pytest.mark.parametrize(
    "change",
    [
        {"details": {"most": {"T": 0, "Q": 16, "S": 2048}}},
        {"details": {"most": {"T": 256, "Q": 16}}},
        {"details": {"most": None}},
        {"details": {"window": "4"}},
        {"inputs": []},
        {"outputs": []},
    ],
    ids=str,
)
def test_a_malformed_entry_is_refused_when_the_bundle_is_opened(four_bits, writing_bundle, tmp_path, change):
    bundle_with_writer(four_bits, writing_bundle, tmp_path / "bundle")
    path = tmp_path / "bundle" / MANIFEST_FILE
    raw = json.loads(path.read_text())
    writer = raw["executorch_writer"]
    changed = writer | change | {"details": writer["details"] | change.get("details", {})}
    path.write_text(json.dumps(raw | {"executorch_writer": changed}))
    with refused("damaged", BundleError):
        read_manifest(tmp_path / "bundle")


def test_other_files_and_other_inputs_are_refused_in_a_sentence(four_bits, tmp_path):
    _, folder, entry = four_bits
    for content in (bytes(range(256)) * 400, b"", (folder / entry.file).read_bytes()[:1000]):
        (tmp_path / entry.file).write_bytes(content)
        with refused("cannot_load"):
            writer_backend(tmp_path, entry)
    fewer = replace(entry, inputs=entry.inputs[:-1])
    with refused("cannot_run"):
        stepped(ExecutorchWriter(folder / entry.file, replace(fewer, details=entry.details | {"window": 4})))


def test_a_readme_names_the_inputs_in_their_order(tiny_target, four_bits):
    inputs, outputs = program.Writer(described(tiny_target, 4), top_k=4).signature
    entry = replace(four_bits[2], inputs=inputs, outputs=outputs)
    text = _described("executorch_writer", entry)
    keys, values = (f"`self_{name}.0` float32 [S, " for name in ("keys", "values"))
    assert text.index("in, in this order: `tokens`") < text.index(keys) < text.index(values)
    assert f"to `self_keys.{len(entry.outputs) // 2 - 2}`, `self_values.0`" in text


@pytest.mark.slow
def test_a_bundle_has_a_proved_writer(tiny_target, tiny_drafter, tmp_path, capsys):
    bundle = make_proved_bundle(tmp_path / "bundle", tiny_target, tiny_drafter, "executorch", capsys)
    assert not load_writer(bundle, load_backend(bundle, "executorch")).heads_first


@pytest.mark.slow
def test_the_default_target_writes_nearly_pytorch_s_greedy_tokens(tmp_path):
    """Another rounding of one activation changes the layers after it: noise of 1e-6 in the embedding leaves PyTorch 56
    to 59 of 64 of its own tokens."""
    target = load_target(DEFAULT_TARGET)
    weights = weights_of(target.folder)
    weights, folder, entry = written(RoundedWeights(weights, usual_bits(weights)), tmp_path)
    model, follows = model_of_integer_products(target, weights), written_by(writer_backend(folder, entry))
    question = [{"role": "user", "content": "How does a refrigerator work?"}]
    prompt = target.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    text = target.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    for _ in range(64):
        text = [*text, follows(text)]
    with torch.no_grad():
        best = model(torch.tensor([text[:-1]])).logits[0, -64:].argmax(-1)
    assert int((best == torch.tensor(text[-64:])).sum()) >= 50


def test_windows_of_two_sizes_are_refused(tiny_target):
    with refused("unsupported_writer", ExportError):
        program.Writer(described(tiny_target, 8, windows=(4, 8)), top_k=4)
