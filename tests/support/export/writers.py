"""Steps of offline writers, and comparisons of one with another and with a model in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_decoder.checkpoint_weights import CheckpointWeights
from moa_decoder.rounded_weights import RoundedWeights
from moa_export.cli import main
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.bundle import Bundle
from support.refusals import refused
from support.tiny import make_tiny_bundle

TEXT = [1, 40, 50, 60, 70, 80, 90, 100, 110]
#: Of a layer, as families beside Llama have it.
CAPPED = {"attention_cap": 20.0, "residual_scale": 0.5, "activation": "gelu_tanh", "attention_scale": 0.2}
Entries = tuple[np.ndarray, np.ndarray]


def described(folder: Path, bits: int, *, windows: tuple[int | None, ...] = (None,), **otherwise) -> RoundedWeights:
    """Weights of another description, if some of it is given; ``windows`` of the layers in turn."""
    weights = CheckpointWeights(folder)
    layers = [
        replace(layer, window=windows[at % len(windows)], **otherwise) for at, layer in enumerate(weights.spec.layers)
    ]
    more = {"embedding_scale": 2.0, "logits_scale": 0.5, "logits_cap": 30.0} if otherwise else {}
    weights._spec = replace(weights.spec, layers=tuple(layers), **more)
    return RoundedWeights(weights, bits)


def stepped(backend: Backend, text: Sequence[int] = TEXT, asked: int = 1, cache: Entries | None = None) -> StepResult:
    """Run a step over ``text`` after the tokens in the cache; candidates of the ``asked`` last ones."""
    empty = np.zeros((0, *backend.kv_shape), np.float32)
    return backend.step(StepInputs.chain(text, cache or (empty, empty), (empty, empty), asked=asked))


def written_by(backend: Backend) -> Callable[[Sequence[int]], int]:
    """Return a function of a text that grows: its likeliest next token."""
    cache = tuple(np.zeros((0, *backend.kv_shape), np.float32) for _ in range(2))

    def follows(text: Sequence[int]) -> int:
        nonlocal cache
        step = stepped(backend, text[len(cache[0]) :], cache=cache)
        cache = np.concatenate((cache[0], step.keys)), np.concatenate((cache[1], step.values))
        return int(step.top_tokens[0, 0])

    return follows


@torch.no_grad()
def best_two(model: Any, text: Sequence[int]) -> tuple[int, float]:
    """The model's likeliest next token, and by how much its logit is the largest."""
    best = model(torch.tensor([text])).logits[0, -1].topk(2)
    return int(best.indices[0]), float(best.values[0] - best.values[1])


def write_alike(backend: Backend, model: Any, *, tie: float) -> None:
    """Compare 64 tokens, each after those of the model. A random model has near ties: what leads by
    less than ``tie`` (a difference of logits) may be another token after another rounding."""
    follows, text = written_by(backend), TEXT
    for _ in range(64):
        best, lead = best_two(model, text)
        assert follows(text) == best or lead < tie
        text = [*text, best]


def compare(ours: Backend, theirs: Backend, *, logprobs: float, keys: float, values: float) -> StepResult:
    """Compare a step with that of a graph that multiplies floats.

    Args:
        logprobs: largest mean difference, nats.
        keys, values: largest mean difference by the mean magnitude.

    Returns:
        our step.
    """
    got, wanted = stepped(ours, asked=len(TEXT)), stepped(theirs, asked=len(TEXT))
    assert ours.kv_shape == theirs.kv_shape and ours.top_k == theirs.top_k and not ours.needs_a_row
    assert np.abs(got.top_logprobs - wanted.top_logprobs).mean() < logprobs
    assert np.abs(got.keys - wanted.keys).mean() < keys * np.abs(wanted.keys).mean()
    assert np.abs(got.values - wanted.values).mean() < values * np.abs(wanted.values).mean()
    last = stepped(ours, TEXT[-1:], cache=(got.keys[:-1], got.values[:-1]))
    assert np.allclose(last.top_logprobs[0], got.top_logprobs[-1], atol=1e-2)
    with refused("context_full"):
        stepped(ours, [5] * 3000)
    return got


def make_proved_bundle(
    path: Path, target: Path, drafter: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> Bundle:
    """Make a bundle of an export target, whose writers are proved, described and can be verified again."""
    make_tiny_bundle(path, target, drafter, "target", targets=(kind,))
    bundle = Bundle.open(path)
    assert list(bundle.manifest.writers) == ["writer", f"{kind}_writer"]
    for entry in bundle.manifest.writers.values():
        assert entry.checks["perplexity"]["status"] == "passed" and entry.details["bits"] == 8
        assert f"`{entry.file}`" in (bundle.folder / "README.md").read_text()
    words = ["verify", bundle.folder, "--model", target, "--drafter", drafter, "--quiet"]
    assert main([*map(str, words)]) == 0 and f"{kind} writer" in capsys.readouterr().out
    return bundle
