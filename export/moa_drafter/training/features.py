"""The target's keys, values and hidden states of the training data.

On a CPU the target's forward is the most expensive part of a training step, so its states are computed once, at first
use, and kept on disk as float16. A GPU computes them faster than a disk reads them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from moa_drafter.config import Reads, key_value_size
from moa_drafter.target import Target
from moa_drafter.target_features import TargetStates, packed_target_states, target_states
from moa_drafter.training.data import Conversation


class Features(Protocol):
    """States of a fixed list of conversations."""

    def __getitem__(self, index: int) -> TargetStates: ...


def packed_states(features: Features, indices: Sequence[int], device: torch.device) -> TargetStates:
    """Return the states of several conversations, end to end, on ``device``."""
    if isinstance(features, LiveFeatures):
        return features.packed(indices)
    parts = [features[i] for i in indices]
    joined = (torch.cat([getattr(part, name) for part in parts]) for name in ("kv", "inner", "last"))
    return TargetStates(*joined).to(device)


class LiveFeatures:
    """States computed on demand, by one forward of the target over all conversations of a batch."""

    def __init__(self, target: Target, conversations: Sequence[Conversation], reads: Reads) -> None:
        self._target, self._conversations, self._reads = target, conversations, reads

    def __getitem__(self, index: int) -> TargetStates:
        """Return the states of one conversation, float32."""
        return self.packed([index])

    def packed(self, indices: Sequence[int]) -> TargetStates:
        """Return the states of several conversations, end to end, float32, on the target's device."""
        texts = [self._conversations[i].tokens for i in indices]
        return packed_target_states(self._target, texts, self._reads).to(torch.float32)


class FeatureStore:
    """States of a fixed list of conversations, computed at first use and memory-mapped.

    Args:
        folder: of the files, which are made again if conversations or ``reads`` differ.
    """

    def __init__(self, folder: Path, target: Target, conversations: Sequence[Conversation], reads: Reads) -> None:
        self._target, self._conversations, self._reads = target, conversations, reads
        config = target.model.config
        self._kv, self._hidden = key_value_size(config), config.hidden_size
        self._starts = np.cumsum([0, *(len(c) for c in conversations)])
        key = {
            "target": target.fingerprint,
            "reads": [list(reads.kv_layers), list(reads.inner_layers)],
            "tokens": zlib.crc32(json.dumps([c.tokens for c in conversations]).encode()),
        }
        folder.mkdir(parents=True, exist_ok=True)
        stamp = folder / "features.json"
        fresh = not stamp.is_file() or json.loads(stamp.read_text()) != key
        if fresh:
            stamp.unlink(missing_ok=True)
        shape = (int(self._starts[-1]), sum(self._widths))
        mode: Any = "w+" if fresh else "r+"
        self._rows = np.memmap(folder / "features.f16", np.float16, mode, shape=shape)
        self._ready = np.memmap(folder / "ready.u8", np.uint8, mode, shape=(len(conversations),))
        stamp.write_text(json.dumps(key))

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Numbers of a token: keys and values, inner states, last hidden state."""
        return len(self._reads.kv_layers) * self._kv, len(self._reads.inner_layers) * self._hidden, self._hidden

    def __getitem__(self, index: int) -> TargetStates:
        """Return the states of one conversation, float32."""
        start, stop = self._starts[index], self._starts[index + 1]
        if not self._ready[index]:
            states = target_states(self._target, self._conversations[index].tokens, self._reads)
            rows = torch.cat((states.kv.flatten(1), states.inner.flatten(1), states.last), dim=1)
            self._rows[start:stop] = rows.to(torch.float16).cpu().numpy()
            self._ready[index] = 1
        rows = torch.from_numpy(self._rows[start:stop].astype(np.float32))
        kv, inner, last = rows.split(self._widths, dim=1)
        return TargetStates(
            kv.unflatten(1, (len(self._reads.kv_layers), self._kv)),
            inner.unflatten(1, (len(self._reads.inner_layers), self._hidden)),
            last,
        )
