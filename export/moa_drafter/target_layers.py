"""The target's decoder layers as our own: to start from, or frozen inside a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from moa_drafter.compatibility import FitError
from moa_drafter.config import LayerDims
from moa_drafter.llama import DecoderLayer, frozen


@torch.no_grad()
def copy_layer(ours: DecoderLayer, theirs: nn.Module) -> None:
    """Take over the weights of one Llama decoder layer of transformers.

    Raises:
        FitError: the target's layer lacks a weight, or has another shape.
    """
    state = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        found, wanted = tuple(state[name].shape) if name in state else None, tuple(tensor.shape)
        if found != wanted:
            raise FitError(f"a layer of the target has {name} of shape {found}, this drafter was made for {wanted}")
        tensor.copy_(state[name])


def copy_exactly(ours: Sequence[DecoderLayer], theirs: Sequence[nn.Module]) -> None:
    """Take over the weights of layers that shall compute what the target's do.

    Raises:
        FitError: see :func:`copy_layer`; also a weight that ours have no place for, such as a bias.
    """
    for copy, layer in zip(ours, theirs, strict=True):
        copy_layer(copy, layer)
        if unknown := sorted(layer.state_dict().keys() - copy.state_dict().keys()):
            raise FitError(f"a layer of the target has {unknown[0]}, which this drafter's copy could not compute with")


def frozen_layers(layers: Sequence[nn.Module], dims: LayerDims, eps: float) -> list[nn.Module]:
    """Copies of some of the target's layers, see :func:`moa_drafter.llama.frozen`.

    Raises:
        FitError: see :func:`copy_exactly`.
    """
    copies = [DecoderLayer(dims, eps) for _ in layers]
    copy_exactly(copies, layers)
    return [frozen(layer) for layer in copies]
