"""Table and plot of a web result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moa_bench.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    columns = ("context", "tokens", "ms", "least_ms", "p95_ms", "python_ms", "python_least_ms", "ratio")
    rows = [
        [graph, *(step[name] for name in columns)]
        for graph, figures in result["graphs"].items()
        for step in figures["steps"]
    ]
    notes = [
        f"{graph}: {figures['bytes'] / 1e6:.1f} MB, loaded in {figures['load_ms'] / 1000:.1f} s"
        for graph, figures in result["graphs"].items()
        if "load_ms" in figures
    ]
    if result["browser"]:
        notes.append(f"onnxruntime-web {result['browser']['onnxruntime-web']} in {result['browser']['agent']}")
    notes.append(f"medians of {result['settings']['repeats']} steps, in turns, one thread each; every token is a query")
    header = ["graph", "context", "tokens", "browser ms", "least", "p95", "Python ms", "least", "ratio"]
    return [Table(header, rows, note="\n".join(notes))]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Milliseconds of a step by context, in the browser and, dashed, in Python."""
    axes = figure.subplots()
    for graph, figures in result["graphs"].items():
        for tokens in result["settings"]["tokens"]:
            steps = [step for step in figures["steps"] if step["tokens"] == tokens]
            contexts = [step["context"] for step in steps]
            label = f"{graph}, {tokens} token{'s' if tokens > 1 else ''}"
            (line,) = axes.plot(contexts, [step["ms"] for step in steps], marker="o", label=label)
            axes.plot(contexts, [step["python_ms"] for step in steps], linestyle="--", color=line.get_color())
    axes.set(title="one step in a browser, in Python dashed", xlabel="context (tokens)", ylabel="ms", ylim=(0, None))
    if axes.lines:
        axes.legend()
