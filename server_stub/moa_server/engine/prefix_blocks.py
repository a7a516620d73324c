"""Blocks of tokens that several conversations begin with, such as a system prompt or an agent's tools.

As in vLLM's automatic prefix caching, a block is known by a hash of its tokens and of all before them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moa_server.engine.target_pass import BLOCK


def block_keys(owner: str, tokens: Sequence[int], known: Sequence[bytes] = ()) -> Iterator[bytes]:
    """Yield the key of each whole block of ``tokens``.

    Args:
        owner: conversations of different owners share nothing, so that no answer time reveals another owner's prompts.
        known: keys of the first blocks.
    """
    yield from known
    key = known[-1] if known else hashlib.sha256(owner.encode()).digest()
    for start in range(BLOCK * len(known), len(tokens) - BLOCK + 1, BLOCK):
        key = hashlib.sha256(key + np.array(tokens[start : start + BLOCK], np.int64).tobytes()).digest()
        yield key


class PrefixBlocks:
    """Copies of the states of blocks, see :meth:`moa_server.engine.target_pass.Cache.block_states`."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, tuple[str, Any]] = {}  # with their owners, the least recently used first
        self._owned: Counter[str] = Counter()

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    @property
    def tokens(self) -> int:
        """Tokens of all blocks."""
        return BLOCK * len(self._blocks)

    def add(self, owner: str, key: bytes, states: Any) -> None:
        """Take a block that is not there yet."""
        self._blocks[key] = owner, states
        self._owned[owner] += 1

    def use(self, key: bytes) -> Any:
        """Return the states of a block that is there."""
        self._blocks[key] = self._blocks.pop(key)
        return self._blocks[key][1]

    def evict(self) -> None:
        """Drop the least recently used block of the owner that has the most."""
        [(most, _)] = self._owned.most_common(1)
        key = next(key for key, (owner, _) in self._blocks.items() if owner == most)
        del self._blocks[key]
        self._owned[most] -= 1

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()
        self._owned.clear()
