"""Export target ``executorch``: the device half as ``.pte`` programs, one for each delegate asked for.

What a program holds is described in :mod:`moa_export.targets.executorch_program`, and the offline writer, always for
XNNPACK, in :mod:`moa_export.targets.executorch_writer`. The details of its manifest entry
list the operators that the delegate took and those left to the CPU.

What a delegate makes of a recipe's weights:

======  ===============================  ====================  ===========================
bits    XNNPACK                          Vulkan                Core ML
======  ===============================  ====================  ===========================
32      float32                          float32               float16, as it computes in
8       one scale a row                  not at all            one scale a group
4       one scale a group                one scale a group     one scale a group
======  ===============================  ====================  ===========================

If weights are integers, XNNPACK and Vulkan round activations on the fly, to int8 with one scale a token.
Sources: ``executorch.backends.xnnpack.operators.node_visitor`` and ``executorch.backends.vulkan.patterns`` (1.5).
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from executorch.devtools.backend_debug import get_delegation_info
from executorch.exir import (
    EdgeProgramManager,
    ExecutorchBackendConfig,
    ExecutorchProgramManager,
    to_edge_transform_and_lower,
)
from executorch.exir.backend.partitioner import Partitioner
from executorch.exir.pass_base import ExportPass, PassResult
from executorch.exir.passes import MemoryPlanningPass
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.config import DrafterConfig
from moa_drafter.model import MoADrafter
from moa_export.errors import ExportError
from moa_export.graph_files import TOP_K
from moa_export.quantize import QuantisedEmbedding, round_symmetric
from moa_export.recipe import Recipe, Weights
from moa_export.targets.base import (
    NotRun,
    Specs,
    TargetOptions,
    check_drafter,
    entry_of,
    plain_signature,
    traced_inputs,
)
from moa_export.targets.executorch_program import (
    MOST_QUERIES,
    MOST_TOKENS,
    Draft,
    Embedding,
    Extend,
    FloatEmbedding,
    integer_weight,
    signatures,
)
from moa_export.targets.executorch_writer import MOST_CACHED, MOST_WRITER_TOKENS, Writer
from moa_runtime.backends.base import Backend
from moa_runtime.backends.executorch import ExecutorchBackend, registered_delegates
from moa_runtime.backends.load import writer_backend
from moa_runtime.manifest import TargetEntry
from moa_runtime.optional_deps import install_command

WRITER_FILE = "writer.pte"
# Taking an output out of a tuple, and setting memory aside.
_NO_WORK = ("getitem", "alloc")
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
        """Raise an ExportError if the recipe cannot be carried out for this delegate."""
        if recipe.embedding.bits == 16:
            raise ExportError("executorch stores the embedding in 4, 8 or 32 bits, not 16", code="unsupported_bits")
        recipe.check_symmetric("executorch", "linear", "head")
        name = f"ExecuTorch's {self.name} delegate"
        for weights in (recipe.linear, recipe.head):
            if weights.bits not in self.bits:
                known = ", ".join(map(str, self.bits))
                reason = f"{name} takes weights of {known} bits, not {weights.bits}"
                raise ExportError(reason, code="unsupported_bits")
            if not self.integer_products or not weights.is_integer:
                continue
            if recipe.activation_bits != 8:
                reason = f"{name} multiplies integer weights by activations of 8 bits only: set activation_bits to 8"
                raise ExportError(reason, code="unsupported_activations")
            if weights.bits == 4 and weights.group_size % 32:
                raise ExportError(
                    f"{name} takes groups of a multiple of 32 4-bit weights, not {weights.group_size}: choose one with "
                    "--group-size",
                    code="unsupported_group",
                )

    def applied(self, recipe: Recipe) -> Recipe:
        """Return the recipe as it is carried out for this delegate."""
        if not self.integer_products:
            return replace(recipe, activation_bits=16)
        # XNNPACK has no groups of 8-bit weights.
        linear, head = (replace(one, group_size=0) if one.bits == 8 else one for one in (recipe.linear, recipe.head))
        return replace(recipe, linear=linear, head=head)


def _xnnpack() -> Partitioner:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return XnnpackPartitioner()


def _vulkan() -> Partitioner:
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    return VulkanPartitioner({"require_dynamic_shapes": True})


def _coreml() -> Partitioner:
    if importlib.util.find_spec("coremltools") is None:
        reason = f"ExecuTorch's coreml delegate needs coremltools: {install_command('coreml')}"
        raise ExportError(reason, code="extra_missing")
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


_DELEGATES = (
    Delegate("xnnpack", "XnnpackBackend", "executorch", "device_half.pte", (4, 8, 32), True, _xnnpack),
    Delegate("coreml", "CoreMLBackend", "executorch-coreml", "device_half.coreml.pte", (4, 8, 32), False, _coreml),
    Delegate("vulkan", "VulkanBackend", "executorch-vulkan", "device_half.vulkan.pte", (4, 32), True, _vulkan),
)
DELEGATES = {delegate.name: delegate for delegate in _DELEGATES}


class ExecutorchTarget:
    """See :class:`moa_export.targets.base.ExportTarget` and :class:`moa_export.targets.base.WriterTarget`."""

    rotates = True
    writer_answers = None

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None:
        if unknown := [name for name in options.delegates if name not in DELEGATES]:
            reason = f"unknown --backend {unknown[0]!r}: choose one of {', '.join(DELEGATES)}"
            raise ExportError(reason, code="unknown_backend")
        self._recipe = recipe
        self._delegates = [DELEGATES[name] for name in options.delegates]

    def check(self, config: DrafterConfig) -> None:
        """See :meth:`moa_export.targets.base.ExportTarget.check`."""
        check_drafter("executorch", config, layers=False)
        for delegate in self._delegates:
            delegate.check(self._recipe)
        self._recipe.check_divides(config)

    def export(self, drafter: MoADrafter, folder: Path) -> dict[str, TargetEntry]:
        """Write a program for each delegate."""
        return {delegate.artifact: self._export(delegate, drafter, folder) for delegate in self._delegates}

    def runner(self, folder: Path, entry: TargetEntry) -> Backend | NotRun:
        """Load a program into the installed ExecuTorch, if that has its delegate."""
        delegate = DELEGATES[entry.details["delegate"]].backend
        if delegate not in registered_delegates():
            return NotRun(f"the installed executorch has no {delegate}: run the program on a device that has one")
        return ExecutorchBackend(folder / entry.file)

    def export_writer(self, weights: RoundedWeights, folder: Path) -> TargetEntry:
        """Write a program for XNNPACK."""
        writer = Writer(weights, top_k=TOP_K)
        inputs, outputs = writer.signature
        most = {"T": MOST_WRITER_TOKENS, "Q": MOST_QUERIES, "S": min(MOST_CACHED, weights.spec.max_context)}
        lowered = lower({"step": capture(writer, inputs, most, as_one=True)}, _xnnpack())
        path = folder / WRITER_FILE
        _write(lowered, path)
        details = {"delegate": "xnnpack", "most": most, "window": writer.window, "max_context": most["S"]}
        return entry_of(path, inputs, outputs, details=details)

    def writer_runner(self, folder: Path, entry: TargetEntry) -> Backend:
        """Load a program into the installed ExecuTorch."""
        return writer_backend(folder, entry)

    def _export(self, delegate: Delegate, drafter: MoADrafter, folder: Path) -> TargetEntry:
        recipe, partitioner = delegate.applied(self._recipe), delegate.partitioner()
        drafter = copy.deepcopy(drafter)  # rounding changes it
        table = drafter.embedding
        integers = recipe.embedding.is_integer
        embed = Embedding(QuantisedEmbedding(table, recipe.embedding)) if integers else FloatEmbedding(table)
        methods = {"extend": Extend(drafter, embed), "draft": Draft(drafter, embed, top_k=recipe.top_k)}
        products = [
            product
            for method in methods.values()
            for product in round_weights(method, recipe, integer_products=delegate.integer_products)
        ]
        described = signatures(drafter.config, recipe.top_k)
        positions = drafter.config.max_position_embeddings
        most = {"T": MOST_TOKENS, "Q": MOST_QUERIES, "S": positions, "M": positions}
        captured = {name: capture(method, described[name][0], most) for name, method in methods.items()}
        lowered = lower(captured, partitioner)
        _write(lowered, folder / delegate.file)
        details = {
            "delegate": delegate.name,
            "applied": recipe.describe(),
            "most": most,
            "methods": {
                name: {**plain_signature(*described[name]), **_operators(lowered.exported_program(name).graph_module)}
                for name in sorted(methods)
            },
            "products": products,
        }
        return entry_of(folder / delegate.file, *described["draft"], details=details)


def capture(module: nn.Module, inputs: Specs, most: Mapping[str, int], *, as_one: bool = False) -> ExportedProgram:
    """Trace a module.

    Args:
        inputs: of its ``forward``, in order; sizes that vary are named.
        most: upper bounds of the sizes that vary, by name; what is planned in memory holds as much.
        as_one: whether ``forward`` takes them as ``*inputs``.
    """
    sizes = {name: Dim(name, min=1, max=bound) for name, bound in most.items()}
    each = tuple({i: sizes[n] for i, n in enumerate(spec.shape) if isinstance(n, str)} for spec in inputs)
    dynamic = (each,) if as_one else each
    with torch.no_grad():
        return torch.export.export(module.eval(), traced_inputs(inputs), dynamic_shapes=dynamic, strict=False)


def lower(methods: Mapping[str, ExportedProgram], partitioner: Partitioner) -> EdgeProgramManager:
    """Lower each method, handing a delegate the operators that it takes."""
    return to_edge_transform_and_lower(dict(methods), transform_passes=[_InferVaryingSize()], partitioner=[partitioner])


def finish(lowered: EdgeProgramManager) -> ExecutorchProgramManager:
    """Make a program whose inputs and outputs lie in the caller's memory, so that a cache is not copied."""
    planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    return lowered.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))


