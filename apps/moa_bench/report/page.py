"""The report as one HTML page that refers to nothing outside itself."""

from __future__ import annotations

import re
from importlib.metadata import version

from moa_bench.report.contents import Contents
from moa_bench.report.wording import time_text
from moa_bench.table import Table, format_cell

_NUMERIC = re.compile(r"[\d. %-]*")


def render(contents: Contents) -> str:
    """The page; whatever stands in a result is shown as text and never taken as markup."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("moa_bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": format_cell, "time": time_text}
    environment.globals["numeric_columns"] = numeric_columns
    return environment.get_template("report.html").render(contents=contents, version=version("moa-edge"))


def numeric_columns(table: Table) -> list[bool]:
    """For each column, whether it holds numbers, shares or ranges; the first one names the rows."""
    columns = range(1, len(table.header))
    return [False, *(all(_NUMERIC.fullmatch(format_cell(row[column])) for row in table.rows) for column in columns)]
