"""Does a pass compute the same bits for a token whatever stands beside it, on this processor with these libraries?"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moa_server.engine.forward import Piece
from moa_server.engine.fused_llama import FusedLlama
from moa_server.engine.kv_cache import Room

#: Layers that are run: the first one, and one whose input is no embedding.
_LAYERS = 2
#: Tokens of the text; past a chunk of prefill, and several blocks of keys.
_TOKENS = 620
#: Sizes of pieces, over and over, and where trees hang: at both sides of a block's edge.
_PIECES = (1, 2, 3, 4, 5, 7, 1, 8, 12, 16, 30, 64, 1, 100)
_TREES = (5, 60, 64, 127, 190, 560)
_TREE_SIZE = 62


@torch.inference_mode()
def is_invariant(fused: FusedLlama, vocab_size: int, context: int) -> bool:
    """Run a text in large chunks, in small pieces beside another sequence, and in trees: are all states equal?

    Takes about a second for a target of 135 million parameters.
    """
    rng = random.Random(4)
    text = [rng.randrange(vocab_size) for _ in range(min(_TOKENS, context))]
    short = fused.first_layers(_LAYERS)
    room = Room(short.room_shape, len(text))
    states = _whole(short, text, room)
    return (
        _same_in_pieces(short, text, room, states)
        and all(_same_in_tree(short, text, at, room, states, rng) for at in _TREES if at < len(text))
        and _same_logits(short, states)
    )


def _whole(fused: FusedLlama, text: Sequence[int], room: Room, chunk: int = 512) -> Tensor:
    """Last hidden states of the whole text."""
    starts = range(0, len(text), chunk)
    return torch.cat([fused.forward([Piece(room, at, text[at : at + chunk])])[0] for at in starts])


def _same_in_pieces(fused: FusedLlama, text: Sequence[int], room: Room, states: Tensor) -> bool:
    mine, beside = Room(fused.room_shape, len(text)), Room(fused.room_shape, len(text))
    for index, (start, stop) in enumerate(_cut(len(text))):
        pieces = [Piece(mine, start, text[start:stop])]
        if index % 3:
            pieces.insert(index % 2, Piece(beside, 0, text[stop - 1 : stop - 1 + index % 3]))
        hidden, _ = fused.forward(pieces)
        first = 0 if pieces[0].room is mine else len(pieces[0])
        if not torch.equal(hidden[first : first + stop - start], states[start:stop]):
            return False
    return torch.equal(mine.keys, room.keys) and torch.equal(mine.values, room.values)


def _cut(length: int) -> Iterator[tuple[int, int]]:
    start = index = 0
    while start < length:
        stop = min(start + _PIECES[index % len(_PIECES)], length)
        yield start, stop
        start, index = stop, index + 1


def _same_in_tree(
    fused: FusedLlama, text: Sequence[int], at: int, room: Room, states: Tensor, rng: random.Random
) -> bool:
    """A tree behind the first ``at`` tokens, some path of which is the text itself."""
    room = room.resized(at + _TREE_SIZE, at)
    right = text[at : at + 20]
    spine = sorted(rng.sample(range(_TREE_SIZE), len(right)))
    tokens = [rng.choice(text) for _ in range(_TREE_SIZE)]
    parents = [rng.randint(0, index) for index in range(_TREE_SIZE)]
    node = 0
    for index, token in zip(spine, right, strict=True):
        tokens[index], parents[index], node = token, node, index + 1
    hidden, _ = fused.forward([Piece(room, at, (), tokens, parents)])
    return torch.equal(hidden[spine], states[at : at + len(right)])


def _same_logits(fused: FusedLlama, states: Tensor) -> bool:
    rows = states[:70]
    logits = fused.logits(rows)
    return all(torch.equal(fused.logits(rows[start:stop]), logits[start:stop]) for start, stop in _cut(len(rows)))
