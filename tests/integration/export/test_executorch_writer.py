"""The offline writer for ExecuTorch computes what its description says."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moa_decoder.checkpoint_weights import CheckpointWeights
from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.target import load_target
from moa_drafter.target_folder import weights_of
from moa_drafter.target_source import DEFAULT_TARGET
from moa_export.cli import main
from moa_export.errors import ExportError
from moa_export.graph_files import usual_bits, write_web_writer
from moa_export.recipe import Recipe
from moa_export.targets.base import TargetOptions
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.load import load_backend, load_writer, writer_backend
from moa_runtime.bundle import Bundle, write_manifest
from moa_runtime.manifest import TargetEntry, read_manifest
from support.export.rounded import model_of_integer_products
from support.late import Late
from support.refusals import refused
from support.tiny import make_tiny_bundle

executorch, program = Late("moa_export.targets.executorch"), Late("moa_export.targets.executorch_writer")
TEXT = [1, 40, 50, 60, 70, 80, 90, 100, 110]
#: As families beside Llama have them.
CAPPED = {"attention_cap": 20.0, "residual_scale": 0.5, "activation": "gelu_tanh", "attention_scale": 0.2}
Written = tuple[RoundedWeights, Path, TargetEntry]


def described(folder: Path, bits: int, *, windows: tuple[int | None, ...] = (None,), **otherwise) -> RoundedWeights:
    """Weights of another description, if some of it is given; ``windows`` of the layers in turn."""
    weights = CheckpointWeights(folder)
    layers = [
        replace(layer, window=windows[at % len(windows)], **otherwise) for at, layer in enumerate(weights.spec.layers)
    ]
    more = {"embedding_scale": 2.0, "logits_scale": 0.5, "logits_cap": 30.0} if otherwise else {}
    weights._spec = replace(weights.spec, layers=tuple(layers), **more)
    return RoundedWeights(weights, bits)


def written(weights: RoundedWeights, folder: Path) -> Written:
    return weights, folder, executorch.ExecutorchTarget(Recipe(), TargetOptions()).export_writer(weights, folder)


@pytest.fixture(scope="module")
def four_bits(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(described(tiny_target, 4), tmp_path_factory.mktemp("writer"))


def stepped(backend: Backend, text=TEXT, asked=1, cache=None) -> StepResult:
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


def compare(weights: RoundedWeights, folder: Path, entry: TargetEntry) -> None:
    """Compare a program with a graph that multiplies floats."""
    ours = writer_backend(folder, entry, threads=1)
    theirs = writer_backend(folder, write_web_writer(weights, folder), threads=1)
    got, wanted = stepped(ours, asked=len(TEXT)), stepped(theirs, asked=len(TEXT))
    assert ours.kv_shape == theirs.kv_shape and ours.top_k == theirs.top_k and not ours.needs_a_row
    # Activations are rounded to 8 bits.
    assert np.abs(got.top_logprobs - wanted.top_logprobs).mean() < 0.05
    assert np.abs(got.keys - wanted.keys).mean() < 0.03 * np.abs(wanted.keys).mean()
    assert np.abs(got.values - wanted.values).mean() < 0.05 * np.abs(wanted.values).mean()
    last = stepped(ours, TEXT[-1:], cache=(got.keys[:-1], got.values[:-1]))
    assert np.allclose(last.top_logprobs[0], got.top_logprobs[-1], atol=1e-2)
    assert stepped(ours, [(7 * n) % 500 for n in range(300)]).top_tokens.shape == (1, ours.top_k)  # in parts
    with refused("context_full"):
        stepped(ours, [5] * 3000)


def test_the_program_computes_what_its_rounded_weights_do(target, four_bits):
    weights, folder, entry = four_bits
    compare(weights, folder, entry)
    model, backend = model_of_integer_products(target, weights), writer_backend(folder, entry)
    values: list[np.ndarray] = []
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *given: values.append(given[2][0].numpy()))
    step, follows, text = stepped(backend), written_by(backend), TEXT
    for _ in range(64):
        best, lead = best_two(model, text)
        # A random model has near ties, which an activation that is rounded otherwise may decide.
        assert follows(text) == best or lead < 0.15
        text = [*text, best]
    size = values[0].shape[1] // backend.kv_shape[1]
    errors = np.abs(step.values[:, :size].reshape(len(TEXT), -1) - values[0])
    assert np.median(errors) < 1e-5  # the rest is activations that lie between two levels


@pytest.mark.slow
def test_another_family_in_eight_bits_computes_its_description(tiny_target, tmp_path):
    compare(*written(described(tiny_target, 8, windows=(None, 4), **CAPPED), tmp_path))


def test_the_engine_of_the_drafter_runs_the_writer(four_bits, writing_bundle, tmp_path):
    _, folder, entry = four_bits
    shutil.copytree(writing_bundle, tmp_path / "bundle")
    shutil.copy(folder / entry.file, tmp_path / "bundle")
    write_manifest(tmp_path / "bundle", replace(read_manifest(writing_bundle), executorch_writer=entry))
    bundle = Bundle.open(tmp_path / "bundle")
    ours = load_writer(bundle, SimpleNamespace(writer="executorch_writer"))
    direct = writer_backend(folder, entry)
    assert (ours.kv_shape, ours.top_k, ours.max_positions) == (direct.kv_shape, direct.top_k, direct.max_positions)
    assert not ours.heads_first and load_writer(bundle).heads_first  # onnxruntime's
    np.testing.assert_array_equal(stepped(ours).top_tokens, stepped(direct).top_tokens)


@pytest.mark.slow
def test_a_bundle_has_a_proved_writer(tiny_target, tiny_drafter, tmp_path, capsys):
    make_tiny_bundle(tmp_path / "bundle", tiny_target, tiny_drafter, "target", targets=("executorch",))
    bundle = Bundle.open(tmp_path / "bundle")
    assert list(bundle.manifest.writers) == ["writer", "executorch_writer"]
    for entry in bundle.manifest.writers.values():
        assert entry.checks["perplexity"]["status"] == "passed" and entry.details["bits"] == 8
        assert f"`{entry.file}`" in (bundle.folder / "README.md").read_text()
    assert not load_writer(bundle, load_backend(bundle, "executorch")).heads_first
    words = ["verify", bundle.folder, "--model", tiny_target, "--drafter", tiny_drafter, "--quiet"]
    assert main([*map(str, words)]) == 0 and "executorch writer" in capsys.readouterr().out


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
