"""The device half of a drafter as one stateless module that computes :meth:`moa_runtime.backends.base.Backend.step`."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor, nn

from moa_drafter.config import DrafterConfig, TokenConfig
from moa_drafter.drafter import TokenDrafter
from moa_drafter.llama import run_layers
from moa_drafter.model import MoADrafter
from moa_runtime.backends.base import MEMORY_INPUTS, Backend, StepInputs, StepResult
from moa_runtime.bundle import TensorSpec


def signature(config: DrafterConfig | TokenConfig, top_k: int) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of the device half, see :func:`signature_of`."""
    kv_shape, top_k = (config.kv_heads, config.decoder.head_dim), min(top_k, config.draft_vocab_size)
    return signature_of(kv_shape, top_k, row_heads=config.kv_heads if isinstance(config, DrafterConfig) else 0)


def signature_of(
    kv_shape: tuple[int, int], top_k: int, *, row_heads: int = 0
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of a step, in order: the fields of :class:`~moa_runtime.backends.base.StepInputs` and
    :class:`~moa_runtime.backends.base.StepResult`. Sizes that vary keep their letters there.

    Args:
        row_heads: of a memory row; 0 where it looks at none.
    """
    sizes = {"H": kv_shape[0], "D": kv_shape[1], "K": top_k, "R": row_heads}
    inputs, outputs = (
        tuple(
            TensorSpec(each.name, each.metadata["dtype"], tuple(sizes.get(n, n) for n in each.metadata["shape"]))
            for each in fields(kind)
            if row_heads or each.name not in MEMORY_INPUTS
        )
        for kind in (StepInputs, StepResult)
    )
    return inputs, outputs


class DeviceModule(nn.Module):
    """One drafting step; caches are inputs and outputs, so the module has no state.

    The layers are the drafter's own modules. Only the embedding may differ.

    Args:
        drafter: bound to its target.
        embed: token ids ``[T]`` to float32 ``[T, hidden]``; the drafter's own in float32 when omitted.
        top_k: candidates per query, at most the draft vocabulary.
    """

    def __init__(self, drafter: MoADrafter, *, top_k: int, embed: nn.Module | None = None) -> None:
        super().__init__()
        self.drafter = drafter
        self.top_k = min(top_k, drafter.config.draft_vocab_size)
        self.embed = drafter.embed if embed is None else embed

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        queries: Tensor,
        self_keys: Tensor,
        self_values: Tensor,
        self_mask: Tensor,
        memory_keys: Tensor,
        memory_values: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :class:`~moa_runtime.backends.base.StepInputs`; the exporter takes the inputs' names from here.

        Returns:
            see :class:`~moa_runtime.backends.base.StepResult`.
        """
        # Tells the exporter how the sizes depend on each other; it cannot guess "cached + new".
        torch._check(self_mask.shape[0] == tokens.shape[0])
        torch._check(self_mask.shape[1] == self_keys.shape[0] + tokens.shape[0])
        heads = self.drafter.config.decoder.num_kv_heads
        # Without any row there is one of zeros, see MoaDrafter.
        given = memory_keys[0].ne(0).any()
        hidden, new = self.drafter.draft(
            self.embed(tokens),
            self.drafter.angles(positions),
            queries,
            self_mask,
            memory=by_layer(memory_keys, memory_values, heads),
            memory_mask=None,
            tail_mask=self_mask,
            cached=by_layer(self_keys, self_values, heads),
            with_rows=lambda rows, own: (in_place(rows[0], own[0], given), in_place(rows[1], own[1], given)),
        )
        keys, values = new[0] if len(new) == 1 else (torch.cat(part, dim=1) for part in zip(*new, strict=True))
        return *self.drafter.candidates(hidden, self.top_k), keys, values


def in_place(rows: Tensor, own: Tensor, given: Tensor) -> Tensor:
    """What tokens attend to in the target's own layers: of a token with a row the row, of the others their own.

    A row of zeros that stands for none at all is left out: a key of zeros would still take its share of attention.

    Args:
        rows: keys or values of positions ``0..M-1``, ``[M, kv_heads, head_dim]``.
        own: as the device computed them, of positions from 0 on, then of a tree's nodes: ``[S + T, kv_heads,
            head_dim]``, at least M.
        given: boolean ``[]``, false where the only row stands for none.

    Returns:
        ``[S + T, kv_heads, head_dim]``.
    """
    torch._check(rows.shape[0] <= own.shape[0])
    return torch.cat((torch.where(given, rows, own[:1]), own[rows.shape[0] :]))


def by_layer(keys: Tensor, values: Tensor, heads: int) -> list[tuple[Tensor, Tensor]]:
    """``[n, layers * heads, head_dim]`` -> for each layer ``[n, heads, head_dim]``."""
    if keys.shape[1] == heads:  # a split in one is a copy of the whole cache in some runtimes
        return [(keys, values)]
    return list(zip(keys.split(heads, dim=1), values.split(heads, dim=1), strict=True))


class TokenDeviceModule(nn.Module):
    """One step; caches are inputs and outputs. A cache entry holds the keys, or the values, of all layers, one layer's
    heads after the other's.

    Args:
        drafter: bound to its target.
        top_k: candidates per query, at most the draft vocabulary.
        embed: token ids ``[T]`` to float32 ``[T, hidden]``; the drafter's own in float32 when omitted.
    """

    def __init__(self, drafter: TokenDrafter, *, top_k: int, embed: nn.Module | None = None) -> None:
        super().__init__()
        self.drafter = drafter
        self.embed = drafter.embed if embed is None else embed
        self.top_k = min(top_k, drafter.config.draft_vocab_size)
        self.layers = list(drafter.device_layers)
        self.kv_shape = (drafter.config.kv_heads, drafter.config.decoder.head_dim)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        queries: Tensor,
        self_keys: Tensor,
        self_values: Tensor,
        self_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :class:`~moa_runtime.backends.base.StepInputs`; the exporter takes the inputs' names from here.

        Returns:
            see :class:`~moa_runtime.backends.base.StepResult`.
        """
        # Tells the exporter how the sizes depend on each other; it cannot guess "cached + new".
        torch._check(self_mask.shape[0] == tokens.shape[0])
        torch._check(self_mask.shape[1] == self_keys.shape[0] + tokens.shape[0])
        heads = self.drafter.config.decoder.num_kv_heads
        past = list(zip(self_keys.split(heads, dim=1), self_values.split(heads, dim=1), strict=True))
        x, angles = self.embed(tokens), self.drafter.angles(positions)
        hidden, new = run_layers(self.layers, x, angles, self_mask, queries, past)
        keys, values = (torch.cat(part, dim=1) for part in zip(*new, strict=True))
        return *self.drafter.candidates(self.drafter.norm(hidden), self.top_k), keys, values


class TorchBackend(Backend):
    """A Mixture of Attentions drafter, in float32.

    Args:
        drafter: bound to its target.
        top_k: candidates per query.
    """

    def __init__(self, drafter: MoADrafter, *, top_k: int) -> None:
        self._module = DeviceModule(drafter, top_k=top_k).eval()
        self._kv_shape = (drafter.config.kv_heads, drafter.config.decoder.head_dim)

    @property
    def top_k(self) -> int:
        return self._module.top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return self._kv_shape

    @property
    def max_positions(self) -> None:
        return None

    @torch.no_grad()
    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        tensors = {name: torch.from_numpy(array) for name, array in inputs.by_name().items()}
        return StepResult(*(out.numpy() for out in self._module(**tensors)))


class TokenTorchBackend(Backend):
    """A drafter that reads tokens alone, in float32. It ignores memory rows.

    Args:
        drafter: bound to its target.
        top_k: candidates per query.
    """

    needs_a_row = False

    def __init__(self, drafter: TokenDrafter, *, top_k: int) -> None:
        self._module = TokenDeviceModule(drafter, top_k=top_k)

    @property
    def top_k(self) -> int:
        return self._module.top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return self._module.kv_shape

    @property
    def max_positions(self) -> None:
        return None

    @torch.inference_mode()
    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        given = {name: torch.from_numpy(array) for name, array in inputs.of_tokens().items()}
        return StepResult(*(out.numpy() for out in self._module(**given)))
