"""What the report holds, read from a folder of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moa_bench.report.origin import Origin, origins_of
from moa_bench.report.sections import Section, section_of
from moa_bench.report.stored import LeftOut, NoResultError, read_results


@dataclass(frozen=True)
class Contents:
    """Sections benchmark by benchmark, where their results come from, and the files that are not shown."""

    sections: Sequence[Section]
    origins: Sequence[Origin]
    left_out: Sequence[LeftOut]

    def title(self, section: Section) -> str:
        """The benchmark, and the file where there are several of one benchmark."""
        alone = sum(other.benchmark == section.benchmark for other in self.sections) == 1
        return section.benchmark if alone else f"{section.benchmark}: {section.file}"

    @property
    def differences(self) -> list[str]:
        """What keeps the results' figures from being compared, such as ``"machine (processor, cores)"``."""
        return [f"{origin.kind} ({', '.join(origin.incomparable)})" for origin in self.origins if origin.incomparable]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "results": [
                {
                    "file": section.file,
                    "benchmark": section.benchmark,
                    "measured_at": section.measured_at,
                    "partial": bool(section.problem),
                    "headlines": dict(section.headlines),
                }
                for section in self.sections
            ],
            "differences": self.differences,
            "left_out": {file.name: file.reason for file in self.left_out},
        }


def read_contents(folder: Path) -> Contents:
    """Raises MoaError: no such folder, or a result written by a newer version."""
    results, left_out = read_results(folder)
    sections, shown = [], []
    for number, stored in enumerate(results, 1):
        try:
            sections.append(section_of(stored, f"{stored.benchmark}-{number}"))
        except NoResultError as problem:
            left_out.append(LeftOut(stored.file, str(problem)))
        else:
            shown.append(stored)
    return Contents(sections, origins_of(shown), left_out)
