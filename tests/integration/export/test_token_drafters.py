"""Drafters that look at the tokens alone, early exit among them: exported, proved, and run as any other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moa_bench.harness import Conversation, LoopbackVerifier
from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import load_bound
from moa_drafter.config import drafter_fingerprint
from moa_drafter.target import Target
from moa_export.bundle_commands import inspect, verify
from moa_export.pipeline import ExportSettings, plan
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle, read_manifest
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.factory import drafter_for
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.session.events import Sampling
from moa_server.engine.transformers import TransformersEngine
from support.refusals import refused
from support.tiny import QUESTIONS, make_tiny_bundle, make_tiny_rival

LAYERS = {"early-exit": 2, "independent": 2}
TEXT = list(range(40, 72))


@pytest.fixture(scope="module", params=LAYERS)
def checkpoint(request: pytest.FixtureRequest, once, tiny_target: Path) -> Path:
    return once(f"rival-{request.param}", lambda folder: make_tiny_rival(request.param, tiny_target, folder))


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, once, tiny_target: Path) -> Bundle:
    """In 8 bits."""
    name = f"{checkpoint.name}-bundle"
    return Bundle.open(once(name, lambda folder: make_tiny_bundle(folder, tiny_target, checkpoint, "none")))


def stepped(backend: Backend, tokens: list[int] = TEXT) -> StepResult:
    nothing = np.zeros((0, *backend.kv_shape), np.float32)
    return backend.step(StepInputs.chain(tokens, (nothing, nothing), (nothing, nothing), asked=len(tokens)))


def overlap(ours: StepResult, theirs: StepResult) -> float:
    """Mean share of the candidates that both have."""
    pairs = zip(ours.top_tokens.tolist(), theirs.top_tokens.tolist(), strict=True)
    return float(np.mean([len(set(a) & set(b)) / len(a) for a, b in pairs]))


def test_the_manifest_says_what_drafts(bundle: Bundle, checkpoint: Path) -> None:
    manifest = bundle.manifest
    assert manifest.architecture in checkpoint.name and not manifest.has_rows
    assert manifest.fingerprints.drafter == drafter_fingerprint(checkpoint)
    assert (manifest.kv_heads, manifest.head_dim) == (2 * LAYERS[manifest.architecture], 16)
    graph = manifest.targets["onnx"]
    assert not [tensor.name for tensor in graph.inputs if "memory" in tensor.name]
    assert graph.checks["parity"]["status"] == graph.checks["tau"]["status"] == "passed"


def test_an_older_manifest_is_of_the_drafter_with_rows(onnx_bundle: Path) -> None:
    raw = json.loads((onnx_bundle / "manifest.json").read_text())
    assert raw.pop("architecture") == "moa"
    manifest = read_manifest(onnx_bundle)
    assert type(manifest).from_json(json.dumps(raw)) == manifest and manifest.has_rows


def test_the_graph_computes_what_pytorch_computes(bundle: Bundle, checkpoint: Path, target: Target) -> None:
    graph, reference = load_backend(bundle, threads=1), torch_backend_of(load_bound(checkpoint, target), top_k=16)
    assert graph.kv_shape == reference.kv_shape and not graph.needs_a_row
    ours, theirs = stepped(graph), stepped(reference)
    assert overlap(ours, theirs) > 0.9
    assert np.abs(ours.keys - theirs.keys).mean() < 0.05 * np.abs(theirs.keys).mean()


def test_four_bits_are_chosen_by_what_the_layers_are_given(
    bundle: Bundle, checkpoint: Path, tiny_target: Path, target: Target, tmp_path: Path
) -> None:
    made = make_tiny_bundle(tmp_path / "bundle", tiny_target, checkpoint, "none", preset="phone", questions=())
    four, reference = Bundle.open(made), torch_backend_of(load_bound(checkpoint, target), top_k=16)
    assert overlap(stepped(load_backend(four, threads=1)), stepped(reference)) > 0.5
    assert four.manifest.targets["onnx"].bytes < bundle.manifest.targets["onnx"].bytes


def test_it_drafts_in_the_loop_and_the_text_is_the_target_s(bundle: Bundle, checkpoint: Path, target: Target) -> None:
    drafter = load_bound(checkpoint, target)
    engine = TransformersEngine(target, drafter, drafter_fingerprint(checkpoint))
    backend, texts = load_backend(bundle, threads=1), []
    for shape in (Budget.chain(0, nodes=0), Budget.chain(4), Budget.tree(12, 3, 4)):
        verifier, rounds = LoopbackVerifier(engine), []
        conversation = Conversation(
            verifier,
            drafter_for(bundle.manifest, backend),
            bundle.manifest.fingerprints,
            bundle.manifest.stop_tokens,
            FixedShape(shape),
        )
        texts.append(conversation.answer(TEXT, Sampling(), max_new_tokens=24, on_round=rounds.append).tokens)
        verifier.close()
        assert not shape.levels or sum(one.steps for one in rounds) > 0
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 24


def test_it_is_inspected_and_verified(
    bundle: Bundle, checkpoint: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect([str(bundle.folder)]) == 0
    assert f"{bundle.manifest.architecture} (" in capsys.readouterr().out
    made_from = ["--model", str(tiny_target), "--drafter", str(checkpoint)]
    assert verify([str(bundle.folder), *made_from, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["targets"]["onnx"]["tau"]["prompts"] > len(QUESTIONS)


@pytest.mark.parametrize("name", ["web", "executorch", "coreml"])
def test_other_targets_refuse_it(name: str, checkpoint: Path, tiny_target: Path) -> None:
    with refused("unsupported_drafter"):
        plan(ExportSettings((name,), checkpoint, model=str(tiny_target)))
