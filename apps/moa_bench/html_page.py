"""A result as one HTML page that refers to nothing outside itself: it can be opened without a network, or mailed."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any
from xml.etree import ElementTree

from moa_bench.benchmark import Benchmark, Result, Table, figure_of, format_cell

_NUMERIC = re.compile(r"[\d. %-]*")
_UNITS = {"gib": "GiB", "mb": "MB"}
#: Colours to draw with, and their names in the page, which has a light and a dark style.
_INK, _GRID = "#1b1f24", "#d8dee4"
_SERIES = ("#0b63ce", "#c2570c", "#0f7b5f", "#a4338a", "#6b5bd2", "#8a6d00")
_PAGE_COLOURS = {
    _INK: "currentColor",
    "#000000": "currentColor",  # matplotlib's own choice for error bars
    _GRID: "var(--line)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(_SERIES, 1)},
}


def render(benchmark: Benchmark, result: Result) -> str:
    """Make the page: figures, settings, tables, plot, and the machine and versions they come from.

    Everything in the result is shown as text and never taken as markup.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    blocks = {"trim_blocks": True, "lstrip_blocks": True}
    loader = PackageLoader("moa_bench", "page")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **blocks)
    environment.filters["cell"] = format_cell
    return environment.get_template("page.html").render(
        benchmark=benchmark,
        result=result,
        version=version("moa-edge"),
        measured_at=result["measured_at"].replace("T", " ").replace("+00:00", " UTC"),
        conditions=flat(result["settings"]),
        tables=[(table, numeric_columns(table)) for table in benchmark.tables(result)],
        svg=inline_svg(benchmark, result),
        origins={kind: flat(result[kind]) for kind in ("machine", "versions", "fingerprints")},
    )


def numeric_columns(table: Table) -> list[bool]:
    """Return for each column whether it holds numbers, shares or ranges; the first one names the rows."""
    columns = range(1, len(table.header))
    return [False, *(all(_NUMERIC.fullmatch(format_cell(row[column])) for row in table.rows) for column in columns)]


def flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return labels and values, those of a nested setting one by one.

    ``flat({"sampling": {"top_p": 1.0}})`` is ``[("sampling top p", "1")]``.
    """
    rows = []
    for key, value in settings.items():
        label = prefix + " ".join(_UNITS.get(word, word) for word in key.split("_"))
        rows += flat(value, f"{label} ") if isinstance(value, dict) else [(label, _value_text(value))]
    return rows


def _value_text(value: object) -> str:
    """Format floats without trailing zeros, lists with commas, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_value_text, value)) or "-"
    return str(value)


def inline_svg(benchmark: Benchmark, result: Result) -> str:
    """Draw the plot as one ``<svg>`` element without outside references, in the colours and typeface of the page."""
    from cycler import cycler
    from matplotlib import rc_context

    style = {
        "svg.fonttype": "none",  # text stays text
        "text.parse_math": False,  # names of tasks are no formulas
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "legend.frameon": False,
        "grid.color": _GRID,
        "axes.prop_cycle": cycler(color=_SERIES),
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
        "axes.edgecolor": _INK,
    }
    with rc_context(style):
        figure = figure_of(benchmark, result)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg")
    svg = ElementTree.fromstring(drawn.getvalue())
    _make_local(svg)
    titles = filter(None, (axes.get_title("left") or axes.get_title() for axes in figure.axes))
    svg.attrib |= {"role": "img", "aria-label": f"Plot of {benchmark.name}: {'; '.join(titles)}"}
    return ElementTree.tostring(svg, encoding="unicode")


def _make_local(svg: ElementTree.Element) -> None:
    """Drop the paper size, the metadata, a style that would apply to the whole page, and XML namespaces, which HTML
    does not know; use the page's colours."""
    for parent in list(svg.iter()):
        for child in list(parent):
            if _local_name(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in svg.iter():
        attributes = {_local_name(name): value for name, value in element.attrib.items()}
        element.tag = _local_name(element.tag)
        element.attrib.clear()
        for name, value in attributes.items():
            if element is not svg or name not in ("width", "height", "version"):
                element.attrib[name] = re.sub("#[0-9a-f]{6}", lambda at: _PAGE_COLOURS.get(at[0], at[0]), value)


def _local_name(name: str) -> str:
    return name.rpartition("}")[2]
