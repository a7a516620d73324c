"""Drafters that read tokens alone, EAGLE-3 heads, and MoA with a layer of its target: exported, proved and run."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from moa_bench.harness import Conversation, LoopbackVerifier, Round
from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import load_bound, save_checkpoint
from moa_drafter.config import drafter_fingerprint
from moa_drafter.target import Target
from moa_export.graph_files import write_half
from moa_export.module_parts import parts_of
from moa_export.pipeline import ExportSettings, plan
from moa_export.quarot import rotate_residual_stream
from moa_export.recipe import PRESETS
from moa_export.recordings import Recording
from moa_export.validation import compare, rehearse
from moa_runtime.backends.base import Backend
from moa_runtime.backends.load import eagle3_backend, load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.factory import drafter_for
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.session.events import Sampling
from moa_runtime.wire.moa.v1.session_pb2 import ROW_ENCODING_FLOAT16 as FLOAT16
from moa_server.engine.baseline import decode
from moa_server.engine.torch_engine import torch_engine
from support.drafted import draft_of
from support.drafter.eagle3_heads import OPTIONS, write_head
from support.export.commands import run, run_json
from support.refusals import refused
from support.tiny import QUESTIONS, make_tiny_bundle, make_tiny_rival, tiny_with_layers


@pytest.fixture(scope="module", params=["early-exit", "independent", "moa", "eagle3"])
def checkpoint(request: pytest.FixtureRequest, once, tiny_target: Path, tiny_drafter: Path, target: Target) -> Path:
    def make(folder: Path) -> None:
        if request.param == "moa":
            save_checkpoint(tiny_with_layers(tiny_drafter, target, 1), folder)
        elif request.param == "eagle3":
            write_head(folder, {"norm_before_residual": True, "norm_output": True})
        else:
            make_tiny_rival(request.param, tiny_target, folder)

    return once(f"kind-{request.param}", make)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, once, tiny_target: Path) -> Bundle:
    def make(folder: Path) -> None:
        make_tiny_bundle(folder, tiny_target, checkpoint, "none", preset="max-quality", questions=())

    return Bundle.open(once(f"{checkpoint.name}-bundle", make))


def reads_rows(backend: Backend) -> bool:
    return backend.needs_a_row or backend.entries_from_rows


def assert_same_drafts(one: Backend, other: Backend) -> None:
    """Chains and trees with few rows, none, and rows that arrive later; without rows if they are not looked at."""
    rows = np.random.default_rng(5).standard_normal((2, 12, *one.row_shape)).astype(np.float32)
    prefix = list(range(20, 40))
    for held in (0, 1, 7) if reads_rows(one) else (0,):
        drafts = []
        for side in (MoaDrafter(backend, max_context=100) for backend in (one, other)):
            side.add_rows(0, *rows[:, :held])
            drafted = draft_of(side, prefix, 3)
            if reads_rows(one):
                side.add_rows(held, *rows[:, held:])
            tree = side.propose(prefix, Budget.tree(nodes=16, levels=3, width=4))
            drafts.append(([guess.token for guess in drafted], [guess.logprob for guess in drafted], tree))
        (tokens, logprobs, tree), (other_tokens, other_logprobs, other_tree) = drafts
        assert tokens == other_tokens and tree.tokens == other_tree.tokens
        np.testing.assert_allclose(logprobs, other_logprobs, atol=1e-3)
        np.testing.assert_allclose(tree.scores, other_tree.scores, atol=1e-3)


def test_the_graph_computes_what_pytorch_does(bundle: Bundle, checkpoint: Path, target: Target) -> None:
    manifest = bundle.manifest
    assert checkpoint.name == f"kind-{manifest.architecture}" and manifest.has_rows == (
        manifest.architecture in ("moa", "eagle3")
    )
    assert manifest.fingerprints.drafter == drafter_fingerprint(checkpoint)
    graph = load_backend(bundle, threads=1)
    # Two layers; of an EAGLE-3 head a row is half a feature.
    shape = graph.row_shape if manifest.architecture == "eagle3" else graph.kv_shape
    assert (
        shape == (manifest.kv_heads, manifest.head_dim) == ((2, 16) if manifest.architecture == "eagle3" else (4, 16))
    )
    assert reads_rows(graph) == manifest.has_rows
    assert_same_drafts(graph, torch_backend_of(load_bound(checkpoint, target), top_k=16))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_rotated_residual_stream_changes_nothing(tiny_drafter, drafter, target, count):
    given = tiny_with_layers(tiny_drafter, target, count) if count else drafter
    turned = rotate_residual_stream(copy.deepcopy(given))
    assert not torch.allclose(turned.embedding, given.embedding, atol=1e-2)
    assert_same_drafts(torch_backend_of(turned, top_k=16), torch_backend_of(given, top_k=16))


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [
        (Budget.chain(4), Sampling()),
        (Budget.tree(nodes=10, levels=3, width=3), Sampling()),
        (Budget.tree(nodes=10, levels=3, width=3), Sampling(0.8, 0.95, seed=3)),
    ],
    ids=["chain, greedy", "tree, greedy", "tree, sampled"],
)
def test_a_conversation_is_lossless(bundle, checkpoint, target, shape, sampling):
    """Rows of twice the heads travel in the frames, if there are any, and the answer is the target's own."""
    engine = torch_engine(target, load_bound(checkpoint, target), drafter_fingerprint(checkpoint))
    device = drafter_for(bundle.manifest, load_backend(bundle, threads=1))
    question, rounds = [1, 40, 90, 200, 31, 7], list[Round]()
    conversation = Conversation(LoopbackVerifier(engine), device, bundle.manifest.fingerprints, [2], FixedShape(shape))
    answer = conversation.answer(question, sampling, max_new_tokens=24, on_round=rounds.append)
    assert sum(one.steps for one in rounds) > 0
    assert [step.token for step in decode(engine, question, sampling, len(answer.tokens))] == answer.tokens


