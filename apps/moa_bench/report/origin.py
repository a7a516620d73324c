"""Where the results come from: machines, versions and fingerprints, side by side where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moa_bench.report.stored import StoredResult
from moa_bench.report.wording import flat

# Keys of a result. Figures that were measured with other packages may still be compared.
_COMPARABLE = {"machine": False, "versions": True, "fingerprints": False}


@dataclass(frozen=True)
class Property:
    """One thing that was recorded; ``values`` has one for each column of its :class:`Origin`, "" for none."""

    name: str
    values: Sequence[str]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


@dataclass(frozen=True)
class Origin:
    """One kind of property.

    Attributes:
        columns: file names, those of results alike in one column.
        incomparable: names of properties that differ so that figures must not be compared.
    """

    kind: str
    columns: Sequence[str]
    properties: Sequence[Property]
    incomparable: Sequence[str]


def origins_of(results: Sequence[StoredResult]) -> list[Origin]:
    """The machine, the versions and the fingerprints of all results."""
    return [_origin(kind, comparable, results) for kind, comparable in _COMPARABLE.items()]


def _origin(kind: str, comparable: bool, results: Sequence[StoredResult]) -> Origin:
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for stored in results:
        alike.setdefault(tuple(flat(stored.result[kind])), []).append(stored.file)
    recorded = [dict(pairs) for pairs in alike]
    names = dict.fromkeys(name for column in recorded for name in column)
    properties = [Property(name, [column.get(name, "") for column in recorded]) for name in names]
    return Origin(
        kind,
        ["all results"] if len(alike) == 1 else [", ".join(files) for files in alike.values()],
        properties,
        [] if comparable else [found.name for found in properties if found.differs],
    )
