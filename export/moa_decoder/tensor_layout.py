"""Where the matrices and vectors of a decoder are among the tensors of its files."""

from __future__ import annotations

from collections.abc import Mapping

from moa_decoder.spec import DecoderSpec
from moa_decoder.weight_faults import Shape
from moa_decoder.weights import LayerMatrix, LayerVector, shapes_of


class TensorLayout:
    """Names and rows of tensors by role.

    Args:
        names: by role, see :func:`moa_decoder.families.tensor_names`; roles that share a tensor follow each other in
            it.
        tied: whether the head is the embedding.

    Attributes:
        shapes: of all tensors, by name.
        embedding, head, last_norm: names.
    """

    def __init__(self, spec: DecoderSpec, names: Mapping[str, str], *, tied: bool) -> None:
        self.embedding, self.last_norm = names["embedding"], names["last_norm"]
        self.head = self.embedding if tied else names["head"]
        table = (spec.vocab_size, spec.hidden_size)
        self.shapes: dict[str, Shape] = {
            self.embedding: table,
            self.head: table,
            self.last_norm: (spec.hidden_size,),
        }
        if spec.head_bias:
            self.shapes[names["head_bias"]] = (spec.vocab_size,)
        self._places: dict[tuple[int, str], tuple[str, slice]] = {}
        for number, layer in enumerate(spec.layers):
            for role, (rows, *inputs) in shapes_of(layer, spec.hidden_size).items():
                name = names[role].format(layer=number)
                start = self.shapes[name][0] if name in self.shapes else 0
                self.shapes[name] = (start + rows, *inputs)
                self._places[number, role] = name, slice(start, start + rows)

    def place(self, layer: int, role: LayerMatrix | LayerVector) -> tuple[str, slice]:
        """Return the tensor of a role and its rows there."""
        return self._places[layer, role]

    def parts(self) -> dict[str, list[tuple[int, LayerMatrix | LayerVector]]]:
        """Return the roles of each tensor of a layer, in the order of their rows."""
        found: dict[str, list[tuple[int, LayerMatrix | LayerVector]]] = {}
        for key, (name, _) in self._places.items():
            found.setdefault(name, []).append(key)  # type: ignore[arg-type]
        return found
