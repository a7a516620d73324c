"""Tables and plot of a device result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moa_bench.output import Headline
from moa_bench.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARTS = ("floor", "profile", "energy")
_MOST_ROWS = 12


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    return [_overview(result), _steps(result), *_profiles(result)]


def headlines(result: dict[str, Any]) -> list[Headline]:
    """See :class:`moa_bench.output.Presentation`."""
    found: list[Headline] = []
    for target, figures in result["targets"].items():
        steps = [step for step in figures["steps"] if step["tokens"] == 1]
        if steps:
            middle = steps[len(steps) // 2]
            where = f"a step of 1 token at context {middle['context']}, {target}"
            found += [(f"ms of {where}", middle["ms"]), (f"ratio to its floor of {where}", middle["ratio"])]
        if "cpu_s_per_committed_token" in (energy := figures.get("energy", {})):
            found.append((f"CPU ms per committed token, {target}", _milliseconds(energy["cpu_s_per_committed_token"])))
    return found


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Milliseconds of a step by context, the floor dashed, and their ratio."""
    times, ratios = figure.subplots(1, 2)
    for target, figures in result["targets"].items():
        for tokens in result["settings"]["tokens"]:
            steps = [step for step in figures["steps"] if step["tokens"] == tokens]
            contexts = [step["context"] for step in steps]
            label = f"{target}, {tokens} token{'s' if tokens > 1 else ''}"
            (line,) = times.plot(contexts, [step["ms"] for step in steps], marker="o", label=label)
            floored = [step for step in steps if step["ratio"] is not None]
            contexts, colour = [step["context"] for step in floored], line.get_color()
            times.plot(contexts, [step["floor_ms"] for step in floored], linestyle="--", color=colour)
            ratios.plot(contexts, [step["ratio"] for step in floored], marker="o", color=colour)
    ratios.axhline(1, color="grey", linestyle="--")
    times.set(title="one drafting step, its floor dashed", xlabel="context (tokens)", ylabel="ms", ylim=(0, None))
    ratios.set(title="ratio to the floor", xlabel="context (tokens)", ylim=(0, None))
    if times.lines:
        times.legend()


def _overview(result: dict[str, Any]) -> Table:
    rows = []
    for target, figures in result["targets"].items():
        energy = figures.get("energy", {})
        loading = ("import_ms", "load_ms", "peak_memory_mb", "peak_memory_added_mb")
        per_token = ("cpu_s_per_committed_token", "cpu_s_per_drafted_token")
        rows.append(
            [target, *(figures.get(name) for name in loading), *(_milliseconds(energy.get(name)) for name in per_token)]
        )
    header = ["target", "import ms", "load ms", "peak MB", "added MB", "CPU ms / committed", "CPU ms / drafted"]
    return Table(header, rows, note="\n".join([*_not_run(result), *_conditions(result)]))


def _steps(result: dict[str, Any]) -> Table:
    rows = [
        [target, *(step[name] for name in ("context", "tokens", "ms", "p95_ms", "floor_ms", "ratio"))]
        for target, figures in result["targets"].items()
        for step in figures["steps"]
    ]
    notes = [
        f"products in the floor of {target}: {len(floor['products'])}, with {floor['weights'] / 1e6:.1f} M weights"
        for target, figures in result["targets"].items()
        if "products" in (floor := figures.get("floor", {}))
    ]
    settings = result["settings"]
    notes.append(f"medians of {settings['repeats']} steps with {settings['threads']} threads; every token is a query")
    return Table(["target", "context", "tokens", "ms", "p95 ms", "floor ms", "ratio"], rows, note="\n".join(notes))


def _profiles(result: dict[str, Any]) -> Iterator[Table]:
    for target, figures in result["targets"].items():
        profile = figures.get("profile", {})
        for step in profile.get("steps", []):
            shown, rest = step["operators"][:_MOST_ROWS], step["operators"][_MOST_ROWS:]
            rows = [[entry["op"], entry["nodes"], entry["ms"], _percent(entry)] for entry in shown]
            if rest:
                others = {name: sum(entry[name] for entry in rest) for name in ("nodes", "ms", "share")}
                rows.append(["others", others["nodes"], others["ms"], _percent(others)])
            between = step["between_nodes_ms"]
            rows.append(["between operators", None, between, _percent({"share": between / step["step_ms"]})])
            yield Table(
                ["operator", "nodes", "ms", "share"],
                rows,
                title=f"where the time goes: {target}, context {profile['context']}, tokens {step['tokens']}",
                note=f"a step took {step['step_ms']:.3f} ms while it was watched",
            )
            yield Table(
                ["most expensive nodes", "operator", "ms", "share"],
                [[node["name"], node["op"], node["ms"], _percent(node)] for node in step["top_nodes"]],
            )


def _not_run(result: dict[str, Any]) -> Iterator[str]:
    for target, figures in result["targets"].items():
        for name, part in ((target, figures), *((f"{target} {key}", figures.get(key, {})) for key in _PARTS)):
            if "not_run" in part:
                yield f"{name}: not run: {part['not_run']}"


def _conditions(result: dict[str, Any]) -> Iterator[str]:
    answers = result["settings"]["answers"]
    if answers is not None:
        yield (
            f"CPU time of the client, all threads; answers to {answers['questions']} questions, at most "
            f"{answers['max_new_tokens']} tokens each, draft length {answers['draft_length']}"
        )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _percent(entry: dict[str, Any]) -> str:
    return f"{100 * entry['share']:.1f} %"
