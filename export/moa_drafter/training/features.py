"""What the drafter is trained on: the target's keys, values and last hidden states, kept on disk.

The target's forward is the dearest part of a training step. Its results do not change between
epochs, so they are computed once, at first use, and kept as float16.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moa_drafter.config import key_value_size
from moa_drafter.target import Target
from moa_drafter.training.data import Conversation


def layer_keys_values(cache: Any, layers: Sequence[int]) -> Tensor:
    """Keys (after RoPE) and values of a transformers cache with one sequence.

    Returns:
        ``[T, len(layers), 2 * num_kv_heads * head_dim]``, the layer self-attention's input.
    """
    parts = []
    for index in layers:
        layer = cache.layers[index]
        both = torch.cat((layer.keys[0], layer.values[0]), dim=0)  # [2 * kv_heads, T, head_dim]
        parts.append(both.transpose(0, 1).flatten(1))
    return torch.stack(parts, dim=1)


@torch.no_grad()
def target_features(target: Target, tokens: Sequence[int], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One forward of the target: ``[T, layers, kv]`` and the normed last hidden states ``[T, hidden]``."""
    ids = torch.tensor([tokens], device=target.device)
    out = target.model.model(input_ids=ids, use_cache=True)
    return layer_keys_values(out.past_key_values, layers), out.last_hidden_state[0]


class FeatureStore:
    """Features of a fixed list of conversations, computed at first use and memory-mapped.

    Args:
        folder: where the features lie; made again when conversations or layers differ.
    """

    def __init__(
        self, folder: Path, target: Target, conversations: Sequence[Conversation], layers: Sequence[int]
    ) -> None:
        self._target, self._conversations, self._layers = target, conversations, tuple(layers)
        config = target.model.config
        self._kv = key_value_size(config)
        width = len(self._layers) * self._kv + config.hidden_size
        self._starts = np.cumsum([0, *(len(c) for c in conversations)])
        key = {
            "target": target.fingerprint,
            "layers": list(self._layers),
            "tokens": zlib.crc32(json.dumps([c.tokens for c in conversations]).encode()),
        }
        folder.mkdir(parents=True, exist_ok=True)
        stamp = folder / "features.json"
        fresh = not stamp.is_file() or json.loads(stamp.read_text()) != key
        if fresh:
            stamp.unlink(missing_ok=True)
        shape = (int(self._starts[-1]), width)
        mode: Any = "w+" if fresh else "r+"
        self._rows = np.memmap(folder / "features.f16", np.float16, mode, shape=shape)
        self._ready = np.memmap(folder / "ready.u8", np.uint8, mode, shape=(len(conversations),))
        stamp.write_text(json.dumps(key))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[T, layers, kv]`` and last hidden states ``[T, hidden]``, float32."""
        start, stop = self._starts[index], self._starts[index + 1]
        if not self._ready[index]:
            kv, hidden = target_features(self._target, self._conversations[index].tokens, self._layers)
            rows = torch.cat((kv.flatten(1), hidden), dim=1)
            self._rows[start:stop] = rows.to(torch.float16).cpu().numpy()
            self._ready[index] = 1
        rows = torch.from_numpy(self._rows[start:stop].astype(np.float32))
        kv, hidden = rows.split([len(self._layers) * self._kv, rows.shape[1] - len(self._layers) * self._kv], dim=1)
        return kv.unflatten(1, (len(self._layers), self._kv)), hidden
