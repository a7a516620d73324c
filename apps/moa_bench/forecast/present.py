"""Tables and plot of a forecast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moa_bench.output import Headline
from moa_bench.table import Table, format_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from moa_bench.forecast.drafts import Drafts

#: Who drafts, for somebody who has read nothing.
WHO = {
    "stream": "nobody: the server streams",
    "server": "the server",
    "device": "the devices",
    "auto": "whoever is faster (auto)",
}
_SPARES = ("#c2570c", "#0f7b5f", "#0b63ce")
_COLOURS = {"stream": "#5b6470", "server": "#0b63ce", "device": "#c2570c", "auto": "#0f7b5f"}


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    parts = {"projection": _projected, "fleet": _evenings, "validation": _validated, "measured": _measured}
    found = [table for part, told in parts.items() if part in result for table in told(result)]
    return [*found, *([_drafts(result["drafts"])] if isinstance(result.get("drafts"), dict) else [])]


def headlines(result: dict[str, Any]) -> list[Headline]:
    """See :class:`moa_bench.output.Presentation`."""
    modes = result.get("projection", {}).get("modes", {})
    return [(f"GPUs, drafted by {WHO[mode]}", figures["gpus"]) for mode, figures in modes.items()]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """What the promise costs, by who drafts, and what becomes of it in a bad evening; or measured against simulated."""
    if "validation" in result:
        _draw_validation(result["validation"], figure)
    elif "projection" in result:
        money, evening = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_money(result["projection"], money)
        _draw_evening(result, evening)


def drafts_as_dict(drafts: Drafts) -> dict[str, Any]:
    """What a table says of drafts."""
    shapes = [
        {
            "name": shape.name,
            "nodes": shape.nodes,
            "steps": len(shape.steps),
            "tau": round(drafts.tau(shape), 3),
            "tau_by_task": {task: round(shape.tau(task), 3) for task in drafts.tasks},
        }
        for shape in drafts.shapes
    ]
    return {"about": drafts.about, "shapes": shapes}


def _projected(result: dict[str, Any]) -> list[Table]:
    told = result["projection"]
    promise, demand = told["promise"], told["demand"]
    rows = [
        [
            WHO[mode],
            figures["carried_per_s"],
            figures["gpus"],
            _dollars(figures["usd_per_month"]["base"]),
            f"{_dollars(figures['usd_per_month']['low'])} - {_dollars(figures['usd_per_month']['high'])}",
            *(
                _between(figures["gpus_by"].get(name))
                for name in ("answers a user", "busiest hour", "tau", "device step")
            ),
        ]
        for mode, figures in told["modes"].items()
    ]
    note = (
        f"{told['title']}; {told['users']:,.0f} users a day ask {told['answers_per_s']:.0f} answers a second in the "
        f"busiest hour; GPUs run day and night, {told['spare']} of them spare\n"
        f"answers a user {_range(demand['answers_per_user'])}, busiest hour by the mean one {_range(demand['peak'])}, "
        f"tau of the largest drafts {_range(demand['tau'])}, ms of a device's step {_range(demand['device_ms'])}, "
        f"US$ an hour {_range(told['price_per_hour'])}\n" + "\n".join(f"assumed: {text}" for text in _assumed(result))
    )
    header = ["who drafts", "answers/s a GPU", "GPUs", "US$ a month", "by price"]
    header += [f"GPUs by {name}" for name in ("answers a user", "busiest hour", "tau", "device step")]
    title = (
        f"95 of 100 tokens within {promise['token_ms']:g} ms, first tokens within {promise['first_ms']:g} ms "
        "(by: the ends of a range, one at a time):"
    )
    load_rows = [
        [
            mode,
            load["answers_per_s"],
            load["at_once"],
            load["busy"],
            load["tokens_per_s"],
            load["ms_per_token"]["mean"],
            load["ms_per_token"]["p95"],
            load["ttft_ms"]["mean"],
            load["ttft_ms"]["p95"],
            load["finished"],
        ]
        for mode, figures in told["modes"].items()
        for load in figures["loads"]
    ]
    load_header = ["one GPU", "answers/s", "at once", "busy", "tokens/s", "ms/token", "p95"]
    return [
        Table(header, rows, title=title, note=note),
        Table([*load_header, "first token ms", "p95", "finished"], load_rows, title="Queueing, as simulated:"),
    ]


def _assumed(result: dict[str, Any]) -> list[str]:
    said = result["assumptions"]
    return [*said["demand"], *said["hardware"].values()]


def _evenings(result: dict[str, Any]) -> list[Table]:
    told = result["fleet"]
    if told["replicas"] is None:
        return [Table(["spare"], [], title="No fleet keeps the promise with auto, so no evening was simulated.")]
    rows = [
        [
            f"{told['replicas']} + {spare}",
            what,
            figures["asked"],
            figures["moved"],
            figures["broken_s"],
            figures["worst_token_ms"],
            figures["worst_first_ms"],
        ]
        for spare, both in told["evenings"].items()
        for what, figures in (("one GPU lost", both["lost"]), ("bad evening", both["evening"]))
    ]
    scaled = f", scaled down from {told['scaled_from']}" if told["scaled_from"] > told["replicas"] else ""
    outages = "; ".join(_outage(outage) for outage in told["outages"])
    return [
        Table(
            ["GPUs + spare", "what", "answers", "moved", "s not kept", "worst ms/token p95", "worst first ms p95"],
            rows,
            title=f"A fleet in its busiest hour, drafting: {told['mode']}{scaled}. Bad evening: {outages}",
            note="moved: answers under way that went on at another GPU, no text lost; s not kept: seconds in which the "
            "promise was broken, of 150 and 900",
        )
    ]


def _outage(outage: dict[str, Any]) -> str:
    lost = f"{outage['replicas']} GPUs lost" if outage["replicas"] else f"{outage['users']:.0%} of the users offline"
    return f"minute {outage['at_s'] / 60:g}: {lost} for {outage['lasts_s'] / 60:g} minutes"


def _validated(result: dict[str, Any]) -> list[Table]:
    told = result["validation"]
    rows = [
        [
            f"{load['sessions']} {load['mode']}",
            load["figure"].replace("_", " "),
            load["measured"],
            load["simulated"],
            f"{load['error']:+.0%}",
            "fitted" if load["fitted"] else "",
        ]
        for load in told["loads"]
    ]
    errors = [
        [
            name.replace("_", " "),
            *(told[part].get(name, {}).get(key) for part in ("fitted", "not_fitted") for key in ("median", "worst")),
        ]
        for name in dict.fromkeys([*told["fitted"], *told["not_fitted"]])
    ]
    factors = ", ".join(f"{name} {factor:.2f}" for name, factor in told["factors"].items())
    return [
        Table(["sessions, mode", "figure", "measured", "simulated", "error", ""], rows),
        Table(
            ["error", "fitted: median", "worst", "not fitted: median", "worst"],
            errors,
            title=f"Fitted to {' and '.join(map(str, told['fit_to']))} sessions:",
            note=f"factors: {factors}",
        ),
    ]


def _measured(result: dict[str, Any]) -> list[Table]:
    told = result["measured"]
    times = told["times"]
    rows = [[f"target: {name}", 1000 * seconds] for name, seconds in times["target"].items()]
    rows += [
        [f"{who}: {name}", 1000 * seconds]
        for who in ("server_drafter", "device")
        for name, seconds in times[who].items()
    ]
    rows.append(["a memory row", 1000 * times["row_s"]])
    worst = max(map(abs, told["errors"]))
    note = f"steps of the target are off by at most {worst:.0%}; {told['questions']} answers were counted"
    return [Table(["ms", ""], [[name, f"{ms:.5f}"] for name, ms in rows], note=note)]


def _drafts(told: dict[str, Any]) -> Table:
    tasks = list(told["shapes"][0]["tau_by_task"])
    rows = [
        [shape["name"], shape["nodes"], shape["steps"], shape["tau"], *shape["tau_by_task"].values()]
        for shape in told["shapes"]
    ]
    return Table(["draft", "tokens", "steps", "tau", *tasks], rows, note=told["about"])


def _draw_money(told: dict[str, Any], axes: Any) -> None:
    price = told["price_per_hour"]["base"] * told["hours_a_month"]
    for mode, who in WHO.items():
        points = [(ms, count) for ms, count in told["modes"][mode]["gpus_by_promise"] if count is not None]
        style = "--" if mode == "auto" else "-"  # it often lies on another one
        drawn = zip(*points, strict=True) if points else ([], [])
        axes.plot(*drawn, style, marker="o", ms=4, color=_COLOURS[mode], label=who)
    promise = told["promise"]["token_ms"]
    axes.axvline(promise, color="#8a6d00", linewidth=1, linestyle="--")
    ticks = [5, 10, 15, 20, 30, 50, 100]
    axes.set(xscale="log", ylim=(0, None), ylabel="GPUs")
    axes.set_xticks(ticks, [f"{1000 / ms:.0f}" for ms in ticks])
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.set(
        xlabel="promised speed: tokens a second for each user, 95 of 100 tokens",
        title=f"{told['users'] / 1e6:g} million users a day: what speed costs, by who drafts",
    )
    dollars = axes.secondary_yaxis(
        "right", functions=(lambda gpus: gpus * price / 1000, lambda usd: usd * 1000 / price)
    )
    dollars.set_ylabel(f"thousand US$ a month, at {told['price_per_hour']['base']:g} an hour")
    axes.annotate("promised", (promise, 0.62), xycoords=("data", "axes fraction"), rotation=90, ha="right", fontsize=8)
    axes.legend(title="who drafts", loc="upper left", frameon=False, fontsize=8)


def _draw_evening(result: dict[str, Any], axes: Any) -> None:
    told, promise = result["fleet"], result["projection"]["promise"]
    for (spare, both), colour in zip(told["evenings"].items(), _SPARES, strict=False):
        moments = both["evening"]["moments"]
        label = f"{told['replicas']} GPUs and {spare} spare"
        axes.plot([moment[0] / 60 for moment in moments], [moment[2] for moment in moments], color=colour, label=label)
    axes.axhline(promise["token_ms"], color="#8a6d00", linewidth=1, linestyle="--", label="promised")
    axes.set(title=f"a bad evening, {told['mode']}", xlabel="minute", ylabel="ms a token, 95 of 100", ylim=(0, None))
    for outage in told.get("outages", []):
        begin, end = outage["at_s"] / 60, (outage["at_s"] + outage["lasts_s"]) / 60
        lost = f"{outage['replicas']} lost" if outage["replicas"] else f"{outage['users']:.0%} of users\noffline"
        axes.axvspan(begin, end, alpha=0.08, color="#000000", linewidth=0)
        axes.text((begin + end) / 2, 0.01, lost, transform=axes.get_xaxis_transform(), fontsize=8, ha="center")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_validation(told: dict[str, Any], figure: Figure) -> None:
    names = list(dict.fromkeys(load["figure"] for load in told["loads"]))
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False).flat, names, strict=True):
        for fitted, marker in ((True, "o"), (False, "^")):
            points = [load for load in told["loads"] if load["figure"] == name and load["fitted"] is fitted]
            axes.scatter(
                [load["measured"] for load in points],
                [load["simulated"] for load in points],
                marker=marker,
                label="fitted" if fitted else "not fitted",
            )
        axes.axline((0, 0), slope=1, color="grey", linewidth=1)
        axes.set(title=name.replace("_", " "), xlabel="measured", ylabel="simulated")
    figure.axes[0].legend()


def _between(ends: list[int | None] | None) -> str | None:
    return None if not ends else " - ".join("none" if end is None else str(end) for end in ends)


def _range(told: dict[str, Any]) -> str:
    return f"{format_cell(told['base'])} ({format_cell(told['low'])} - {format_cell(told['high'])})"


def _dollars(amount: float | None) -> str:
    return "none" if amount is None else f"{amount:,.0f}"
