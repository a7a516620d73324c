"""A drafter with target layers, from the checkpoint to a conversation: bundle, graph, rows on the wire."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from moa_bench.harness import Conversation, LoopbackVerifier, Round
from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import load_bound, save_checkpoint
from moa_drafter.target import Target
from moa_export.pipeline import ExportSettings, plan
from moa_export.quarot import rotate_residual_stream
from moa_runtime.backends.base import Backend
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.session.events import Sampling
from moa_server.engine.baseline import decode
from moa_server.engine.transformers import TransformersEngine
from support.drafted import draft_of
from support.refusals import refused
from support.tiny import make_tiny_bundle, tiny_with_layers


@pytest.fixture(scope="module")
def checkpoint(tiny_drafter: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "drafter"
    save_checkpoint(tiny_with_layers(tiny_drafter, target, 1), folder)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tiny_target: Path) -> Bundle:
    folder = checkpoint.parent / "bundle"
    return Bundle.open(make_tiny_bundle(folder, tiny_target, checkpoint, "none", preset="max-quality"))


def assert_same_drafts(one: Backend, other: Backend, atol: float) -> None:
    """Chains and trees with few rows, none, and rows that arrive later."""
    rows = np.random.default_rng(5).standard_normal((2, 12, *one.row_shape)).astype(np.float32)
    prefix = list(range(20, 40))
    for held in (0, 1, 7):
        sides = [MoaDrafter(backend, max_context=100) for backend in (one, other)]
        drafts = []
        for side in sides:
            side.add_rows(0, *rows[:, :held])
            drafted = draft_of(side, prefix, 3)
            side.add_rows(held, *rows[:, held:])
            tree = side.propose(prefix, Budget.tree(nodes=16, levels=3, width=4))
            drafts.append(([guess.token for guess in drafted], [guess.logprob for guess in drafted], tree))
        (tokens, logprobs, tree), (other_tokens, other_logprobs, other_tree) = drafts
        assert tokens == other_tokens and tree.tokens == other_tree.tokens
        np.testing.assert_allclose(logprobs, other_logprobs, atol=atol)
        np.testing.assert_allclose(tree.scores, other_tree.scores, atol=atol)


def test_the_graph_computes_what_pytorch_does(bundle: Bundle, checkpoint: Path, target: Target) -> None:
    assert (bundle.manifest.kv_heads, bundle.manifest.head_dim) == (4, 16)
    graph = load_backend(bundle, threads=1)
    assert graph.kv_shape == graph.row_shape == (4, 16)
    assert_same_drafts(graph, torch_backend_of(load_bound(checkpoint, target), top_k=16), atol=1e-3)


@pytest.mark.parametrize("count", [1, 3])
def test_a_rotated_residual_stream_changes_nothing(tiny_drafter: Path, target: Target, count: int) -> None:
    drafter = tiny_with_layers(tiny_drafter, target, count)
    turned = rotate_residual_stream(copy.deepcopy(drafter))
    assert not torch.equal(turned.tail[0].mlp.down_proj.weight, drafter.tail[0].mlp.down_proj.weight)
    assert_same_drafts(torch_backend_of(turned, top_k=16), torch_backend_of(drafter, top_k=16), atol=1e-3)


@pytest.mark.parametrize("shape", [Budget.chain(4), Budget.tree(nodes=10, levels=3, width=3)], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.95, seed=3)], ids=["greedy", "sampled"])
def test_a_conversation_is_lossless(
    bundle: Bundle, checkpoint: Path, tiny_target: Path, shape: Budget, sampling: Sampling
) -> None:
    """Rows of twice the heads travel in the frames, and the answer is the target's own."""
    engine = TransformersEngine.load(str(tiny_target), checkpoint)
    question = [1, 40, 90, 200, 31, 7]
    device = MoaDrafter(load_backend(bundle, threads=1), max_context=200)
    rounds: list[Round] = []
    conversation = Conversation(LoopbackVerifier(engine), device, bundle.manifest.fingerprints, [2], FixedShape(shape))
    answer = conversation.answer(question, sampling, max_new_tokens=24, on_round=rounds.append)
    assert rounds and device.rows >= len(question) + len(answer.tokens) - 2
    assert [step.token for step in decode(engine, question, sampling, len(answer.tokens))] == answer.tokens


@pytest.mark.parametrize("name", ["coreml", "executorch"])
def test_a_target_that_cannot_hold_them_refuses_them(checkpoint: Path, tiny_target: Path, name: str) -> None:
    settings = ExportSettings((name,), checkpoint, model=str(tiny_target))
    with refused("unsupported_drafter"):
        plan(settings)