def _write(lowered: EdgeProgramManager, path: Path) -> None:
    with path.open("wb") as file:
        finish(lowered).write_to_file(file)


def _operators(graph: GraphModule) -> dict[str, Any]:
    """Count by kind the operators that the delegate took and those it left to the CPU."""
    info = get_delegation_info(graph)
    kinds = {name: count for name, count in info.delegation_by_operator.items() if name not in _NO_WORK}
    return {
        "subgraphs": info.num_delegated_subgraphs,
        "delegated": {name: count.delegated for name, count in kinds.items() if count.delegated},
        "fallen_back": {name: count.non_delegated for name, count in kinds.items() if count.non_delegated},
    }


class _InferVaryingSize(ExportPass):
    """Write the one size that varies in a reshape as -1: XNNPACK's partitioner refuses symbols there."""

    def call(self, graph_module: GraphModule) -> PassResult:
        changed = False
        for node in graph_module.graph.nodes:
            if node.op != "call_function" or "view_copy" not in str(node.target):
                continue
            source, sizes = node.args
            if sum(not isinstance(size, int) for size in sizes) == 1:
                node.args = (source, [size if isinstance(size, int) else -1 for size in sizes])
                changed = True
        graph_module.graph.eliminate_dead_code()
        graph_module.recompile()
        return PassResult(graph_module, changed)


def round_weights(method: nn.Module, recipe: Recipe, *, integer_products: bool) -> list[dict[str, Any]]:
    """Quantise the linear layers of a method in place; the one it calls ``head`` is the draft head.

    Args:
        integer_products: whether activations are rounded to 8 bits too, so that products run in integers.

    Returns:
        every product with stored weights: its name, inputs ``k``, outputs ``n``, ``bits`` and ``group_size``.
    """
    products = []
    for name, layer in method.named_modules():
        if isinstance(layer, nn.Linear):
            weights = recipe.head if name == "head" else recipe.linear
            round_layer(layer, weights, integer_products=integer_products)
            sizes = {"k": layer.in_features, "n": layer.out_features}
            products.append({"name": name, **sizes, "bits": weights.bits, "group_size": weights.group_size})
    return products


def round_layer(layer: nn.Linear, weights: Weights, *, integer_products: bool) -> None:
    """Quantise one linear layer in place; float weights stay as they are."""
    if not weights.is_integer:
        return
    codes, scales = round_symmetric(layer.weight, weights.bits, weights.group_size)
    rounded = integer_weight(codes, scales, weights.bits, integer_products=integer_products)
    layer.weight = nn.Parameter(rounded, requires_grad=False)
