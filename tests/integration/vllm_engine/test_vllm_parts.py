"""The vLLM engine without vLLM: every layout of a cache is learnt, and requests move to prefixes and verify drafts."""

from __future__ import annotations

import asyncio
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moa_drafter.target import target_facts
from moa_runtime.session.events import Sampling
from moa_server.engine.base import EngineError, Outcome, StepRequest
from moa_server.engine.vllm.engine import HeldSequence, Move, RequestProgress, VllmEngine
from moa_server.engine.vllm.paged_cache import BLOCK, PagedLayer, PagedStates
from support.refusals import refused
from support.toy_engine import ToyEngine

HEADS, SIZE, BLOCKS = 3, 16, 9


def heads_first(cache, slot, keys, values):
    cache[slot // BLOCK, :, slot % BLOCK, :SIZE], cache[slot // BLOCK, :, slot % BLOCK, SIZE:] = keys, values


def transposed_keys(cache, slot, keys, values):
    """As vLLM's kernels for CPUs want them: the keys of a block dimension by dimension, then its values."""
    halves = cache.view(BLOCKS, HEADS, 2, BLOCK * SIZE)
    halves[slot // BLOCK, :, 0].view(HEADS, SIZE, BLOCK)[:, :, slot % BLOCK] = keys
    halves[slot // BLOCK, :, 1].view(HEADS, BLOCK, SIZE)[:, slot % BLOCK] = values


def interleaved(cache, slot, keys, values):
    """Pairs of tokens side by side, dimension by dimension, as matrix instructions want them."""
    own = cache[slot // BLOCK].view(HEADS, 2, BLOCK // 2, SIZE, 2)
    own[:, 0, slot % BLOCK // 2, :, slot % 2], own[:, 1, slot % BLOCK // 2, :, slot % 2] = keys, values


def tokens_first(cache, slot, keys, values):
    """Another order in memory with the same shape, see :func:`empty`."""
    heads_first(cache, slot, keys, values)


def empty(store, dtype):
    shape = (BLOCKS, BLOCK, HEADS, 2 * SIZE) if store is tokens_first else (BLOCKS, HEADS, BLOCK, 2 * SIZE)
    made = torch.zeros(shape, dtype=dtype)
    return made.transpose(1, 2) if store is tokens_first else made


def storing(cache, one):
    def store(keys, values, slots):
        for slot, key, value in zip(slots.tolist(), keys, values, strict=True):
            one(cache, slot, key, value)

    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("one", [heads_first, transposed_keys, interleaved, tokens_first])
def test_stored_numbers_are_read_again(one, dtype):
    layers, caches = {}, {}
    for layer in (2, 5):
        cache = caches[layer] = empty(one, dtype)
        layers[layer] = PagedLayer.learnt(cache, storing(cache, one), HEADS, SIZE)
    torch.manual_seed(1)
    table = random.Random(1).sample(range(1, BLOCKS), 4)
    keys, values = torch.randn(2, 2, 4 * BLOCK, HEADS, SIZE).to(dtype)
    slots = torch.tensor([table[position // BLOCK] * BLOCK + position % BLOCK for position in range(4 * BLOCK)])
    for index, layer in enumerate((2, 5)):
        storing(caches[layer], one)(keys[index], values[index], slots)
    features = torch.randn(BLOCKS * BLOCK, 7)
    states = PagedStates(layers, table, features)
    for start, stop in ((0, 4 * BLOCK), (31, 33), (70, 71), (40, 40)):
        found = states.read((5, 2), start, stop)
        both = torch.cat((keys, values), -2).flatten(2)  # [layers, tokens, keys and values]
        assert torch.equal(found, both[[1, 0], start:stop].transpose(0, 1))
        assert torch.equal(states.features[start:stop], features[slots[start:stop]])


def test_a_lossy_cache_is_refused():
    cache = empty(heads_first, torch.float32)
    store = storing(cache, lambda cache, slot, keys, values: heads_first(cache, slot, keys // 2, values))
    with refused("unsupported_cache", EngineError):
        PagedLayer.learnt(cache, store, HEADS, SIZE)


# -- sequences and requests ------------------------------------------------------------------------

TEXT = list(range(10, 20))  # two blocks and a half


def held(tokens=TEXT, chosen=20) -> HeldSequence:
    return HeldSequence("r", list(tokens), chosen)


@pytest.mark.parametrize(
    ("prefix", "choosing", "move"),
    [
        ([*TEXT, 20], True, (Move.GO_ON, 10)),
        (TEXT, False, (Move.NOTHING, 10)),
        (TEXT[:3], False, (Move.NOTHING, 10)),  # nothing is dropped
        ([*TEXT, 20], False, (Move.GO_ON, 10)),
        ([*TEXT, 20, 21], True, (Move.REWRITE, 10)),
        ([*TEXT, 7], True, (Move.REWRITE, 10)),
        (TEXT, True, (Move.REWRITE, 9)),  # its last token is processed again, for its choice
        ([*TEXT[:8], 7], True, (Move.REWRITE, 8)),
        (TEXT[:8], True, (Move.ANEW, 0)),  # token 7 lies in a block that is full
        ([*TEXT[:7], 7], True, (Move.ANEW, 0)),
        ([7], True, (Move.ANEW, 0)),
    ],
)
def test_a_sequence_moves_to_a_prefix(prefix, choosing, move):
    assert held().move(prefix, 4, choosing=choosing) == move
    if prefix == [*TEXT, 20] and choosing:  # a piece of prefill leaves no choice to continue with
        assert held(chosen=None).move(prefix, 4, choosing=True) == (Move.REWRITE, 10)


def test_chosen_tokens_have_logprobs_however_vllm_cuts_the_request():
    """It also samples in the middle of a prefix, and returns nothing then."""
    work = RequestProgress(StepRequest(1, [1, 2], [4, 5], [0, 1], Sampling(logprobs=1)), HeldSequence("a"))
    logits = np.array([0, 0, 0, 0, 5, 0, 0, 0], np.float32)
    for taken in ([], [4], [7]):
        chooser = work.chooser([0])
        chooser.choose(np.roll(logits, 3 * (taken == [7])))
        work.take(taken)
    assert [each.top_tokens for each in work.logprobs] == [(4,), (7,)] and work.accepted == 1 and work.token == 7


# -- the whole engine over a toy in the place of vLLM ----------------------------------------------


class ToyCore:
    """Requests that hold tokens, as :class:`moa_server.engine.vllm.core.VllmCore` does, and a toy that chooses."""

    batch_invariant, shared_weights, features = False, None, None

    def __init__(self, target, dtype, max_context, blocks, sequences, fusion) -> None:
        self.blocks, self.held, self.preempted = blocks, {}, random.Random(2)
        self.lost, self.close = (lambda name: name not in self.held), self.held.clear
        self.salts: dict[str, str] = {}

    def begin(self, name, tokens, salt):
        self.held[name], self.salts[name] = tokens, salt

    def table(self, name):
        return [0] * -(-len(self.held[name]) // BLOCK)

    @property
    def free_blocks(self):
        return self.blocks - sum(len(self.table(name)) for name in self.held)

    def rewrite(self, name, keep, tokens):
        self.held[name] = [*self.held[name][:keep], *tokens]

    def drop(self, names):
        for name in names:
            self.held.pop(name, None)

    def step(self, drafts, samplings):
        """Run one forward, which cuts drafts after two tokens; at times a request is preempted."""
        if len(drafts) > 1 and self.preempted.random() < 0.1:
            del self.held[next(iter(drafts))]
        drafts = {name: draft for name, draft in drafts.items() if name in self.held}
        given = {
            name: verdict(self.held[name], draft)[:2] if samplings[name] else [0] for name, draft in drafts.items()
        }
        for name, tokens in given.items():
            self.held[name] = [*self.held[name], *tokens]
        assert self.free_blocks >= 0
        return given


def verdict(text, draft):
    """The accepted tokens of a draft, and the toy's choice after them."""
    tokens = []
    for drafted in [*draft, None]:
        tokens.append(ToyEngine().choice([*text, *tokens]))
        if tokens[-1] != drafted:
            return tokens


def test_any_schedule_of_steps_gives_the_choices_of_the_toy(monkeypatch, tiny_target):
    monkeypatch.setitem(sys.modules, "moa_server.engine.vllm.core", SimpleNamespace(VllmCore=ToyCore))
    engine = VllmEngine(target_facts(str(tiny_target)), max_context=128, cache_tokens=64)
    for number, owner in {1: "ann", 2: "ann", 3: "bob"}.items():
        engine.share(number, owner)
    rng, texts, evicted, preempted = random.Random(1), {number: [number] for number in range(1, 6)}, 0, 0
    for _ in range(150):
        requests = []
        for number in rng.sample(list(texts), rng.randint(1, 5)):
            text = texts[number][: rng.choice((100, 100, 100, rng.randint(1, 100)))]
            texts[number] = text = [*text, *(rng.randrange(3, 40) for _ in range(rng.choice((0, 0, 20))))]
            draft: list[int] = []
            for _ in range(rng.choice((0, 0, 1, 4))):
                draft += verdict([*text, *draft], []) if rng.random() < 0.8 else [3]
            requests.append(StepRequest(number, text, draft, (), Sampling()))
            if rng.random() < 0.2:
                requests[-1] = StepRequest(number, text)
        for request, outcome in zip(requests, asyncio.run(engine.step(requests)), strict=True):
            *accepted, token = verdict(request.prefix, request.draft) if request.sampling else [None]
            if not outcome.done:
                preempted += 1
                assert outcome == Outcome(done=False) and engine.held(request.sequence, request.prefix) == 0
                continue
            assert (len(outcome.path), outcome.token) == (len(accepted), token)
            texts[request.sequence] = [*request.prefix, *accepted, *([token] if token else [])]
        evicted += len(engine._held) < len(texts)
    assert evicted and preempted and engine.forwards and engine.cache_use[0] > 0
    engine.close()
    salts = [{salt for name, salt in engine._core.salts.items() if name.startswith(f"{number}.")} for number in texts]
    assert [len(each) for each in salts[:3]] == [1, 1, 1] and salts[0] == salts[1] != salts[2]
    assert not set.intersection(salts[3], salts[4]), "a sequence without an owner shares nothing"
