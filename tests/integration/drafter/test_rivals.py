"""The rivals: what training predicts is what drafting computes, at every depth, in chains and in trees."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moa_bench.accept import AcceptSettings, Results, count_rounds
from moa_bench.harness import checkpoint_pair, drafting
from moa_bench.questions import Question
from moa_drafter.architectures.early_exit import EarlyExitConfig
from moa_drafter.architectures.registry import ARCHITECTURES, initialise, new_drafter
from moa_drafter.checkpoint import load_bound, load_checkpoint, load_for_device, save_checkpoint
from moa_drafter.config import CheckpointError, ConfigError, FitError
from moa_drafter.drafter import Drafter
from moa_drafter.target import Target
from moa_drafter.target_features import TargetStates, target_states
from moa_drafter.training.batch import Batch, FutureLengths, make_batch
from moa_drafter.training.data import Conversation
from moa_drafter.training.losses import forward_kl
from moa_runtime.drafters.base import Budget, DraftToken
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.session.events import Sampling
from moa_server.engine.baseline import decode
from support.drafted import draft_of
from support.tiny import make_tiny_rival

RIVALS = tuple(ARCHITECTURES)[1:]
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

    def __getitem__(self, index: int) -> TargetStates:
        return self.states[index]

    def batch(self, lengths: FutureLengths, seed: int = 0) -> Batch:
        return make_batch(self.conversations, self, [0, 1], lengths, random.Random(seed), torch.device("cpu"))


@pytest.fixture(scope="module", params=tuple(ARCHITECTURES))
def drafter(request: pytest.FixtureRequest, target: Target, tiny_target: Path, tmp_path_factory) -> Drafter:
    """Random weights, a draft vocabulary with gaps."""
    return load_bound(make_tiny_rival(request.param, tiny_target, tmp_path_factory.mktemp("drafter")), target)


def device(drafter: Drafter, states: TargetStates, rows: int) -> MoaDrafter:
    """What drafts, with the rows of the first tokens of a conversation."""
    loop = drafting(drafter, max_context=512, ngrams=False)()
    if drafter.row_reads:
        with torch.no_grad():
            keys, values = drafter.rows(states, torch.arange(len(states.last)))
        loop.add_rows(0, keys[:rows].numpy(), values[:rows].numpy())
    return loop


def continuations(loop: MoaDrafter, prefix: list[int]) -> dict[int, float]:
    """The likeliest next tokens with their log-probabilities."""
    tree = loop.propose(prefix, Budget.tree(16, 1, 16))
    return dict(zip(tree.tokens, tree.scores, strict=True))


def assert_same(ours: list[DraftToken], theirs: list[DraftToken]) -> None:
    assert [drafted.token for drafted in ours] == [drafted.token for drafted in theirs]
    assert [drafted.logprob for drafted in ours] == pytest.approx([drafted.logprob for drafted in theirs], abs=1e-4)


def test_training_predicts_what_drafting_computes(target: Target, drafter: Drafter) -> None:
    known = Known(target, drafter)
    batch = known.batch(FutureLengths(DEPTH, DEPTH))
    with torch.no_grad():
        logprobs = drafter.logits(drafter.predict(batch)).log_softmax(-1)
    expected = iter(zip(batch.depths.tolist(), logprobs, strict=True))
    seen = []
    for conversation, states in zip(known.conversations, known.states, strict=True):
        tokens = list(conversation.tokens)
        for position in range(len(conversation.prompt), len(tokens) - 1):
            depth, row = next(expected)
            seen.append(depth)
            if depth == 1:
                loop = device(drafter, states, position)
            (drafted,) = draft_of(loop, tokens[: position + 1], 1)
            best = int(row.argmax())
            assert drafted.token == drafter.draft_to_target[best]
            assert drafted.logprob == pytest.approx(float(row[best]), abs=1e-4)
    assert seen[: DEPTH + 1] == [1, 2, 3, 4, 1]


def test_a_trees_paths_are_chains(target: Target, drafter: Drafter) -> None:
    known = Known(target, drafter)
    prefix = list(known.conversations[0].tokens[:12])
    loop = device(drafter, known.states[0], 11)
    draft_of(loop, prefix, 3)  # leaves entries of another draft behind
    tree = loop.propose(prefix, Budget.tree(160, 4, 3))  # every node there is: 16 candidates, then 48 on each level
    assert tree.depth == 4
    paths: list[list[int]] = [[]]
    scores = [0.0]
    for token, parent, score in zip(tree.tokens, tree.parents, tree.scores, strict=True):
        after = continuations(device(drafter, known.states[0], 11), prefix + paths[parent])
        assert score - scores[parent] == pytest.approx(after[token], abs=1e-4)
        paths.append([*paths[parent], token])
        scores.append(score)


def test_rows_that_come_later_replace_estimates(target: Target, drafter: Drafter) -> None:
    known = Known(target, drafter)
    tokens, states = list(known.conversations[0].tokens), known.states[0]
    loop = device(drafter, states, 6)
    draft_of(loop, tokens[:10], 3)
    if drafter.row_reads:
        with torch.no_grad():
            keys, values = (half.numpy() for half in drafter.rows(states, torch.arange(len(states.last))))
        loop.add_rows(4, keys[4:11], values[4:11])
    assert_same(draft_of(loop, tokens[:12], 3), draft_of(device(drafter, states, 11), tokens[:12], 3))
    loop.truncate_rows(7)
    assert_same(draft_of(loop, tokens[:10], 2), draft_of(device(drafter, states, 7), tokens[:10], 2))


def test_without_any_row_it_drafts_all_the_same(target: Target, drafter: Drafter) -> None:
    known = Known(target, drafter)
    drafted = draft_of(device(drafter, known.states[0], 0), list(known.conversations[0].tokens[:5]), 3)
    assert len(drafted) == 3 and all(token.logprob < 0 for token in drafted)


def train(drafter: Drafter, batches: Iterable[Batch], rate: float) -> list[float]:
    """One step a batch; the loss before each."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate)
    losses = []
    for batch in batches:
        loss = forward_kl(drafter.logits(drafter.predict(batch)), drafter.logits(batch.states.last[batch.queries]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("architecture", RIVALS)
def test_training_lowers_the_loss(architecture: str, target: Target) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = new_drafter(architecture, target, draft_vocab_size=384)
    drafter.bind_target(target.embedding, target.head, target.layers)
    known = Known(target, drafter)
    losses = train(drafter, (known.batch(FutureLengths(0, DEPTH), step) for step in range(15)), 3e-3)
    assert all(parameter.grad is not None for parameter in drafter.parameters())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("architecture", RIVALS)
def test_what_was_learnt_is_accepted(architecture: str, target: Target, tmp_path: Path) -> None:
    """Learns one answer by heart, and is measured on its question."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = new_drafter(architecture, target, draft_vocab_size=512)
    save_checkpoint(drafter, tmp_path / "before")
    device_before, engine = checkpoint_pair(tmp_path / "before", target, ngrams=False)
    question = device_before.tokenizer.encode_chat([{"role": "user", "content": "Why?"}])
    answer = [step.token for step in decode(engine, question, Sampling(), 25)]
    drafter.bind_target(target.embedding, target.head, target.layers)
    text = Conversation(tuple(question), tuple(answer))
    states = [target_states(target, text.tokens, drafter.reads)]
    lengths, cpu = FutureLengths(1, DEPTH), torch.device("cpu")
    train(drafter, (make_batch([text], states, [0], lengths, random.Random(step), cpu) for step in range(50)), 5e-3)
    save_checkpoint(drafter, tmp_path / "after")
    taus = []
    for name in ("before", "after"):
        results = Results(DEPTH)
        settings = AcceptSettings(draft_length=DEPTH, max_new_tokens=25)
        asked, ends = [Question(1, "qa", ("Why?",))], checkpoint_pair(tmp_path / name, target, ngrams=False)
        list(count_rounds(asked, *ends, settings, results))
        taus.append(results.total.tau or 0.0)
    assert taus[1] > 2.5 > taus[0]


def started(architecture: str, target: Target) -> tuple[Drafter, Known]:
    drafter = new_drafter(architecture, target, draft_vocab_size=384)
    drafter.bind_target(target.embedding, target.head, target.layers)
    known = Known(target, drafter)
    initialise(drafter, target, [(torch.tensor(c.tokens), known[n]) for n, c in enumerate(known.conversations)])
    return drafter, known


def test_eagle_starts_as_the_linear_estimate(target: Target) -> None:
    drafter, known = started("eagle", target)
    batch = known.batch(FutureLengths(1, 1))
    with torch.no_grad():
        estimate = drafter.predict(batch)
    # So few tokens are fitted closely, each by itself and the feature before it.
    torch.testing.assert_close(estimate, batch.states.last[batch.queries], atol=0.1, rtol=0.1)


def test_the_others_start_with_layers_of_the_target(target: Target) -> None:
    first, last = target.layers[0].state_dict(), target.layers[-1].state_dict()
    early_exit, independent = (started(name, target)[0] for name in ("early-exit", "independent"))
    below, above = independent.device_layers
    for ours, theirs in ((early_exit.exit, last), (early_exit.below[0], first), (below, first), (above, last)):
        torch.testing.assert_close(ours.state_dict() or dict(ours.named_buffers()), theirs)
    torch.testing.assert_close(early_exit.norm.weight.detach(), target.model.model.norm.weight.detach())


def test_a_checkpoint_comes_back(target: Target, drafter: Drafter, tmp_path: Path) -> None:
    save_checkpoint(drafter, tmp_path, dtype=torch.float32)
    again = load_bound(tmp_path, target)
    assert type(again) is type(drafter) and again.config == drafter.config
    assert again.frozen_parameters == drafter.frozen_parameters
    batch = Known(target, drafter).batch(FutureLengths(2, 2))
    with torch.no_grad():
        torch.testing.assert_close(again.predict(batch), drafter.predict(batch))


def test_the_layers_below_an_exit_are_no_part_of_the_checkpoint(target: Target) -> None:
    drafter = new_drafter("early-exit", target, draft_vocab_size=384)
    drafter.bind_target(target.embedding, target.head, target.layers)
    per_layer = sum(tensor.numel() for tensor in target.layers[0].parameters())
    assert drafter.frozen_parameters == per_layer
    assert not any(name.startswith("below") for name in drafter.state_dict())
    assert sum(tensor.numel() for tensor in drafter.parameters()) == per_layer + 64


def test_an_exit_needs_the_targets_layers(target: Target) -> None:
    drafter = new_drafter("early-exit", target, draft_vocab_size=384)
    with pytest.raises(FitError, match="first 1 layers, 0 were given"):
        drafter.bind_target(target.embedding, target.head)
    with pytest.raises(ValueError, match="embedding has shape"):
        drafter.bind_target(target.embedding[:9], target.head, target.layers)
    with pytest.raises(FitError, match=r"input_layernorm\.weight of shape None"):
        drafter.bind_target(target.embedding, target.head, [torch.nn.Linear(2, 2)])


def test_what_travels(target: Target) -> None:
    moa, eagle, early_exit, independent = (new_drafter(a, target, draft_vocab_size=384) for a in ARCHITECTURES)
    states = TargetStates(torch.empty(0), torch.empty(0), torch.arange(3 * 64.0).view(3, 64))
    first, second = eagle.rows(states, torch.arange(3))
    assert first.shape == second.shape == (3, 2, 16)
    torch.testing.assert_close(torch.cat((first.flatten(1), second.flatten(1)), dim=1), states.last)
    assert moa.row_reads and not early_exit.row_reads and not independent.row_reads


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architecture": "hydra"}, "unknown architecture 'hydra'"),
        ({"exit_layer": 9}, r"exit_layer must lie in 1\.\.4, not 9"),
        ({"exit_layer": 2.0}, "exit_layer must be a whole number from 0 on, not 2.0"),
        ({"colour": "red"}, "the field 'colour' is unknown"),
        ({"draft_vocab_size": 0}, r"draft_vocab_size must lie in 1\.\.512"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(target: Target, tmp_path: Path, changed: dict, said: str) -> None:
    save_checkpoint(new_drafter("early-exit", target, draft_vocab_size=384), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changed}))
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(tmp_path)


def test_what_cannot_be_made_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="unknown architecture 'hydra'"):
        new_drafter("hydra", target, draft_vocab_size=384)
    with pytest.raises(ConfigError, match="not of eagle"):
        new_drafter("eagle", target, draft_vocab_size=384, target_layers=1)
    moa = new_drafter("moa", target, draft_vocab_size=384)
    with pytest.raises(ConfigError, match="exit_layer"):
        EarlyExitConfig.like(moa.config, exit_layer=0)


def test_an_exit_copies_no_layer_that_it_cannot_compute(target: Target) -> None:
    other = copy.deepcopy(target.model.config)
    other.hidden_act = "gelu"
    with pytest.raises(ConfigError, match="another architecture than early-exit"):
        new_drafter("early-exit", replace(target, model=SimpleNamespace(config=other)), draft_vocab_size=384)


def test_what_needs_pytorch_is_not_exported(target: Target, tmp_path: Path) -> None:
    save_checkpoint(new_drafter("eagle", target, draft_vocab_size=384), tmp_path)
    with pytest.raises(CheckpointError, match="architecture eagle, which runs in PyTorch only"):
        load_for_device(tmp_path)
