"""Tables and plot of an acceptance result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moa_bench.output import Headline
from moa_bench.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHOSEN = {
    "auto": "as large as pays",
    "thompson": "chains by Thompson sampling",
    "thompson-calibrated": "chains by calibrated Thompson sampling",
}
#: Of drafts whose shape is chosen, in the table; the rest are one column.
_DEPTHS_SHOWN = 6


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    rows = [[name, t["questions"], t["rounds"], t["tokens"], t["tau"]] for name, t in result["tasks"].items()]
    rows.append(["mean over tasks", result["questions"], result["rounds"], result["tokens"], result["tau"]])
    settings = result["settings"]
    drafted = settings["draft_length"] or _DEPTHS_SHOWN
    histogram, accuracy = result["accepted_length_histogram"], result["accuracy_by_depth"]
    more = [f"more, up to {len(histogram) - 1}"] if len(histogram) > drafted + 1 else []
    return [
        Table(["task", "questions", "rounds", "tokens", "tau"], rows),
        Table(
            ["tokens of a draft", *map(str, range(drafted + 1)), *more],
            [
                ["accuracy at this depth", "", *accuracy[:drafted], *("" for _ in more)],
                [
                    "rounds that accepted so many",
                    *histogram[: drafted + 1],
                    *(sum(histogram[drafted + 1 :]) for _ in more),
                ],
            ],
            note="\n".join([_conditions(result), *_skipped(result)]),
        ),
        *([_shape(result)] if settings.get("draft") in _CHOSEN else []),
        *([_comparison(result)] if result.get("rivals") else []),
    ]


def headlines(result: dict[str, Any]) -> list[Headline]:
    """See :class:`moa_bench.output.Presentation`."""
    return [
        ("tokens per round (tau)", result["tau"]),
        ("share accepted of first drafted tokens", result["accuracy_by_depth"][0]),
        *([("milliseconds a token", result["ms_per_token"])] if result.get("ms_per_token") else []),
    ]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Tau by task, the histogram of accepted lengths, and accuracy by depth."""
    taus, histogram, accuracy = figure.subplots(1, 3)
    named = [(name, task["tau"]) for name, task in result["tasks"].items() if task["tau"] is not None]
    bars = taus.barh([name for name, _ in named], [tau for _, tau in named])
    taus.bar_label(bars, fmt="%.2f", padding=2)
    taus.invert_yaxis()
    taus.margins(x=0.15)  # room for the labels
    taus.grid(False)  # no lines through them
    taus.set(title="tau by task", xlabel="tokens committed per round", xlim=(0, None))
    lengths = range(len(result["accepted_length_histogram"]))
    histogram.bar(lengths, result["accepted_length_histogram"])
    histogram.set(title="accepted length", xlabel="drafted tokens accepted", ylabel="rounds")
    histogram.xaxis.get_major_locator().set_params(integer=True)
    depths = [(d, share) for d, share in enumerate(result["accuracy_by_depth"], 1) if share is not None]
    accuracy.plot([d for d, _ in depths], [share for _, share in depths], marker="o")
    accuracy.set(title="accuracy by depth", xlabel="depth in the draft", ylabel="share accepted", ylim=(0, 1))


def _shape(result: dict[str, Any]) -> Table:
    """What paid."""
    shown = {**result["tasks"], "all": result}
    pace = result["settings"]["pace_ms"]
    times = ", ".join(f"{name.replace('_', ' ')} {ms:g}" for name, ms in pace.items()) if pace else ""
    where = f"at a pace of ({times}) ms" if pace else "at the pace of this machine, without a network"
    return Table(
        ["shape of the drafts", "tokens", "levels", "steps", "with branches", "tau", "ms a token"],
        [
            [
                name,
                each["nodes"],
                each["levels"],
                each.get("steps"),
                each["branched"],
                each["tau"],
                each.get("ms_per_token"),
            ]
            for name, each in shown.items()
        ],
        note=f"{where}; tau of all is the mean over tasks",
    )


def _comparison(result: dict[str, Any]) -> Table:
    """A column a drafter."""
    drafters = [result, *result["rivals"]]
    tasks = list(dict.fromkeys(task for drafter in drafters for task in drafter["tasks"]))
    depths = range(min(len(drafter["accuracy_by_depth"]) for drafter in drafters))
    return Table(
        ["", *(drafter["name"] for drafter in drafters)],
        [
            ["architecture", *(d["architecture"] for d in drafters)],
            ["weights", *(d["weights"] for d in drafters)],
            ["parameters, millions", *(d["parameters"] / 1e6 for d in drafters)],
            ["and of the target's layers", *(d["frozen_parameters"] / 1e6 for d in drafters)],
            ["bytes a row", *(d["row_bytes"] for d in drafters)],
            ["questions", *(d["questions"] for d in drafters)],
            ["rounds", *(d["rounds"] for d in drafters)],
            *([f"tau, {task}", *(d["tasks"].get(task, {}).get("tau") for d in drafters)] for task in tasks),
            ["tau, mean over tasks", *(d["tau"] for d in drafters)],
            *([f"accuracy at depth {n + 1}", *(d["accuracy_by_depth"][n] for d in drafters)] for n in depths),
            ["ms a draft", *(d["draft_ms"] for d in drafters)],
            *([["ms a token", *(d["ms_per_token"] for d in drafters)]] if drafters[0].get("ms_per_token") else []),
            ["passes of the target", *(d["target_passes"] for d in drafters)],
        ],
        title="Partial, so not of the same questions; same settings, one after the other:"
        if result["partial"]
        else "Same questions, same settings, one after the other:",
    )


def _conditions(result: dict[str, Any]) -> str:
    settings = result["settings"]
    sampling = settings["sampling"]
    how = f"temperature {sampling['temperature']}, top-p {sampling['top_p']}, seed {sampling['seed']}"
    drafts = f"chain of {settings['draft_length']}"
    if settings.get("draft") in _CHOSEN:
        drafts = _CHOSEN[settings["draft"]]
    elif settings.get("nodes"):
        drafts = f"tree of {settings['nodes']} nodes in {settings['draft_length']} levels"
        if settings.get("width"):  # results of earlier versions do not say it
            drafts += f", {settings['width']} continued on each"
    replayed = ", written before and replayed" if settings.get("replay") else ""
    texts = " and a datastore" if settings.get("datastore") else ""
    mixed = f"mixed with an n-gram index of the conversation{texts}, " if settings.get("ngrams") else ""
    return (
        f"{drafts}, {how if sampling['temperature'] else 'greedy'}, {mixed}"
        f"answers of at most {settings['max_new_tokens']} tokens{replayed}, {result['seconds']:.0f} s without loading"
    )


def _skipped(result: dict[str, Any]) -> list[str]:
    return [
        f"skipped: question {turn['question_id']} from turn {turn['turn']} on: {turn['reason']}"
        for turn in result["skipped"]
    ]
