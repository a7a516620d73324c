"""The offline writer for ExecuTorch and Core ML computes what its description says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moa_decoder.checkpoint_weights import CheckpointWeights
from moa_decoder.rounded_weights import RoundedWeights
from moa_export.errors import ExportError
from moa_export.graph_files import write_web_writer
from moa_export.targets.coreml_writer import coreml_writer_backend, export_coreml_writer
from moa_export.targets.executorch_writer import Writer, export_executorch_writer
from moa_export.targets.executorch_writer_backend import ExecutorchWriter
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.load import writer_backend
from support.export.rounded import rounded_model
from support.refusals import refused

TEXT = [1, 40, 50, 60, 70, 80, 90, 100, 110]
#: As families beside Llama have them.
CAPPED = {"attention_cap": 20.0, "residual_scale": 0.5, "activation": "gelu_tanh", "attention_scale": 0.2}


def weights_of(folder, bits: int, *, window: int | None = None, **otherwise) -> RoundedWeights:
    """Weights of another description; ``window`` of every second layer."""
    weights = CheckpointWeights(folder)
    if otherwise or window:
        windows = [window if at % 2 else None for at in range(len(weights.spec.layers))]
        layers = [
            replace(layer, window=own, **otherwise) for layer, own in zip(weights.spec.layers, windows, strict=True)
        ]
        more = {"embedding_scale": 2.0, "logits_scale": 0.5, "logits_cap": 30.0}
        weights._spec = replace(weights.spec, layers=tuple(layers), **more)
    return RoundedWeights(weights, bits)


def stepped(backend: Backend, text=TEXT, asked=1, cache=None) -> StepResult:
    empty = np.zeros((0, *backend.kv_shape), np.float32)
    return backend.step(StepInputs.chain(text, cache or (empty, empty), (empty, empty), asked=asked))


def made(engine: str, weights: RoundedWeights, folder: Path) -> Backend:
    if engine == "executorch":
        entry = export_executorch_writer(weights, folder)
        return ExecutorchWriter(folder / entry.file, entry, threads=1)
    return coreml_writer_backend(folder, export_coreml_writer(weights, folder))


@pytest.mark.parametrize(
    ("engine", "bits", "otherwise"),
    [("executorch", 4, {}), ("executorch", 8, {**CAPPED, "window": 4}), ("coreml", 4, {}), ("coreml", 8, CAPPED)],
)
def test_the_program_computes_what_its_rounded_weights_do(tiny_target, tmp_path, engine, bits, otherwise):
    weights = weights_of(tiny_target, bits, **otherwise)
    ours = made(engine, weights, tmp_path)
    theirs = writer_backend(tmp_path, write_web_writer(weights, tmp_path), threads=1)  # which multiplies floats
    got, wanted = stepped(ours, asked=len(TEXT)), stepped(theirs, asked=len(TEXT))
    assert ours.kv_shape == theirs.kv_shape and ours.top_k == theirs.top_k and not ours.needs_a_row
    # Activations are rounded to 8 bits, or floats to 16.
    assert np.abs(got.top_logprobs - wanted.top_logprobs).mean() < 0.05
    assert np.abs(got.keys - wanted.keys).mean() < 0.03 * np.abs(wanted.keys).mean()
    assert np.abs(got.values - wanted.values).mean() < 0.05 * np.abs(wanted.values).mean()
    last = stepped(ours, TEXT[-1:], cache=(got.keys[:-1], got.values[:-1]))
    assert np.allclose(last.top_logprobs[0], got.top_logprobs[-1], atol=1e-2)
    long = [(7 * n) % 500 for n in range(45)]
    assert stepped(ours, long).top_tokens.shape == (1, ours.top_k)


@pytest.mark.parametrize("engine", ["executorch", "coreml"])
def test_64_greedy_tokens_are_those_of_the_rounded_model_in_pytorch(target, tiny_target, tmp_path, engine):
    weights = weights_of(tiny_target, 4)
    model, ours, text = rounded_model(target, weights), made(engine, weights, tmp_path), list(TEXT)
    cache = tuple(np.zeros((0, *ours.kv_shape), np.float32) for _ in range(2))
    for _ in range(64):
        new = text[len(cache[0]) :]
        step = stepped(ours, new, cache=cache)
        cache = np.concatenate((cache[0], step.keys)), np.concatenate((cache[1], step.values))
        with torch.no_grad():
            best = model(torch.tensor([text])).logits[0, -1].topk(2)
        # A random model has near ties, which activations in 8 bits or floats in 16 may decide otherwise.
        assert step.top_tokens[0, 0] == best.indices[0] or best.values[0] - best.values[1] < 0.05
        text.append(int(best.indices[0]))


def test_the_same_weights_give_the_same_package(tiny_target, tmp_path):
    digests = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        export_coreml_writer(weights_of(tiny_target, 4), tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        digests.append([path.read_bytes() for path in files])
    assert digests[0] == digests[1]


def test_what_a_target_cannot_write_is_refused(tiny_target, tmp_path):
    with refused("unsupported_writer", ExportError):
        export_coreml_writer(weights_of(tiny_target, 8, window=4), tmp_path)


def test_windows_of_two_sizes_are_refused(tiny_target):
    weights = weights_of(tiny_target, 8)
    first, second, *rest = weights.spec.layers
    layers = replace(first, window=4), replace(second, window=8), *rest
    weights.weights._spec = replace(weights.spec, layers=layers)
    with refused("unsupported_writer", ExportError):
        Writer(weights, top_k=4)
