"""How matrices lie in memory.

Speculative decoding multiplies few rows at once: a tree's level, a draft. For those the CPU libraries that PyTorch
calls take a matrix that lies input by input several times faster than one that lies output by output, as ``nn.Linear``
has it; for hundreds of rows it makes no difference.
"""

from __future__ import annotations

from torch import Tensor, nn


def input_major(matrix: Tensor) -> Tensor:
    """The same ``[out, in]`` values and shape, each input's numbers side by side; a copy unless it lies so already."""
    return matrix.T.contiguous().T


def lay_out_for_few_rows(module: nn.Module) -> None:
    """Let the matrices of all linear layers in ``module`` lie input by input; no value changes.

    For inference on a CPU. Sums are rounded otherwise than before, in the last bits.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = input_major(layer.weight.data)
