"""The target's logits from its last hidden states, as its own class computes them."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

#: The largest product of the head that :attr:`TargetLogits.scale` is measured with: soft caps do not bend it.
_SMALL = 1e-2


class TargetLogits:
    """The forward of a transformers model without its layers: its head, and whatever its family does to the products of
    that, such as scaling (Granite, Cohere) or a soft cap (Gemma).

    Args:
        model: a causal language model whose layers, with the norm behind them, are its ``model``.
    """

    def __init__(self, model: Any) -> None:
        self._model = _without_layers(model)
        self._head: nn.Linear = model.get_output_embeddings()

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[n, hidden]``, normed, -> logits ``[n, vocab_size]``."""
        return _forward(self._model, hidden)

    def of_tokens(self, hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        """The logits of some tokens alone.

        Args:
            hidden: normed, ``[n, hidden]``.
            head: their rows of :attr:`moa_drafter.target.Target.head`, in any type and on any device.
            tokens: ids, ``[len(head)]``.

        Returns:
            ``[n, len(head)]``.
        """
        rows = nn.Linear(head.shape[1], len(head), bias=self._head.bias is not None, device="meta")
        rows.weight = nn.Parameter(head, requires_grad=False)
        if self._head.bias is not None:
            rows.bias = nn.Parameter(self._head.bias.detach()[tokens.to(self._head.bias.device)].to(head), False)
        model = _shallow_copy(self._model)
        model.set_output_embeddings(rows)
        return _forward(model, hidden / self.scale)  # these rows are multiplied already

    @cached_property
    @torch.no_grad()
    def scale(self) -> float:
        """How many times the products of the head the logits are, as long as no soft cap bends them."""
        weight = self._head.weight
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, weight.shape[1], generator=generator).to(weight)
        hidden *= _SMALL / (hidden @ weight.T).abs().max()
        products = (hidden @ weight.T).float()
        logits = (self(hidden) - self(-hidden)).float() / 2  # without a bias
        scale = float((logits * products).sum() / products.square().sum())
        return 1.0 if abs(scale - 1) < 1e-3 else float(f"{scale:.4g}")


class _Given(nn.Module):
    """In the place of the layers: what they would compute is given as embeddings."""

    def forward(self, *, inputs_embeds: Tensor, **others: object) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def _without_layers(model: Any) -> Any:
    own = _shallow_copy(model)
    own.model = _Given()
    return own


def _shallow_copy(model: Any) -> Any:
    """Another module with the same parts, of which some can be replaced."""
    own = copy.copy(model)
    own._modules = dict(model._modules)
    return own


def _forward(model: Any, hidden: Tensor) -> Tensor:
    logits: Tensor = model(inputs_embeds=hidden[None]).logits[0]
    return logits
