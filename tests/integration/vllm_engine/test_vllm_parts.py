"""The vLLM engine without vLLM: every layout of a cache is learnt, and requests move to prefixes and verify drafts."""

from __future__ import annotations

import random

import pytest
import torch

from moa_runtime.session.events import Sampling
from moa_server.engine.base import EngineError, StepRequest
from moa_server.engine.vllm.engine import HeldSequence, Move, RequestProgress
from moa_server.engine.vllm.paged_cache import BLOCK, PagedLayer, PagedStates
from support.refusals import refused

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
    states = PagedStates(layers, table)
    for start, stop in ((0, 4 * BLOCK), (31, 33), (70, 71), (40, 40)):
        found = states.read((5, 2), start, stop)
        both = torch.cat((keys, values), -2).flatten(2)  # [layers, tokens, keys and values]
        assert torch.equal(found, both[[1, 0], start:stop].transpose(0, 1))


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


def work(draft, sampling=Sampling()) -> RequestProgress:  # noqa: B008 (frozen)
    return RequestProgress(StepRequest(1, TEXT, draft, sampling=sampling), held([]))


@pytest.mark.parametrize(
    ("draft", "given", "accepted", "token"),
    [
        ([1, 2, 3], [[1, 2, 9]], 2, 9),  # it ends at the first token that the target does not choose
        ([1, 2, 3], [[1], [2], [3], [4]], 3, 4),  # however vLLM cuts it
    ],
)
def test_a_draft_is_verified(draft, given, accepted, token):
    progress = work(draft)
    for tokens in given:
        assert not progress.done
        progress.take(tokens)
    assert (progress.done, progress.accepted, progress.token) == (True, accepted, token)
    assert (progress.held.tokens, progress.held.chosen) == ([*TEXT, *draft[:accepted]], token)


def test_a_piece_of_prefill_chooses_nothing():
    piece = work([], None)
    piece.take([0])
    assert (piece.done, piece.token, piece.held.tokens, piece.held.chosen) == (True, None, TEXT, None)
