"""What the page shows of one result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moa_bench.benchmarks import presentation_of, purpose_of
from moa_bench.output import Headline, headlines_of
from moa_bench.report.plot import inline_svg
from moa_bench.report.stored import NoResultError, StoredResult
from moa_bench.report.wording import flat
from moa_bench.table import Table


@dataclass(frozen=True)
class Section:
    """One result. ``svg`` is markup, everything else text.

    Attributes:
        anchor: the section's id in the page.
        problem: why the result is partial; empty if it is not.
        conditions: labels and values of the settings.
    """

    anchor: str
    benchmark: str
    purpose: str
    file: str
    measured_at: str
    seconds: float
    problem: str
    headlines: Sequence[Headline]
    conditions: Sequence[tuple[str, str]]
    tables: Sequence[Table]
    svg: str


def section_of(stored: StoredResult, anchor: str) -> Section:
    """Raises NoResultError: the figures are not what the benchmark writes."""
    result, presentation = stored.result, presentation_of(stored.benchmark)
    try:
        return Section(
            anchor=anchor,
            benchmark=stored.benchmark,
            purpose=purpose_of(stored.benchmark),
            file=stored.file,
            measured_at=result["measured_at"],
            seconds=result["seconds"],
            problem=result["problem"] or "",
            headlines=headlines_of(result, presentation),
            conditions=flat(result["settings"]),
            tables=presentation.tables(result),
            svg=inline_svg(result, presentation, f"{anchor}-"),
        )
    # A presentation trusts that its own benchmark wrote the result.
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise NoResultError(f"it is damaged ({type(error).__name__}: {error})") from error