@pytest.mark.parametrize("of", ["speculators", "authors"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_published_head_of_each_kind_drafts_in_a_graph(options, of, target, tmp_path):
    """Chains and trees of it change no text."""
    folder = write_head(tmp_path / "head", OPTIONS[options], of=of)
    bound, print_ = load_bound(folder, target), drafter_fingerprint(folder)
    engine, graph = torch_engine(target, bound, print_), write_half(parts_of(bound), PRESETS["max-quality"], tmp_path)
    question = [1, 40, 90, 200, 31, 7]
    expected = [step.token for step in decode(engine, question, Sampling(), 16)]
    for shape in (Budget.chain(4), Budget.tree(nodes=10, levels=3, width=3)):
        device, rounds = MoaDrafter(eagle3_backend(tmp_path / graph.file), max_context=100), list[Round]()
        verifier = LoopbackVerifier(engine)
        conversation = Conversation(verifier, device, engine.fingerprints, [], FixedShape(shape), row_encoding=FLOAT16)
        answer = conversation.answer(question, Sampling(), max_new_tokens=16, on_round=rounds.append)
        assert answer.tokens == expected and sum(one.steps for one in rounds) > 0


def test_it_is_verified_and_smaller_in_four_bits(bundle, checkpoint, tiny_target, target, tmp_path, capsys):
    made_from = ["--model", tiny_target, "--drafter", checkpoint, "--quiet"]
    assert f"{bundle.manifest.architecture} (" in run(capsys, "inspect", bundle.folder)
    found = run_json(capsys, "verify", bundle.folder, *made_from)["targets"]["onnx"]
    assert found["parity"]["status"] == "passed" and found["tau"]["prompts"] > len(QUESTIONS)
    four = make_tiny_bundle(tmp_path / "bundle", tiny_target, checkpoint, "none", preset="phone", questions=())
    graph = load_backend(Bundle.open(four), threads=1)
    rows = np.random.default_rng(0).standard_normal((2, 30, *graph.row_shape)).astype(np.float32)
    reference = torch_backend_of(load_bound(checkpoint, target), top_k=16)
    expected = [rehearse(reference, Recording(list(range(40, 70)), 12, *rows))]
    assert compare(expected, graph).top_k_overlap > 0.5
    sizes = [Bundle.open(folder).manifest.targets["onnx"].bytes for folder in (four, bundle.folder)]
    assert 2 * sizes[0] < sizes[1]


@pytest.mark.parametrize("name", ["web", "executorch", "coreml"])
def test_other_targets_refuse_it(name: str, checkpoint: Path, tiny_target: Path) -> None:
    settings = ExportSettings((name,), checkpoint, model=str(tiny_target))
    if checkpoint.name == "kind-moa" and name == "web":  # which takes layers of the target
        assert plan(settings)["targets"] == [name]
        return
    with refused("unsupported_drafter"):
        plan(settings)
