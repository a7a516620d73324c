"""The device half of a drafter as one stateless module that computes :meth:`moa_runtime.backends.base.Backend.step`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moa_drafter.drafter import TokenDrafter
from moa_drafter.llama import run_layers
from moa_drafter.model import MoADrafter
from moa_runtime.backends.base import Backend, StepInputs, StepResult


class StepModule(nn.Module):
    """Base of the drafting steps. Caches are inputs and outputs, so a module has no state; a cache entry holds the
    keys, or the values, of all layers, one layer's heads after the other's.

    Args:
        drafter: bound to its target; its own modules are used.
        top_k: candidates per query, at most the draft vocabulary.
        embed: token ids ``[T]`` to float32 ``[T, hidden]``; the drafter's own in float32 when omitted.
    """

    def __init__(self, drafter: MoADrafter | TokenDrafter, *, top_k: int, embed: nn.Module | None = None) -> None:
        super().__init__()
        self.drafter = drafter
        self.embed = drafter.embed if embed is None else embed
        self.top_k = min(top_k, drafter.config.draft_vocab_size)
        self.kv_shape = (drafter.config.kv_heads, drafter.config.decoder.head_dim)

    def _check_sizes(self, tokens: Tensor, self_keys: Tensor, self_mask: Tensor) -> None:
        """Tell the exporter how the sizes depend on each other; it cannot guess "cached + new"."""
        torch._check(self_mask.shape[0] == tokens.shape[0])
        torch._check(self_mask.shape[1] == self_keys.shape[0] + tokens.shape[0])


class DeviceModule(StepModule):
    """One drafting step of a Mixture of Attentions drafter."""

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
        """Compute a :class:`~moa_runtime.backends.base.StepResult` from the arrays of a
        :class:`~moa_runtime.backends.base.StepInputs`; the exporter takes the inputs' names from here."""
        self._check_sizes(tokens, self_keys, self_mask)
        heads = self.drafter.config.decoder.num_kv_heads
        # MoaDrafter passes a placeholder row of zeros if there is none.
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
    """Return the keys or values that the target's own layers attend to: the rows, then the device's own.

    A placeholder row of zeros is left out, because a key of zeros would still take its share of attention.

    Args:
        rows: keys or values of positions ``0..M-1``, ``[M, kv_heads, head_dim]``.
        own: the device's, from position 0 on, then of a tree's nodes: ``[S + T, kv_heads, head_dim]``, at least M.
        given: boolean ``[]``, false if the only row is the placeholder.
    """
    torch._check(rows.shape[0] <= own.shape[0])
    return torch.cat((torch.where(given, rows, own[:1]), own[rows.shape[0] :]))


def by_layer(keys: Tensor, values: Tensor, heads: int) -> list[tuple[Tensor, Tensor]]:
    """Split ``[n, layers * heads, head_dim]`` into ``[n, heads, head_dim]`` for each layer."""
    if keys.shape[1] == heads:  # a split in one is a copy of the whole cache in some runtimes
        return [(keys, values)]
    return list(zip(keys.split(heads, dim=1), values.split(heads, dim=1), strict=True))


class TokenDeviceModule(StepModule):
    """One drafting step of a drafter that reads tokens alone."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        queries: Tensor,
        self_keys: Tensor,
        self_values: Tensor,
        self_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute a :class:`~moa_runtime.backends.base.StepResult` from the arrays of a
        :class:`~moa_runtime.backends.base.StepInputs`; the exporter takes the inputs' names from here."""
        self._check_sizes(tokens, self_keys, self_mask)
        heads = self.drafter.config.decoder.num_kv_heads
        past = list(zip(self_keys.split(heads, dim=1), self_values.split(heads, dim=1), strict=True))
        x, angles = self.embed(tokens), self.drafter.angles(positions)
        hidden, new = run_layers(self.drafter.device_layers, x, angles, self_mask, queries, past)
        keys, values = (torch.cat(part, dim=1) for part in zip(*new, strict=True))
        return *self.drafter.candidates(self.drafter.norm(hidden), self.top_k), keys, values


class TorchBackend(Backend):
    """The runtime's backend of a bound drafter in PyTorch and float32, with which exports are compared."""

    def __init__(self, drafter: MoADrafter | TokenDrafter, *, top_k: int) -> None:
        kind = TokenDeviceModule if isinstance(drafter, TokenDrafter) else DeviceModule
        self._module = kind(drafter, top_k=top_k).eval()

    @property
    def needs_a_row(self) -> bool:
        return isinstance(self._module, DeviceModule)

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
        arrays = inputs.by_name() if self.needs_a_row else inputs.of_tokens()
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return StepResult(*(out.numpy() for out in self._module(**tensors)))
