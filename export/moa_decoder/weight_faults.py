"""Differences between the tensors of a file and a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Code of the errors for :class:`WeightFaults`.
WEIGHTS_DIFFER = "weights_differ"
_NAMED = 3
Shape = tuple[int, ...]


@dataclass(frozen=True)
class WeightFaults:
    """Differences between the tensors of a file and a model; false if there are none.

    Attributes:
        missing, superfluous: names in the model alone, and in the file alone.
        misshapen: shape in the file and shape in the model, by name.
    """

    missing: frozenset[str] = frozenset()
    superfluous: frozenset[str] = frozenset()
    misshapen: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)

    @classmethod
    def between(cls, held: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> WeightFaults:
        """Compare the shapes of a file's tensors with a model's, by name."""
        shapes = {name: (held[name], wanted[name]) for name in held.keys() & wanted.keys()}
        return cls(
            frozenset(wanted.keys() - held.keys()),
            frozenset(held.keys() - wanted.keys()),
            {name: pair for name, pair in shapes.items() if pair[0] != pair[1]},
        )

    @classmethod
    def reported(cls, loading_info: Mapping[str, Any]) -> WeightFaults:
        """Read transformers' ``output_loading_info``, without tied tensors and those that a model's class ignores."""
        return cls(
            frozenset(loading_info["missing_keys"]),
            frozenset(loading_info["unexpected_keys"]),
            {name: (tuple(held), tuple(wanted)) for name, held, wanted in loading_info["mismatched_keys"]},
        )

    def __bool__(self) -> bool:
        return bool(self.missing or self.superfluous or self.misshapen)

    def __str__(self) -> str:
        """Count each kind and name three of its tensors."""
        shapes = [f"{name} {list(held)}, not {list(wanted)}" for name, (held, wanted) in self.misshapen.items()]
        kinds = {"missing": self.missing, "superfluous": self.superfluous, "of another shape": shapes}
        return ", ".join(_counted(kind, names) for kind, names in kinds.items() if names)


def _counted(kind: str, names: Iterable[str]) -> str:
    listed = sorted(names)
    more = ", ..." if len(listed) > _NAMED else ""
    count = f"{len(listed)} tensor{'s are' if len(listed) > 1 else ' is'}"
    return f"{count} {kind} ({'; '.join(listed[:_NAMED])}{more})"
