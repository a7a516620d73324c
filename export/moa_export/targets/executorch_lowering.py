"""From PyTorch modules to a ``.pte`` file: capture, delegation, and a count of who took what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

from moa_runtime.bundle import TensorSpec

# Taking an output out of a tuple, and setting memory aside.
_NO_WORK = ("getitem", "alloc")
# Sizes to trace with. All differ and none is 0 or 1, which the tracer would take for constants.
_TRACED_SIZES = {"T": 3, "Q": 2, "S": 5, "M": 7}


def capture(module: nn.Module, inputs: Sequence[TensorSpec], most: Mapping[str, int]) -> ExportedProgram:
    """Trace a module.

    Args:
        inputs: of its ``forward``, in order; sizes that vary are named.
        most: upper bounds of the sizes that vary, by name; what is planned in memory holds as much.
    """
    sizes = {name: Dim(name, min=1, max=bound) for name, bound in most.items()}
    dynamic = {spec.name: {i: sizes[n] for i, n in enumerate(spec.shape) if isinstance(n, str)} for spec in inputs}
    with torch.no_grad():
        return torch.export.export(
            module.eval(), tuple(_example(spec) for spec in inputs), dynamic_shapes=dynamic, strict=False
        )


def lower(methods: Mapping[str, ExportedProgram], partitioner: Partitioner) -> EdgeProgramManager:
    """Hand to a delegate what it takes of each method."""
    return to_edge_transform_and_lower(dict(methods), transform_passes=[_InferVaryingSize()], partitioner=[partitioner])


def finish(lowered: EdgeProgramManager) -> ExecutorchProgramManager:
    """A program whose inputs and outputs lie in the caller's memory: a cache is not copied."""
    planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    return lowered.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))


def operators(lowered: EdgeProgramManager) -> dict[str, dict[str, Any]]:
    """For each method, how many operators of which kind the delegate took and how many it left to the CPU."""
    return {name: _operators(lowered.exported_program(name).graph_module) for name in sorted(lowered.methods)}


def _operators(graph: GraphModule) -> dict[str, Any]:
    info = get_delegation_info(graph)
    kinds = {name: count for name, count in info.delegation_by_operator.items() if name not in _NO_WORK}
    return {
        "subgraphs": info.num_delegated_subgraphs,
        "delegated": {name: count.delegated for name, count in kinds.items() if count.delegated},
        "fallen_back": {name: count.non_delegated for name, count in kinds.items() if count.non_delegated},
    }


def _example(spec: TensorSpec) -> torch.Tensor:
    sizes = [_TRACED_SIZES[n] if isinstance(n, str) else n for n in spec.shape]
    if spec.dtype == "int64":
        return torch.arange(sizes[0])
    return torch.ones(sizes, dtype=getattr(torch, spec.dtype))


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
