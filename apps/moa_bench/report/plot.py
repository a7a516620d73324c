"""A benchmark's plot as SVG inside a page: it takes its colours and its typeface from the page's style."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from moa_bench.output import Presentation, figure_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours to draw with, and what stands for them in the page, which has a light and a dark style.
_INK, _GRID = "#1b1f24", "#d8dee4"
_SERIES = ("#0b63ce", "#c2570c", "#0f7b5f", "#a4338a", "#6b5bd2", "#8a6d00")
_PAGE_COLOURS = {
    _INK: "currentColor",
    "#000000": "currentColor",  # matplotlib's own choice for error bars
    _GRID: "var(--line)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(_SERIES, 1)},
}


def inline_svg(result: dict[str, Any], presentation: Presentation, prefix: str) -> str:
    """The plot as one ``<svg>`` element without references to anything outside it.

    Args:
        prefix: of its element ids, which must differ from those of the page's other plots.
    """
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
        figure = figure_of(result, presentation)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg")
    svg = ElementTree.fromstring(drawn.getvalue())
    _keep_the_drawing(svg)
    for element in svg.iter():
        _settle(element, prefix)
    svg.attrib |= {"role": "img", "aria-label": _description(result, figure)}
    return ElementTree.tostring(svg, encoding="unicode")


def _keep_the_drawing(svg: ElementTree.Element) -> None:
    """Remove the size on paper, the metadata, and a style that would apply to the whole page."""
    for attribute in ("width", "height", "version"):
        svg.attrib.pop(attribute, None)
    for parent in list(svg.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)


def _settle(element: ElementTree.Element, prefix: str) -> None:
    """Make names local to HTML, ids those of this plot, and colours those of the page."""
    element.tag = _local(element.tag)
    attributes = {_local(name): value for name, value in element.attrib.items()}
    for name, value in attributes.items():
        if name == "id":
            attributes[name] = prefix + value
        elif name == "href":
            attributes[name] = value.replace("#", f"#{prefix}", 1)
        else:
            value = value.replace("url(#", f"url(#{prefix}")
            attributes[name] = re.sub("#[0-9a-f]{6}", lambda found: _PAGE_COLOURS.get(found[0], found[0]), value)
    element.attrib.clear()
    element.attrib.update(attributes)


def _local(name: str) -> str:
    """Without the XML namespace, which HTML does not know."""
    return name.rpartition("}")[2]


def _description(result: dict[str, Any], figure: Figure) -> str:
    titles = filter(None, (axes.get_title("left") or axes.get_title() for axes in figure.axes))
    return f"Plot of {result['benchmark']}: {'; '.join(titles)}"
