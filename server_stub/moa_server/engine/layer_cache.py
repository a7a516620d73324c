"""Caches of the general pass: keys and values of any shapes, layer by layer, and states of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moa_server.engine.kv_cache import zeros
from moa_server.engine.target_pass import BLOCK, rounded_up

#: Tokens between the states of recurrent layers that are kept, from which an earlier token is computed again.
CHECKPOINT = 256
#: Tensors of one recurrent layer, by transformers' name of their kind and their number.
RecurrentState = dict[tuple[str, int], Tensor]


@dataclass(frozen=True)
class LayerCacheShape:
    """Layout of the caches of a target, a :class:`moa_server.engine.target_pass.CacheShape`.

    Attributes:
        layers: of each layer the heads of its keys and values, and the sizes of one key and one value; None if it has
            none of its own.
        feature_size: size of the features; 0 if none are kept.
        state_bytes: of the states of all recurrent layers after a token; 0 if the target has none.
    """

    layers: tuple[tuple[int, int, int] | None, ...]
    dtype: torch.dtype
    device: torch.device
    feature_size: int = 0
    state_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, with its share of a checkpoint."""
        numbers = sum(heads * (key + value) for heads, key, value in filter(None, self.layers)) + self.feature_size
        return numbers * self.dtype.itemsize + self.state_bytes // CHECKPOINT

    def new_cache(self, capacity: int) -> LayerCache:
        """Make an empty cache for at least ``capacity`` tokens."""
        return LayerCache(self, capacity)


class LayerCache:
    """See :class:`moa_server.engine.target_pass.Cache`.

    Attributes:
        layers: keys and values of each layer, ``[1, heads, capacity, size]``; nothing if it has none of its own.
        features: ``[capacity, feature_size]``.
        states: those of the recurrent layers, by the number of tokens before.
    """

    @torch.inference_mode()
    def __init__(self, shape: LayerCacheShape, capacity: int) -> None:
        self.shape, self.capacity = shape, rounded_up(capacity)
        self.layers: list[tuple[Tensor, ...]] = [
            () if own is None else tuple(zeros(shape, 1, own[0], self.capacity, size) for size in own[1:])
            for own in shape.layers
        ]
        self.features = zeros(shape, self.capacity, shape.feature_size)
        self.states: dict[int, list[RecurrentState]] = {}

    @torch.inference_mode()
    def resized(self, capacity: int, used: int) -> LayerCache:
        """See :meth:`moa_server.engine.target_pass.Cache.resized`."""
        other = LayerCache(self.shape, capacity)
        for own, given in zip(other._halves(), self._halves(), strict=True):
            own[:, :, :used] = given[:, :, :used]
        other.features[:used] = self.features[:used]
        other.states = {count: states for count, states in self.states.items() if count <= used}
        return other

    def read(self, layers: Sequence[int], start: int, stop: int) -> Tensor:
        """See :meth:`moa_server.engine.target_pass.Cache.read`."""
        halves = [[self.layers[index][half][0, :, start:stop] for index in layers] for half in (0, 1)]
        return torch.cat([torch.stack(parts).movedim(2, 0).flatten(2) for parts in halves], -1)

    @torch.inference_mode()
    def keep(self, start: int, path: Sequence[int]) -> None:
        """See :meth:`moa_server.engine.target_pass.Cache.keep`."""
        end = start + len(path)
        self.drop_states(end)
        if list(path) == list(range(len(path))):  # a chain stays where it lies
            return
        slots = start + torch.tensor(path, device=self.features.device)
        for half in self._halves():
            half[:, :, start:end] = half[:, :, slots]
        self.features[start:end] = self.features[slots]

    def resumable(self, length: int) -> int:
        """See :meth:`moa_server.engine.target_pass.Cache.resumable`."""
        return max(count for count in (0, *self.states) if count <= length) if self.shape.state_bytes else length

    def drop_states(self, length: int) -> None:
        """Forget the states after more than ``length`` tokens, and those before that are no checkpoints; the last token
        may be computed again for its choice."""
        kept = {count for count in self.states if count <= length and (count % CHECKPOINT == 0 or count >= length - 1)}
        self.states = {count: self.states[count] for count in kept}

    def block_states(self, index: int) -> tuple[list[Tensor], list[RecurrentState] | None]:
        """See :meth:`moa_server.engine.target_pass.Cache.block_states`."""
        return [part.clone() for part in self._parts(index)], self.states.get((index + 1) * BLOCK)

    @torch.inference_mode()
    def set_block_states(self, index: int, states: tuple[list[Tensor], list[RecurrentState] | None]) -> None:
        """See :meth:`moa_server.engine.target_pass.Cache.set_block_states`."""
        for part, given in zip(self._parts(index), states[0], strict=True):
            part.copy_(given)
        self.drop_states(index * BLOCK)
        if states[1] is not None:
            self.states[(index + 1) * BLOCK] = states[1]

    def _halves(self) -> list[Tensor]:
        return [half for layer in self.layers for half in layer]

    def _parts(self, index: int) -> list[Tensor]:
        own = slice(index * BLOCK, (index + 1) * BLOCK)
        return [*(half[:, :, own] for half in self._halves()), self.features[own]]
