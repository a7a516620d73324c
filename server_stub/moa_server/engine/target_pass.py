"""The contract between the engine and a forward pass of the target, whatever library computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moa_server.engine.base import Float32

#: Tokens of a block; the capacity of every cache is a multiple of it.
BLOCK = 64
#: Last hidden states ``[tokens, hidden]``: an array of the pass's own library, which callers only slice by tokens.
Hidden = Any


def rounded_up(tokens: int, multiple: int = BLOCK) -> int:
    """``rounded_up(65)`` is 128."""
    return -(-tokens // multiple) * multiple


class Cache(Protocol):
    """Keys, after RoPE, and values of up to ``capacity`` tokens of a sequence. A token's index in it is its *slot*."""

    @property
    def capacity(self) -> int: ...

    @property
    def features(self) -> Any:
        """Features ``[capacity, hidden]``, an array of the pass's library; ``[capacity, 0]`` if none are kept."""

    def resized(self, capacity: int, used: int) -> Cache:
        """Make another cache with the first ``used`` tokens of this one."""

    def read(self, layers: Sequence[int], start: int, stop: int) -> Any:
        """Return the slots ``start`` to ``stop``, ``[n, layers, 2 * kv_heads * head_dim]``: all keys, then all values;
        an array of the pass's library."""

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Move the tokens with the ascending indices ``path``, counted from slot ``start``, to ``start``."""

    def resumable(self, length: int) -> int:
        """Return after how many of the first ``length`` tokens the pass can go on: all of them, but in targets with
        recurrent layers."""

    def block_states(self, index: int) -> Any:
        """Copy all that the cache holds of the slots ``64 * index`` to ``64 * index + 63``."""

    def set_block_states(self, index: int, states: Any) -> None:
        """Put what :meth:`block_states` of a cache of the same pass gave into these slots."""


class CacheShape(Protocol):
    """Layout of the caches of a pass."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a cache."""

    def new_cache(self, capacity: int) -> Cache:
        """Make an empty cache for at least ``capacity`` tokens."""


@dataclass(frozen=True)
class Piece:
    """New tokens of one sequence after those in its cache: a chain, and a tree at the end of the chain.

    Attributes:
        cache: one that the pass has made.
        cached: tokens in the cache before these; the piece's own tokens take the next slots, in order.
        chain: tokens of the chain; at least one if there is no cached token.
        tree, parents: a tree as in :mod:`moa_runtime.session.tree`; a draft that is a chain belongs to ``chain``.
        drafted: tokens at the end of the chain that are a draft.
        shift: added to all positions, to test a pass far into a context without the tokens before.
    """

    cache: Any
    cached: int
    chain: Sequence[int]
    tree: Sequence[int] = ()
    parents: Sequence[int] = ()
    shift: int = 0
    drafted: int = 0

    def __len__(self) -> int:
        return len(self.chain) + len(self.tree)


def keep_features(pieces: Sequence[Piece], features: Any) -> None:
    """Store the features ``[tokens of all pieces, size]``, an array of the pass's library, in the pieces' caches."""
    first = 0
    for piece in pieces:
        piece.cache.features[piece.cached : piece.cached + len(piece)] = features[first : first + len(piece)]
        first += len(piece)


class LogitRows(Protocol):
    """Logits of several tokens, such as an array ``[n, vocab_size]``; a pass on a GPU fetches rows when asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Float32: ...

    def __iter__(self) -> Iterator[Float32]: ...


class Fusion(Protocol):
    """Makes *features*, what a pass keeps of each token for a drafter's memory rows, of states inside the target
    (EAGLE-3, arXiv 2503.01840)."""

    @property
    def inner_layers(self) -> Sequence[int]:
        """Layers, counted from 0, whose outputs are read; not the last one."""

    @property
    def size(self) -> int:
        """Numbers of a feature."""

    def __call__(self, states: Sequence[Any]) -> Any:
        """Return the features ``[tokens, size]`` of the layers' outputs ``[tokens, hidden]``, one array a layer in
        their order; all are arrays of the pass's library."""


class TargetPass(Protocol):
    """Computes forward passes of the target. Used by one thread at a time."""

    @property
    def name(self) -> str:
        """``onnx`` (numpy and onnxruntime), ``fused`` (torch), or ``general`` (transformers' forward, the slowest)."""

    @property
    def dtype(self) -> str:
        """Type of the products: "float32", "bfloat16", "int8" or "int4"."""

    @property
    def device(self) -> str:
        """Its kind, such as "cpu"."""

    @property
    def batch_invariant(self) -> bool:
        """Whether results are the same to the bit whatever else is in a forward."""

    @property
    def windows(self) -> bool:
        """Whether layers with a window are computed as such; else a context ends with it."""

    @property
    def trees(self) -> bool:
        """Whether it takes trees; else chains only, each of whose drafted tokens may take a forward."""

    @property
    def cache_shape(self) -> CacheShape:
        """Of the caches that it takes."""

    def forward(self, pieces: Sequence[Piece]) -> tuple[Hidden, int]:
        """Run the target over all pieces, whose caches must hold ``cached + len(piece)`` tokens; their keys and values,
        and features if they are kept, are in the caches afterwards.

        Returns:
            normed last hidden states ``[tokens of all pieces, hidden]``, and the number of forwards it took.
        """

    def logits(self, parts: Sequence[Hidden]) -> LogitRows:
        """Return the logits, float32, of all parts ``[n, hidden]`` of last hidden states, one after the other."""
