"""Export target ``executorch``: the device half as ``.pte`` programs, one for each delegate asked for.

What a program holds is described in :mod:`moa_export.targets.executorch_program`. Which operators its delegate took,
and which were left to the CPU, stands in the details of its artifact.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import ClassVar

from moa_drafter.config import DrafterConfig
from moa_drafter.model import MoADrafter
from moa_export.errors import ExportError
from moa_export.quantized_embedding import QuantisedEmbedding
from moa_export.recipe import Recipe, Weights
from moa_export.targets.base import (
    Artifact,
    NotRun,
    TargetOptions,
    plain_specs,
    refuse_copied_layers,
    refuse_without_rows,
)
from moa_export.targets.executorch_delegates import DELEGATES, Delegate
from moa_export.targets.executorch_lowering import capture, finish, lower, operators
from moa_export.targets.executorch_program import (
    MOST_QUERIES,
    MOST_TOKENS,
    Draft,
    Embedding,
    Extend,
    FloatEmbedding,
    signatures,
)
from moa_export.targets.executorch_weights import round_weights
from moa_runtime.backends.base import Backend
from moa_runtime.backends.executorch import ExecutorchBackend, registered_delegates


class ExecutorchTarget:
    """See :class:`moa_export.targets.base.ExportTarget`."""

    extra: ClassVar[str] = "executorch"

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None:
        if unknown := [name for name in options.delegates if name not in DELEGATES]:
            raise ExportError(f"unknown --backend {unknown[0]!r}: choose one of {', '.join(DELEGATES)}")
        self._recipe = recipe
        self._delegates = [DELEGATES[name] for name in options.delegates]

    def check(self, config: DrafterConfig) -> None:
        """See :meth:`moa_export.targets.base.ExportTarget.check`."""
        refuse_without_rows("executorch", config)
        refuse_copied_layers("executorch", config.target_layers)
        for delegate in self._delegates:
            delegate.check(self._recipe)
        self._recipe.check_divides(config)

    def export(self, drafter: MoADrafter, folder: Path) -> list[Artifact]:
        """Write a program for each delegate."""
        return [self._export(delegate, drafter, folder) for delegate in self._delegates]

    def runner(self, folder: Path, artifact: Artifact) -> Backend | NotRun:
        """ExecuTorch's runtime, where the one installed has the delegate."""
        delegate = DELEGATES[artifact.details["delegate"]].backend
        if delegate not in registered_delegates():
            return NotRun(f"the installed executorch has no {delegate}: run the program on a device that has one")
        return ExecutorchBackend(folder / artifact.file)

    def _export(self, delegate: Delegate, drafter: MoADrafter, folder: Path) -> Artifact:
        recipe = delegate.applied(self._recipe)
        partitioner = delegate.partitioner()
        drafter = copy.deepcopy(drafter)  # rounding changes it
        embed = _embedding(drafter, recipe.embedding)
        methods = {"extend": Extend(drafter, embed), "draft": Draft(drafter, embed, top_k=recipe.top_k)}
        products = [
            product
            for method in methods.values()
            for product in round_weights(method, recipe, integer_products=delegate.integer_products)
        ]
        described = signatures(drafter.config, recipe.top_k)
        positions = drafter.config.max_position_embeddings
        most = {"T": MOST_TOKENS, "Q": MOST_QUERIES, "S": positions, "M": positions}
        lowered = lower(
            {name: capture(method, described[name].inputs, most) for name, method in methods.items()}, partitioner
        )
        with (folder / delegate.file).open("wb") as file:
            finish(lowered).write_to_file(file)
        details = {
            "delegate": delegate.name,
            "applied": recipe.describe(),
            "most": most,
            "methods": {
                name: {
                    "inputs": plain_specs(described[name].inputs),
                    "outputs": plain_specs(described[name].outputs),
                    **taken,
                }
                for name, taken in operators(lowered).items()
            },
            "products": products,
        }
        draft = described["draft"]
        return Artifact(delegate.artifact, delegate.file, draft.inputs, draft.outputs, details=details)


def _embedding(drafter: MoADrafter, weights: Weights) -> Embedding | FloatEmbedding:
    if weights.is_integer:
        return Embedding(QuantisedEmbedding(drafter.embedding, weights))
    return FloatEmbedding(drafter.embedding)
