"""The drafter's device half beside the target: steps of several conversations as one forward.

New tokens of all steps share the products with the matrices, where nearly all of the time goes; each step attends to
its own caches. So nothing is padded, and a step costs little more beside others than what its own tokens take. Products
are computed in a type of one's own choice: what is drafted decides no text. The rest is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moa_drafter.drafter import Drafter
from moa_drafter.llama import KeysValues, rotate
from moa_drafter.model import MoADrafter
from moa_drafter.precision import fastest_dtype
from moa_runtime.backends.base import StepInputs, StepResult
from moa_server.batched_backend import BatchedBackend
from moa_server.engine import Engine
from moa_server.packed_layer import PackedLayer, attended, joined, multiplied
from moa_server.packed_linear import product

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
        None without a drafter, and for those whose steps need layers of the target, or another architecture's.
    """
    if not isinstance(engine, _WithDrafter):
        return None
    drafter, target = engine.drafter, engine.target
    if not isinstance(drafter, MoADrafter) or drafter.config.copied_layers:
        return None
    half = PackedDeviceHalf(drafter, target, fastest_dtype(target.device.type), top_k=TOP_K)
    return BatchedBackend(half.steps, top_k=half.top_k, kv_shape=half.kv_shape)


class PackedDeviceHalf:
    """Computes what :class:`moa_drafter.device_half.DeviceHalf` computes, for several steps at once.

    Matrices are copied; the token embedding is the target's own memory.

    Args:
        drafter: without layers of the target; need not be bound.
        target: it gives embedding and head, and the device.
        dtype: of the products.
        top_k: candidates per query, at most the draft vocabulary.
    """

    def __init__(self, drafter: MoADrafter, target: TargetEnds, dtype: torch.dtype, *, top_k: int) -> None:
        config = drafter.config
        self.top_k = min(top_k, config.draft_vocab_size)
        self.kv_shape = (config.kv_heads, config.decoder.head_dim)
        self._dtype, self._device = dtype, target.device
        self._embedding, self._angles, self._norm = target.embedding.detach(), drafter.angles, drafter.norm
        self._self, self._cross = (
            PackedLayer(drafter.self_attention, dtype),
            PackedLayer(drafter.cross_attention, dtype),
        )
        self._keys_values = joined(dtype, drafter.self_attention.self_attn, "k_proj", "v_proj")
        self._tokens = drafter.draft_to_target.to(target.device)
        self._head = product(target.head.detach()[self._tokens].to(dtype))
        self._sharpness = config.sharpness

    @torch.inference_mode()
    def steps(self, inputs: Sequence[StepInputs]) -> list[StepResult]:
        """What :meth:`moa_runtime.backends.base.Backend.step` gives for each of the inputs, which have one query each
        at least; the same as alone but for rounding."""
        tokens = self._joined([each.tokens for each in inputs])
        angles = self._angles(self._joined([each.positions for each in inputs]))
        new = [len(each.tokens) for each in inputs]
        firsts = np.cumsum([0, *new[:-1]])
        queries = self._joined([first + each.queries for first, each in zip(firsts, inputs, strict=True)])
        asked = [len(each.queries) for each in inputs]

        x = functional.embedding(tokens, self._embedding).float()
        keys, values = (part.split(new) for part in self._own(x, angles))
        x, at_queries = x[queries], (angles[0][queries], angles[1][queries])
        own = [
            (torch.cat((self._moved(each.self_keys), k)), torch.cat((self._moved(each.self_values), v)))
            for each, k, v in zip(inputs, keys, values, strict=True)
        ]
        masks = [self._moved(each.self_mask[each.queries]) for each in inputs]
        x = self._self(x, at_queries, _Seen(asked, own, masks))
        memory = [(self._moved(each.memory_keys), self._moved(each.memory_values)) for each in inputs]
        x = self._cross(x, at_queries, _Seen(asked, memory, [None] * len(inputs)))
        ids, logprobs = self._candidates(self._norm(x))
        parts = zip(ids.split(asked), logprobs.split(asked), keys, values, strict=True)
        return [StepResult(*(part.cpu().numpy() for part in result)) for result in parts]

    def _own(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> KeysValues:
        """Keys and values of new tokens, ``[T, kv_heads, head_dim]`` each."""
        both = multiplied(self._keys_values, self._self.before_attention(x), self._dtype)
        keys, values = both.unflatten(-1, (2, *self.kv_shape)).unbind(1)
        return rotate(keys, *angles), values

    def _candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = multiplied(self._head, hidden, self._dtype) * self._sharpness
        top, index = logits.topk(self.top_k, dim=-1)
        return self._tokens[index], top - logits.logsumexp(dim=-1, keepdim=True)

    def _joined(self, parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._device)

    def _moved(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class _Seen:
    """Attention of several steps, each to caches of its own.

    Args:
        asked: queries of each step.
        seen: keys and values that each step's queries attend to, ``[S, kv_heads, head_dim]``.
        masks: boolean ``[queries of the step, S]``, or None for all.
    """

    def __init__(self, asked: list[int], seen: Sequence[KeysValues], masks: Sequence[Tensor | None]) -> None:
        self._asked, self._seen, self._masks = asked, seen, masks

    def __call__(self, q: Tensor) -> Tensor:
        """``[Q, heads, head_dim]`` -> ``[Q, heads * head_dim]``."""
        steps = zip(q.split(self._asked), self._seen, self._masks, strict=True)
        parts = [attended(own[None], keys[None], values[None], mask)[0] for own, (keys, values), mask in steps]
        return torch.cat(parts)
