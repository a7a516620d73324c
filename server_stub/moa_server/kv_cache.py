"""The target's key-value cache of one conversation, with what drafting needs: cut, gather, read a range."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_SMALLEST_ROOM = 256  # tokens


class GrowingLayer(DynamicLayer):
    """One layer's keys and values in buffers that grow by doubling, so that a forward copies only its own tokens.

    ``keys`` and ``values`` are views ``[1, kv_heads, length, head_dim]`` of the buffers.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._key_room = _room(key_states, _SMALLEST_ROOM)
        self._value_room = _room(value_states, _SMALLEST_ROOM)
        self.cut(0)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append ``[1, kv_heads, n, head_dim]`` and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self._key_room.shape[-2]:
            self._key_room = _grown(self._key_room, self.keys, 2 * end)
            self._value_room = _grown(self._value_room, self.values, 2 * end)
        self._key_room[:, :, start:end] = key_states
        self._value_room[:, :, start:end] = value_states
        self.cut(end)
        return self.keys, self.values

    def cut(self, length: int) -> None:
        """Let the layer end after ``length`` tokens of its buffers."""
        self.keys = self._key_room[:, :, :length]
        self.values = self._value_room[:, :, :length]

    def gather(self, start: int, chosen: Tensor) -> None:
        """Keep what lies before ``start``, then the tokens at the positions ``chosen [n]``, int64."""
        end = start + len(chosen)
        self._key_room[:, :, start:end] = self.keys.index_select(2, chosen)
        self._value_room[:, :, start:end] = self.values.index_select(2, chosen)
        self.cut(end)


class KeyValueCache(Cache):
    """A transformers cache of ``layers`` growing layers, for one sequence.

    Example: after a forward over a prefix of 10 tokens and the draft tree ``a(b, c(d))``, ``keep(10, [0, 2, 3])``
    leaves the prefix and a, c, d, 13 tokens in all.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[GrowingLayer() for _ in range(layers)])

    @property
    def length(self) -> int:
        return int(self.get_seq_length())

    def cut(self, length: int) -> None:
        """Forget everything from position ``length`` on."""
        if length < self.length:
            for layer in self.layers:
                layer.cut(length)

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Of the tokens after ``start`` keep those with the indices ``path``, ascending, forget the rest."""
        if list(path) == list(range(len(path))):  # a chain stays where it lies
            self.cut(start + len(path))
            return
        chosen = start + torch.tensor(path, device=self.layers[0].keys.device)
        for layer in self.layers:
            layer.gather(start, chosen)

    def window(self, start: int, stop: int) -> Window:
        """The tokens ``start`` to ``stop``, for reading."""
        return Window(
            [_LayerWindow(layer.keys[:, :, start:stop], layer.values[:, :, start:stop]) for layer in self.layers]
        )


class _LayerWindow:
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class Window:
    """A range of a cache; ``layers[i].keys`` and ``.values`` are ``[1, kv_heads, n, head_dim]``."""

    def __init__(self, layers: list[_LayerWindow]) -> None:
        self.layers = layers


def _room(like: Tensor, length: int) -> Tensor:
    return like.new_empty((*like.shape[:2], length, like.shape[3]))


def _grown(room: Tensor, used: Tensor, length: int) -> Tensor:
    grown = _room(room, length)
    grown[:, :, : used.shape[-2]] = used
    return grown
