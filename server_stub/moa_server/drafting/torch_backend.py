"""The drafter's device half beside the target: steps of several conversations as one forward.

New tokens of all steps share the products with the matrices, where nearly all of the time goes; each step attends to
its own caches. So nothing is padded, and a step costs little more beside others than what its own tokens take. Products
are computed in a type of one's own choice: what is drafted decides no text. The rest is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from moa_drafter.devices import fastest_dtype
from moa_drafter.drafter import Drafter
from moa_drafter.model import MoADrafter
from moa_runtime.backends.base import StepInputs, StepResult
from moa_server.drafting.batched_model import Batch, OwnLayer
from moa_server.drafting.batcher import BatchedBackend
from moa_server.drafting.packed_layer import PackedLayer, multiplied
from moa_server.engine.base import Engine
from moa_server.engine.packed_linear import product

#: Candidates for each node of a tree, as bundles have them.
TOP_K = 16


class TargetEnds(Protocol):
    """What a drafter shares with its target: where it is, token embedding and head, ``[vocab_size, hidden]`` each."""

    @property
    def device(self) -> torch.device: ...

    @property
    def embedding(self) -> Tensor: ...

    @property
    def head(self) -> Tensor: ...


@runtime_checkable
class _WithDrafter(Protocol):
    """An engine that has a drafter's server half, and the target's ends."""

    drafter: Drafter | None
    target: TargetEnds


def backend_of(engine: Engine) -> BatchedBackend | None:
    """What the drafter of an engine drafts with beside the target, in the type that the device multiplies fastest.

    Returns:
        None without a drafter, for another architecture, and for one that lacks layers of the target: it computes
        with the target's own, and the engine has none to bind it to.
    """
    if not isinstance(engine, _WithDrafter):
        return None
    drafter, target = engine.drafter, engine.target
    if not isinstance(drafter, MoADrafter) or not drafter.is_whole:
        return None
    half = PackedDeviceHalf(drafter, target, fastest_dtype(target.device.type), top_k=TOP_K)
    return BatchedBackend(half.steps, top_k=half.top_k, kv_shape=half.kv_shape)


class PackedDeviceHalf:
    """Computes what :class:`moa_drafter.device_module.DeviceHalf` computes, for several steps at once.

    Matrices are copied; the token embedding is the target's own memory.

    Args:
        drafter: whole, see :attr:`moa_drafter.model.MoADrafter.is_whole`; need not be bound otherwise.
        target: it gives embedding and head, and the device.
        dtype: of the products.
        top_k: candidates per query, at most the draft vocabulary.
    """

    def __init__(self, drafter: MoADrafter, target: TargetEnds, dtype: torch.dtype, *, top_k: int) -> None:
        config = drafter.config
        self.top_k = min(top_k, config.draft_vocab_size)
        self.kv_shape = (config.kv_heads, config.decoder.head_dim)
        self._dtype, self._device, self._layer_heads = dtype, target.device, config.decoder.num_kv_heads
        self._embedding, self._angles, self._norm = target.embedding.detach(), drafter.angles, drafter.norm
        self._self, *self._tail = (OwnLayer(layer, dtype) for layer in (drafter.self_attention, *drafter.tail))
        self._cross = PackedLayer(drafter.cross_attention, dtype)
        self._tokens = drafter.draft_to_target.to(target.device)
        self._head = product(target.head.detach()[self._tokens].to(dtype))
        self._sharpness = config.sharpness

    @torch.inference_mode()
    def steps(self, inputs: Sequence[StepInputs]) -> list[StepResult]:
        """What :meth:`moa_runtime.backends.base.Backend.step` gives for each of the inputs, which have one query each
        at least; the same as alone but for rounding."""
        batch = Batch(inputs, self._angles, self._layer_heads, self._device)
        x = functional.embedding(batch.tokens, self._embedding).float()
        x = self._self(x, batch, last=not self._tail)  # the other tokens only had to leave their keys and values
        x = self._cross(x, batch.looking.angles, batch.looking.at([rows[0] for rows in batch.rows], everywhere=True))
        for at, layer in enumerate(self._tail, start=1):
            x = layer(x, batch, rows=at, last=at == len(self._tail))
        parts = (*self._candidates(self._norm(x)), *(torch.cat(half, dim=1) for half in zip(*batch.new, strict=True)))
        counts = (batch.asked, batch.asked, batch.count, batch.count)
        split = (part.split(count) for part, count in zip(parts, counts, strict=True))
        return [StepResult(*(part.cpu().numpy() for part in result)) for result in zip(*split, strict=True)]

    def _candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = multiplied(self._head, hidden, self._dtype) * self._sharpness
        top, index = logits.topk(self.top_k, dim=-1)
        return self._tokens[index], top - logits.logsumexp(dim=-1, keepdim=True)
