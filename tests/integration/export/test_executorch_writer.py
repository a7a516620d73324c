"""The offline writer for ExecuTorch computes what its description says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moa_decoder.checkpoint_weights import CheckpointWeights
from moa_decoder.rounded_weights import RoundedWeights
from moa_export.errors import ExportError
from moa_export.graph_files import write_web_writer
from moa_export.recipe import Recipe
from moa_export.targets.base import TargetOptions
from moa_export.targets.executorch import ExecutorchTarget
from moa_export.targets.executorch_writer import Writer
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.load import writer_backend
from support.refusals import refused

TEXT = [1, 40, 50, 60, 70, 80, 90, 100, 110]
#: As families beside Llama have them.
CAPPED = {"attention_cap": 20.0, "residual_scale": 0.5, "activation": "gelu_tanh", "attention_scale": 0.2}


def weights_of(folder: Path, bits: int, *, windows: tuple[int | None, ...] = (None,), **otherwise) -> RoundedWeights:
    """Weights of another description, if some of it is given; ``windows`` of the layers in turn."""
    weights = CheckpointWeights(folder)
    layers = [
        replace(layer, window=windows[at % len(windows)], **otherwise) for at, layer in enumerate(weights.spec.layers)
    ]
    more = {"embedding_scale": 2.0, "logits_scale": 0.5, "logits_cap": 30.0} if otherwise else {}
    weights._spec = replace(weights.spec, layers=tuple(layers), **more)
    return RoundedWeights(weights, bits)


def stepped(backend: Backend, text=TEXT, asked=1, cache=None) -> StepResult:
    empty = np.zeros((0, *backend.kv_shape), np.float32)
    return backend.step(StepInputs.chain(text, cache or (empty, empty), (empty, empty), asked=asked))


@pytest.mark.parametrize(("bits", "otherwise"), [(4, {}), (8, {**CAPPED, "windows": (None, 4)})])
def test_the_program_computes_what_its_rounded_weights_do(tiny_target, tmp_path, bits, otherwise):
    weights, exporter = weights_of(tiny_target, bits, **otherwise), ExecutorchTarget(Recipe(), TargetOptions())
    ours = exporter.writer_runner(tmp_path, exporter.export_writer(weights, tmp_path))
    theirs = writer_backend(tmp_path, write_web_writer(weights, tmp_path), threads=1)  # which multiplies floats
    got, wanted = stepped(ours, asked=len(TEXT)), stepped(theirs, asked=len(TEXT))
    assert ours.kv_shape == theirs.kv_shape and ours.top_k == theirs.top_k and not ours.needs_a_row
    # Activations are rounded to 8 bits.
    assert np.abs(got.top_logprobs - wanted.top_logprobs).mean() < 0.05
    assert np.abs(got.keys - wanted.keys).mean() < 0.03 * np.abs(wanted.keys).mean()
    assert np.abs(got.values - wanted.values).mean() < 0.05 * np.abs(wanted.values).mean()
    last = stepped(ours, TEXT[-1:], cache=(got.keys[:-1], got.values[:-1]))
    assert np.allclose(last.top_logprobs[0], got.top_logprobs[-1], atol=1e-2)
    assert stepped(ours, [(7 * n) % 500 for n in range(300)]).top_tokens.shape == (1, ours.top_k)  # in pieces
    with refused("context_full"):
        stepped(ours, [5] * 3000)


def test_windows_of_two_sizes_are_refused(tiny_target):
    with refused("unsupported_writer", ExportError):
        Writer(weights_of(tiny_target, 8, windows=(4, 8)), top_k=4)
