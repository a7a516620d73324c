"""Every architecture: training predicts what drafting computes, at every depth, in chains and in trees."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moa_bench.harness import drafting
from moa_drafter.architectures.registry import initialise, new_drafter
from moa_drafter.checkpoint import load_bound, load_checkpoint, save_checkpoint
from moa_drafter.config import CONFIGS, CheckpointError, ConfigError, EarlyExitConfig, FitError
from moa_drafter.drafter import Drafter
from moa_drafter.drafter_weights import parameters_of
from moa_drafter.target import Target
from moa_drafter.target_features import TargetStates, target_states
from moa_drafter.training.batch import Batch, FutureLengths, make_batch
from moa_drafter.training.data import Conversation
from moa_runtime.drafters.base import Budget, DraftToken
from moa_runtime.drafters.moa import MoaDrafter
from support.drafted import draft_of
from support.refusals import refused
from support.tiny import make_tiny_rival, tiny_with_layers

DEPTH = 4


class Known:
    """States of two conversations, packed as training packs them."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        rng = random.Random(3)
        texts = [[rng.randrange(3, 512) for _ in range(length)] for length in (9 + 12, 5 + 10)]
        self.conversations = [
            Conversation(tuple(text[:n]), tuple(text[n:])) for text, n in zip(texts, (9, 5), strict=True)
        ]
        self.states = [target_states(target, c.tokens, drafter.reads) for c in self.conversations]

    def batch(self, lengths: FutureLengths, seed: int = 0) -> Batch:
        return make_batch(self.conversations, self.states, [0, 1], lengths, random.Random(seed), torch.device("cpu"))


@pytest.fixture(scope="module", params=[*CONFIGS, "1", "3", "2,trained"])
def drafter(request, target, tiny_target, tiny_drafter, tmp_path_factory):
    """Random weights, a draft vocabulary with gaps; numbers are layers of the target at the end of MoA."""
    if request.param in CONFIGS:
        return load_bound(make_tiny_rival(request.param, tiny_target, tmp_path_factory.mktemp("drafter")), target)
    count, *trained = request.param.split(",")
    return tiny_with_layers(tiny_drafter, target, int(count), trained=bool(trained))


def device(drafter: Drafter, states: TargetStates, rows: int) -> MoaDrafter:
    """The runtime's drafter with the rows of the first tokens of a conversation."""
    loop = drafting(drafter, max_context=512, ngrams=False)()
    add_rows(loop, drafter, states, 0, rows)
    return loop


@torch.no_grad()
def add_rows(loop: MoaDrafter, drafter: Drafter, states: TargetStates, start: int, stop: int) -> None:
    if drafter.row_reads:
        keys, values = (half[start:stop].numpy() for half in drafter.rows(states, torch.arange(len(states.last))))
        loop.add_rows(start, keys, values)


def assert_same(ours: list[DraftToken], theirs: list[DraftToken]) -> None:
    assert [drafted.token for drafted in ours] == [drafted.token for drafted in theirs]
    assert [drafted.logprob for drafted in ours] == pytest.approx([drafted.logprob for drafted in theirs], abs=1e-4)


def test_training_predicts_what_drafting_computes(target, drafter):
    known = Known(target, drafter)
    batch = known.batch(FutureLengths(DEPTH, DEPTH))
    with torch.no_grad():
        logprobs = drafter.logits(drafter.predict(batch)).log_softmax(-1)
    expected = iter(zip(batch.depths.tolist(), logprobs, strict=True))
    seen = []
    for conversation, states in zip(known.conversations, known.states, strict=True):
        tokens, loop = list(conversation.tokens), device(drafter, states, 0)
        for position in range(len(conversation.prompt), len(tokens) - 1):
            depth, row = next(expected)
            seen.append(depth)
            if depth == 1:  # rows arrive between rounds
                add_rows(loop, drafter, states, loop.rows, position)
            (drafted,) = draft_of(loop, tokens[: position + 1], 1)
            best = int(row.argmax())
            assert drafted.token == drafter.draft_to_target[best]
            assert drafted.logprob == pytest.approx(float(row[best]), abs=2e-4)
    assert seen[: DEPTH + 1] == [1, 2, 3, 4, 1]


def test_a_trees_paths_are_chains(target, drafter):
    known = Known(target, drafter)
    prefix = list(known.conversations[0].tokens[:12])
    loop = device(drafter, known.states[0], 11)
    draft_of(loop, prefix, 3)  # leaves entries of another draft
    tree = loop.propose(prefix, Budget.tree(160, 4, 3))  # all nodes: 16 candidates, then 48 on each level
    assert tree.depth == 4
    paths: list[list[int]] = [[]]
    scores = [0.0]
    for token, parent, score in zip(tree.tokens, tree.parents, tree.scores, strict=True):
        level = device(drafter, known.states[0], 11).propose(prefix + paths[parent], Budget.tree(16, 1, 16))
        after = dict(zip(level.tokens, level.scores, strict=True))
        assert score - scores[parent] == pytest.approx(after[token], abs=2e-4)
        paths.append([*paths[parent], token])
        scores.append(score)


