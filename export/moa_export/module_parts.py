"""What a device half computes with, from a drafter in PyTorch."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from moa_drafter.drafter import Drafter
from moa_drafter.drafter_layers import DrafterLayer, PlacedLayer, last_norm, layer_names, layer_spec
from moa_export.device_parts import DeviceParts


class _ModuleTensors:
    """The tensors of a drafter in PyTorch. Implements :class:`moa_drafter.drafter_layers.TensorSource`."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def array(self, name: str) -> NDArray[Any]:
        module, _, own = name.rpartition(".")
        tensor: Tensor = getattr(self._drafter.get_submodule(module), own)
        return tensor.detach().numpy()


def parts_of(drafter: Drafter) -> DeviceParts:
    """Take the parts of a drafter that is bound to its target. They are those of
    :meth:`moa_export.device_parts.DeviceParts.of` to the bit, unless it was rotated or calibrated."""
    config, tensors = drafter.config, _ModuleTensors(drafter)
    spec = layer_spec(config.decoder, config.rope_theta)
    layers = [PlacedLayer(spec, DrafterLayer(tensors, name)) for name in layer_names(config)]
    embedding, head = (tensor.detach().numpy() for tensor in (drafter.embedding, drafter.head))
    return DeviceParts(
        config, layers, embedding, head, last_norm(config, tensors), drafter.draft_to_target.numpy(), tensors
    )
