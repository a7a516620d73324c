"""The factor on a drafter's logits reaches the graph."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import load_bound, load_checkpoint, save_checkpoint
from moa_drafter.target import Target
from moa_export.offline_model import NONE, WriterSettings
from moa_export.pipeline import ExportSettings, export_bundle
from moa_export.progress import Progress
from moa_export.recipe import preset
from moa_runtime.backends.base import Backend, StepInputs
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle


def logprobs(backend: Backend) -> np.ndarray:
    """Of the candidates behind three tokens without memory."""
    nothing, row = (np.zeros((count, *backend.kv_shape), np.float32) for count in (0, 1))
    return backend.step(StepInputs.chain([7, 11, 13], (nothing, nothing), (row, row), asked=3)).top_logprobs


def test_a_sharper_drafter_has_a_sharper_graph(
    tiny_target: Path, tiny_drafter: Path, target: Target, tmp_path: Path
) -> None:
    drafter = load_checkpoint(tiny_drafter)
    drafter.config = dataclasses.replace(drafter.config, sharpness=1.5)
    save_checkpoint(drafter, tmp_path / "drafter")
    settings = ExportSettings(
        ("onnx",),
        tmp_path / "drafter",
        str(tiny_target),
        preset("max-quality"),
        questions=["Name three colours."],
        writer=WriterSettings(NONE),
    )
    export_bundle(tmp_path / "bundle", settings, Progress(sys.stderr, quiet=True))
    graph = logprobs(load_backend(Bundle.open(tmp_path / "bundle")))
    sharp, plain = (
        logprobs(torch_backend_of(load_bound(folder, target), top_k=graph.shape[1]))
        for folder in (tmp_path / "drafter", tiny_drafter)
    )
    np.testing.assert_allclose(graph, sharp, atol=0.05)
    assert np.abs(sharp - plain).max() > 0.2
