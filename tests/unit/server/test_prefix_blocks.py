"""Conversations of one owner share the blocks of tokens that they begin with."""

from __future__ import annotations

import pytest

from moa_server.engine.sequence_caches import SequenceCaches

_TEXT = [(7919 * index) % 61 for index in range(300)]


class Slots:
    """A cache that holds the tokens themselves."""

    last = None

    def __init__(self, capacity: int) -> None:
        self.capacity, self.tokens = capacity, [-1] * capacity

    def resized(self, capacity: int, used: int) -> Slots:
        other = Slots(capacity)
        other.tokens[:used] = self.tokens[:used]
        return other

    def block_states(self, index: int) -> list[int]:
        return self.tokens[64 * index : 64 * index + 64]

    def set_block_states(self, index: int, states: list[int]) -> None:
        self.tokens[64 * index : 64 * index + 64] = states


def process(caches: SequenceCaches, number: int, prefix: list[int]) -> int:
    """Do what an engine does; return how many tokens it had to compute."""
    caches.open(number, prefix)
    caches.allocate({number: len(prefix)})
    caches.reuse(number, prefix)
    state, held = caches[number], len(caches[number].tokens)
    assert state.cache.tokens[:held] == prefix[:held]
    state.cache.tokens[held : len(prefix)] = prefix[held:]
    state.tokens[held:] = prefix[held:]
    caches.keep_blocks([number])
    return len(prefix) - held


@pytest.mark.parametrize(
    ("owners", "second", "computed"),
    [
        (("ann", "ann"), _TEXT, 300 - 256),
        (("ann", "ann"), [*_TEXT[:130], *_TEXT[:100]], 230 - 128),
        (("ann", "ann"), [5, *_TEXT], 301),
        (("ann", "ann"), _TEXT[:128], 0),
        (("ann", "bob"), _TEXT, 300),
        (("ann", None), _TEXT, 300),
    ],
)
def test_a_second_conversation_computes_what_the_first_had_not(owners, second, computed) -> None:
    caches = SequenceCaches(Slots, 4096)
    for number, owner in enumerate(owners):
        if owner is not None:
            caches.share(number, owner)
    assert process(caches, 0, _TEXT) == 300
    caches.release(0)
    assert caches.held(1, second) == len(second) - computed
    assert process(caches, 1, second) == computed
    assert caches.tokens_reused == min(len(second) - computed, len(second) - 1), "an engine computes the last one"


def test_keys_follow_a_conversation_that_is_cut_and_goes_on() -> None:
    caches = SequenceCaches(Slots, 4096)
    caches.share(0, "ann")
    process(caches, 0, _TEXT)
    caches[0].cut(150)
    process(caches, 0, other := [*_TEXT[:150], *_TEXT[:150]])
    for number, text in enumerate((_TEXT, other), 1):
        caches.share(number, "ann")
        assert process(caches, number, text) == 300 - 256


def test_blocks_take_what_caches_leave_and_each_owner_keeps_some() -> None:
    caches = SequenceCaches(Slots, 1024)
    caches.share(1, "bob")
    process(caches, 1, _TEXT[:100])
    for number in range(2, 8):
        caches.share(number, "ann")
        process(caches, number, [number, *_TEXT])
        assert caches.tokens_taken <= 1024
        caches.release(number)
    assert caches.held(8, _TEXT) == 0
    caches.share(8, "bob")
    assert caches.held(8, _TEXT) == 64, "the owner with the most blocks loses them first"
    process(caches, 9, _TEXT * 3)  # a conversation needs the memory
    assert caches.tokens_taken <= 1024
