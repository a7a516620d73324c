"""The delegates that a program can be lowered to, and what each makes of a recipe.

======  ===============================  ====================  ===========================
bits    XNNPACK                          Vulkan                Core ML
======  ===============================  ====================  ===========================
32      float32                          float32               float16, as it computes in
8       one scale a row                  not at all            one scale a group
4       one scale a group                one scale a group     one scale a group
======  ===============================  ====================  ===========================

Where weights are integers, XNNPACK and Vulkan round activations on the fly, to int8 with one scale a token.
Sources: ``executorch.backends.xnnpack.operators.node_visitor`` and ``executorch.backends.vulkan.patterns`` (1.5).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

from executorch.exir.backend.partitioner import Partitioner

from moa_export.errors import ExportError
from moa_export.recipe import Recipe, Weights


@dataclass(frozen=True)
class Delegate:
    """One of ExecuTorch's backends.

    Attributes:
        name: as ``--backend`` takes it.
        backend: its name in ExecuTorch's registry.
        artifact, file: name in the manifest and file of a program for it.
        bits: widths of weights that it multiplies by.
        integer_products: whether it rounds activations too where weights are integers.
        partitioner: makes what chooses its part of a graph. Raises ExportError: a package that it needs is missing.
    """

    name: str
    backend: str
    artifact: str
    file: str
    bits: tuple[int, ...]
    integer_products: bool
    partitioner: Callable[[], Partitioner]

    def check(self, recipe: Recipe) -> None:
        """Raises ExportError: a recipe that cannot be carried out for this delegate."""
        if recipe.embedding.bits == 16:
            raise ExportError("executorch stores the embedding in 4, 8 or 32 bits, not 16")
        for part, weights in (("linear layers", recipe.linear), ("head", recipe.head)):
            if weights.bits not in self.bits:
                known = ", ".join(map(str, self.bits))
                raise ExportError(
                    f"ExecuTorch's {self.name} delegate takes weights of {known} bits, not {weights.bits}"
                )
            if not weights.is_integer:
                continue
            if not weights.symmetric:
                raise ExportError(f"executorch stores the {part} without an offset: set symmetric for them")
            if self.integer_products and recipe.activation_bits != 8:
                raise ExportError(
                    f"ExecuTorch's {self.name} delegate multiplies by integer weights only with activations of 8 bits: "
                    "set activation_bits to 8"
                )
            if self.integer_products and weights.bits == 4 and weights.group_size % 32:
                raise ExportError(
                    f"ExecuTorch's {self.name} delegate takes groups of a multiple of 32 4-bit weights, not "
                    f"{weights.group_size}: choose one with --group-size"
                )

    def applied(self, recipe: Recipe) -> Recipe:
        """A recipe as it is carried out for this delegate."""
        if not self.integer_products:
            return replace(recipe, activation_bits=16)
        return replace(recipe, linear=_without_groups_of_8(recipe.linear), head=_without_groups_of_8(recipe.head))


def _without_groups_of_8(weights: Weights) -> Weights:
    """XNNPACK has no groups of 8-bit weights."""
    return replace(weights, group_size=0) if weights.bits == 8 else weights


def _xnnpack() -> Partitioner:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return XnnpackPartitioner()


def _vulkan() -> Partitioner:
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    return VulkanPartitioner({"require_dynamic_shapes": True})


# Left to the CPU. In float16, positions from 2048 on cannot be told apart, so angles are not computed there. Rows of
# the embedding are gathered as integers, which no Core ML model can return; gathered from a table that Core ML widens,
# they were wrong on iOS 26 (github.com/pytorch/executorch/pull/15936).
_NOT_FOR_COREML = (
    "aten.index.tensor",
    "dim_order_ops._to_dim_order_copy.default",
    "aten.div.tensor",
    "aten.cos.default",
    "aten.sin.default",
)


def _coreml() -> Partitioner:
    if importlib.util.find_spec("coremltools") is None:
        raise ExportError('ExecuTorch\'s coreml delegate needs coremltools: pip install "moa-edge[coreml]"')
    import coremltools as ct
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    # Groups of weights need iOS 18 or macOS 15.
    specs = CoreMLBackend.generate_compile_specs(
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT16,
        model_type=CoreMLBackend.MODEL_TYPE.MODEL,
    )
    return CoreMLPartitioner(compile_specs=specs, skip_ops_for_coreml_delegation=list(_NOT_FOR_COREML))


_ALL = (
    Delegate("xnnpack", "XnnpackBackend", "executorch", "device_half.pte", (4, 8, 32), True, _xnnpack),
    Delegate("coreml", "CoreMLBackend", "executorch-coreml", "device_half.coreml.pte", (4, 8, 32), False, _coreml),
    Delegate("vulkan", "VulkanBackend", "executorch-vulkan", "device_half.vulkan.pte", (4, 32), True, _vulkan),
)
DELEGATES = {delegate.name: delegate for delegate in _ALL}
