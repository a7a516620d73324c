"""The offline writer for Core ML computes what its description says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moa_decoder.checkpoint_weights import CheckpointWeights
from moa_decoder.rounded_weights import RoundedWeights
from moa_export.cli import main
from moa_export.errors import ExportError
from moa_export.graph_files import write_web_writer
from moa_export.recipe import Recipe
from moa_export.targets.base import TargetOptions
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.load import writer_backend
from moa_runtime.bundle import Bundle
from support.export.rounded import rounded_model
from support.late import Late
from support.refusals import refused
from support.tiny import make_tiny_bundle

coreml = Late("moa_export.targets.coreml")
TEXT = [1, 40, 50, 60, 70, 80, 90, 100, 110]
OPTIONS = TargetOptions(context=128)
#: As families beside Llama have them.
CAPPED = {"attention_cap": 20.0, "residual_scale": 0.5, "activation": "gelu_tanh", "attention_scale": 0.2}


def weights_of(folder: Path, bits: int, **otherwise) -> RoundedWeights:
    """Weights of another description, if some of it is given."""
    weights = CheckpointWeights(folder)
    layers = tuple(replace(layer, **otherwise) for layer in weights.spec.layers)
    more = {"embedding_scale": 2.0, "logits_scale": 0.5, "logits_cap": 30.0} if otherwise else {}
    weights._spec = replace(weights.spec, layers=layers, **more)
    return RoundedWeights(weights, bits)


def made(weights: RoundedWeights, folder: Path) -> Backend:
    exporter = coreml.CoremlTarget(Recipe(), OPTIONS)
    return exporter.writer_runner(folder, exporter.export_writer(weights, folder))


def stepped(backend: Backend, text=TEXT, asked=1, cache=None) -> StepResult:
    empty = np.zeros((0, *backend.kv_shape), np.float32)
    return backend.step(StepInputs.chain(text, cache or (empty, empty), (empty, empty), asked=asked))


@pytest.mark.parametrize(("bits", "otherwise"), [(4, {}), (8, CAPPED)])
def test_the_program_computes_what_its_rounded_weights_do(target, tiny_target, tmp_path, bits, otherwise):
    weights = weights_of(tiny_target, bits, **otherwise)
    ours = made(weights, tmp_path)
    theirs = writer_backend(tmp_path, write_web_writer(weights, tmp_path), threads=1)  # which multiplies floats
    got, wanted = stepped(ours, asked=len(TEXT)), stepped(theirs, asked=len(TEXT))
    assert ours.kv_shape == theirs.kv_shape and ours.top_k == theirs.top_k and not ours.needs_a_row
    # Floats are rounded to 16 bits.
    assert np.abs(got.top_logprobs - wanted.top_logprobs).mean() < 0.02
    assert np.abs(got.keys - wanted.keys).mean() < 0.02 * np.abs(wanted.keys).mean()
    assert np.abs(got.values - wanted.values).mean() < 0.02 * np.abs(wanted.values).mean()
    last = stepped(ours, TEXT[-1:], cache=(got.keys[:-1], got.values[:-1]))
    assert np.allclose(last.top_logprobs[0], got.top_logprobs[-1], atol=1e-2)
    long = [(7 * n) % 500 for n in range(45)]
    assert stepped(ours, long).top_tokens.shape == (1, ours.top_k)
    if not otherwise:
        model, text = rounded_model(target, weights), list(TEXT)
        cache = tuple(np.zeros((0, *ours.kv_shape), np.float32) for _ in range(2))
        for _ in range(64):
            step = stepped(ours, text[len(cache[0]) :], cache=cache)
            cache = np.concatenate((cache[0], step.keys)), np.concatenate((cache[1], step.values))
            with torch.no_grad():
                best = model(torch.tensor([text])).logits[0, -1].topk(2)
            # A random model has near ties, which floats in 16 bits may decide otherwise.
            assert step.top_tokens[0, 0] == best.indices[0] or best.values[0] - best.values[1] < 0.05
            text.append(int(best.indices[0]))
    with refused("context_full"):
        stepped(ours, [5] * 3000)


@pytest.mark.slow
def test_a_bundle_has_a_proved_writer(tiny_target, tiny_drafter, tmp_path, capsys):
    make_tiny_bundle(tmp_path / "bundle", tiny_target, tiny_drafter, "target", targets=("coreml",))
    bundle = Bundle.open(tmp_path / "bundle")
    assert list(bundle.manifest.writers) == ["writer", "coreml_writer"]
    for entry in bundle.manifest.writers.values():
        assert entry.checks["perplexity"]["status"] == "passed" and entry.details["bits"] == 8
        assert f"`{entry.file}`" in (bundle.folder / "README.md").read_text()
    words = ["verify", bundle.folder, "--model", tiny_target, "--drafter", tiny_drafter, "--quiet"]
    assert main([*map(str, words)]) == 0 and "coreml writer" in capsys.readouterr().out


def test_the_same_weights_give_the_same_package(tiny_target, tmp_path):
    digests = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        coreml.CoremlTarget(Recipe(), OPTIONS).export_writer(weights_of(tiny_target, 4), tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        digests.append([path.read_bytes() for path in files])
    assert digests[0] == digests[1]


def test_what_it_cannot_write_is_refused(tiny_target, tmp_path):
    with refused("unsupported_writer", ExportError):
        made(weights_of(tiny_target, 8, window=4), tmp_path)