def test_rows_that_come_later_replace_estimates(target, drafter):
    known = Known(target, drafter)
    tokens, states = list(known.conversations[0].tokens), known.states[0]
    loop = device(drafter, states, 6)
    draft_of(loop, tokens[:10], 3)
    add_rows(loop, drafter, states, 4, 11)
    assert_same(draft_of(loop, tokens[:12], 3), draft_of(device(drafter, states, 11), tokens[:12], 3))
    loop.truncate_rows(7)
    assert_same(draft_of(loop, tokens[:10], 2), draft_of(device(drafter, states, 7), tokens[:10], 2))


def test_without_any_row_it_still_drafts(target, drafter):
    known = Known(target, drafter)
    drafted = draft_of(device(drafter, known.states[0], 0), list(known.conversations[0].tokens[:5]), 3)
    assert len(drafted) == 3 and all(token.logprob < 0 for token in drafted)


def started(architecture: str, target: Target) -> tuple[Drafter, Known]:
    drafter = new_drafter(architecture, target, draft_vocab_size=384)
    drafter.bind_target(target.embedding, target.head, target.layers)
    known = Known(target, drafter)
    for states in known.states:
        states.inner[0] *= 1000  # as in SmolLM2 and others
    tokens = (torch.tensor(conversation.tokens) for conversation in known.conversations)
    initialise(drafter, target, list(zip(tokens, known.states, strict=True)))
    return drafter, known


def test_eagle_starts_as_the_linear_estimate(target):
    drafter, known = started("eagle3", target)
    batch = known.batch(FutureLengths(1, 1))
    with torch.no_grad():
        estimate = drafter.predict(batch)
    # Few tokens are fitted closely, each by the feature before it.
    torch.testing.assert_close(estimate, batch.states.last[batch.queries], atol=0.1, rtol=0.1)


def test_the_others_start_with_layers_of_the_target(target):
    """The layers below an exit are no part of its checkpoint."""
    first, last = target.layers[0].state_dict(), target.layers[-1].state_dict()
    early_exit, independent = (started(name, target)[0] for name in ("early-exit", "independent"))
    below, above = independent.device_layers
    for ours, theirs in ((early_exit.exit, last), (early_exit.below[0], first), (below, first), (above, last)):
        torch.testing.assert_close(ours.state_dict() or dict(ours.named_buffers()), theirs)
    torch.testing.assert_close(early_exit.norm.weight.detach(), target.model.model.norm.weight.detach())
    per_layer = sum(tensor.numel() for tensor in target.layers[0].parameters())
    assert parameters_of(early_exit.config)[1] == per_layer
    assert not any(name.startswith("below") for name in early_exit.state_dict())


def test_an_exit_needs_the_targets_layers(target):
    drafter = new_drafter("early-exit", target, draft_vocab_size=384)
    with refused("layers_missing", FitError):
        drafter.bind_target(target.embedding, target.head)
    with pytest.raises(ValueError, match="embedding"):
        drafter.bind_target(target.embedding[:9], target.head, target.layers)
    with refused("wrong_target", FitError):
        drafter.bind_target(target.embedding, target.head, [torch.nn.Linear(2, 2)])
    other = copy.deepcopy(target.model.config)
    other.hidden_act = "gelu"
    with refused("unsupported_target", ConfigError):
        new_drafter("early-exit", replace(target, model=SimpleNamespace(config=other)), draft_vocab_size=384)


def test_impossible_drafters_are_refused(target, tmp_path):
    for name in ("hydra", ["moa"]):  # what config.json says may be anything
        with refused("unknown_arch", ConfigError):
            new_drafter(name, target, draft_vocab_size=384)
    with refused("wrong_architecture", ConfigError):
        new_drafter("eagle3", target, draft_vocab_size=384, target_layers=1)
    with refused("out_of_range", ConfigError):
        EarlyExitConfig.like(new_drafter("moa", target, draft_vocab_size=384).config, exit_layer=0)
    save_checkpoint(new_drafter("early-exit", target, draft_vocab_size=384), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "exit_layer": 9}))
    with refused("out_of_range", CheckpointError):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "architecture": "eagle"}))
    with refused("unsupported", CheckpointError):
        load_checkpoint(tmp_path)
