"""``moa-bench simulate``: shapes of drafts, who drafts, and a full verifier, on machines described by their times."""

from __future__ import annotations

import argparse
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from moa_bench import options
from moa_bench.benchmark import Benchmark, Measured, Result, Table
from moa_bench.harness import engine_of
from moa_bench.recording import Recording, record
from moa_bench.server import Load, WindowResult, figures_of, plot_by_sessions
from moa_bench.server_clients import ClientRecord
from moa_bench.simulated_clock import FLEET_MS, Times
from moa_bench.target_answers import write_answers
from moa_runtime.backends.load import load_backend
from moa_runtime.errors import MoaError
from moa_runtime.options import DRAFTINGS
from moa_runtime.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_NEW_TOKENS = 80
_MADE_WITH = ("questions", "limit", "max_new_tokens", "bundle", "backend", "model", "drafter")
_WORST = 10


class _View(NamedTuple):
    """How scenarios are shown: their main figure, the aim for it, and whether less of it is better."""

    figure: str
    aim: float
    less: bool
    title: str

    def sorted(self, scenarios: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Sort scenarios, the worst first."""
        return sorted(scenarios, key=lambda each: each[self.figure], reverse=self.less)


_VIEWS = {
    "shapes": _View("share", 0.95, False, "tokens/s of chosen shapes by those of the best fixed shape"),
    "placement": _View("ratio", 1.05, True, "ms/token of auto by those of the faster of device and server"),
}


class Simulate(Benchmark):
    """The runtime's choices against the best fixed ones, in simulated scenarios, and a fleet of sessions."""

    name = "simulate"
    purpose = "The runtime's choices on devices, links and verifiers that are described by their times."
    summary = "shapes of drafts, who drafts, and a full verifier, in simulated scenarios"
    description = f"""\
Simulate devices, links and verifiers that are described by their times. Loops, sessions, growth of trees, prices and
scheduler are the real ones; only time is simulated. The drafter's predictions are recorded at every position of the
target's answers: --recording FILE is read, or made if it is not there (half a second and more a token).

  shapes     tokens a second of drafts whose shape the runtime chooses, by those of the best fixed shape, which is
             chosen for each scenario with knowledge of its answers; aim: {_VIEWS["shapes"].aim} or more
  placement  milliseconds a token if the runtime chooses who drafts (auto), by those of the faster of the device alone
             and the server alone; links and verifiers may change half-way, and all three write the same text, which is
             checked; first tokens are left out; aim: {_VIEWS["placement"].aim} or less
  fleet      tokens a second and milliseconds a token of many sessions at once on one verifier, streamed, or drafted
             for by the server, the devices, or either (auto); figures as of moa-bench server
"""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = options.adder(parser)
        add("question", "what to simulate, see above", choices=("shapes", "placement", "fleet"))
        add(
            "--recording FILE",
            "recorded predictions; the options from --questions on are for making them",
            required=True,
        )
        add("--scenarios N", "of shapes and placement (default %(default)s)", default=1000)
        add("--seed", "of the scenarios (default %(default)s)", type=int, default=0)
        add("--sessions N,N,...", "of the fleet (default %(default)s)", default="1,8,32,128")
        add("--seconds S", "of the fleet's windows (default %(default)g)", default=20.0)
        add(
            "--times MS,MS,...",
            "of the fleet, in milliseconds: a step of the device's drafter and each token that it continues, the "
            "same of the server's drafter (- for none), a pass of the target and each token in it, the round trip "
            "(default: an 8B target on a GPU, phones, a mobile network)",
        )
        options.add_question_options(parser, required=False)
        add("--max-new-tokens N", f"tokens of an answer at most (default {_MAX_NEW_TOKENS})")
        options.add_bundle_options(parser, backend=True)
        options.add_target_options(parser)
        options.add_ngrams_option(parser)
        parser.set_defaults(ngrams=None)  # a recording that is there knows it

    def measure(self, args: argparse.Namespace) -> Generator[Measured, None, None]:
        # Imported here: SimPy is not in every install.
        from moa_bench import simulation
        from moa_drafter.progress import Progress

        options.check_at_least(args, scenarios=1, seed=0, seconds=1, max_new_tokens=2)
        sessions = options.numbers_of("--sessions", args.sessions, 1)
        times = Times.parse(args.times or FLEET_MS)
        recording, question = _recording(args), args.question
        settings = {
            "question": question,
            "drafter": recording.drafter,
            "ngrams": recording.ngrams,
            "answers": len(recording.answers),
            "tokens": sum(recording.lengths),
        }
        if question == "fleet":
            settings |= {"sessions": sessions, "seconds": args.seconds, "ms": times.in_ms()}
            windows: dict[Load, list[WindowResult]] = {}
            measured = Measured(lambda: figures_of(windows, args.seconds, 1), settings, recording.fingerprints)
            yield measured
            loads = [Load(count, mode) for count in sessions for mode in ("stream", *DRAFTINGS)]
            for load in Progress(loads, desc="simulate", unit="window"):
                records, passes = simulation.simulate_window(recording, times, load.mode, load.clients, args.seconds)
                windows[load] = [WindowResult([ClientRecord(records, 0.0)], passes, None)]
                yield measured
            return
        settings |= {"tokens_of_a_scenario": simulation.TOKENS[question], "seed": args.seed}
        found: list[dict[str, Any]] = []
        measured = Measured(lambda: {"scenarios": found}, settings, recording.fingerprints)
        yield measured
        if question == "shapes":
            draw, compare = simulation.draw_shapes, simulation.Field(recording).run
        else:
            draw, compare = simulation.draw_placements, partial(simulation.compare_placements, recording)
        drawn = draw(args.scenarios, args.seed, recording.lengths)
        for scenario in Progress(drawn, total=args.scenarios, desc="simulate", unit="scenario"):
            found.append(compare(scenario))
            yield measured

    def tables(self, result: Result) -> list[Table]:
        settings = result["settings"]
        if settings["question"] == "fleet":
            return [_fleet_table(result)]
        scenarios, view = result["scenarios"], _VIEWS[settings["question"]]
        kinds = sorted({each["kind"] for each in scenarios})
        rows = [_summary(kind, [each for each in scenarios if each["kind"] == kind], view) for kind in kinds]
        means = list(scenarios[0]["means"]) if scenarios else []
        note = (
            f"{settings['answers']} answers of {settings['drafter']}, {settings['tokens']} tokens; "
            f"{settings['tokens_of_a_scenario']} tokens a scenario, seed {settings['seed']}, {result['seconds']:.0f} s"
        )
        worst = view.sorted(scenarios)[:_WORST]
        times = list(worst[0]["ms"]) if worst else []
        reached = f"at {view.aim} or {'below' if view.less else 'above'}"
        header = ["best", "scenarios", "median", "99 of 100", "worst", reached, *means]
        cases = [[each["best"], each[view.figure], *each["ms"].values()] for each in worst]
        return [
            Table(header, [*rows, _summary("all", scenarios, view)], f"{view.title}:", note),
            Table(["best", view.figure, *times], cases, title="The worst (times in ms):"),
        ]

    def plot(self, result: Result, figure: Figure) -> None:
        """Draw the scenarios' figure, sorted, and against the round trip; of a fleet tokens a second by sessions."""
        if result["settings"]["question"] == "fleet":
            axes = figure.subplots()
            plot_by_sessions(axes, result, lambda load: load["tokens_per_s"])
            axes.set(title="all sessions together", xlabel="sessions", ylabel="tokens/s", xscale="log", ylim=(0, None))
            if axes.lines:
                axes.legend()
            return
        view, scenarios = _VIEWS[result["settings"]["question"]], result["scenarios"]
        ranks, trips = figure.subplots(1, 2)
        figures = [each[view.figure] for each in view.sorted(scenarios)]
        ranks.plot([100 * (at + 0.5) / len(figures) for at in range(len(figures))], figures)
        ranks.set(title="all scenarios", xlabel="scenarios that are worse (%)", ylabel=view.title)
        for kind in sorted({each["kind"] for each in scenarios}):
            points = [(each["ms"]["trip"], each[view.figure]) for each in scenarios if each["kind"] == kind]
            trips.plot(*zip(*points, strict=True), ".", markersize=4, label=f"best: {kind}")
        trips.set(title="by round trip", xlabel="round trip, ms")
        for axes in (ranks, trips):
            axes.axhline(view.aim, linestyle="--", linewidth=1, color="grey")
        if scenarios:
            trips.legend()


def _summary(kind: str, scenarios: Sequence[dict[str, Any]], view: _View) -> list[object]:
    figures = [each[view.figure] for each in view.sorted(scenarios)]
    if not figures:
        return [kind, 0, *[None] * 4]
    reached = sum(figure <= view.aim if view.less else figure >= view.aim for figure in figures) / len(figures)
    means = [sum(each["means"][name] for each in scenarios) / len(scenarios) for name in scenarios[0]["means"]]
    return [kind, len(figures), median(figures), figures[len(figures) // 100], figures[0], reached, *means]


def _fleet_table(result: Result) -> Table:
    settings, speedup = result["settings"], result["speedup"]
    header = ["sessions", "mode", "tokens/s", "by stream", "ms/token", "p50", "p95", "first token ms"]
    rows = []
    for count, modes in result["sessions"].items():
        for mode, load in modes.items():
            speed = [count, mode, load["tokens_per_s"], speedup[count].get(mode), *load["ms_per_token"].values()]
            rows.append([*speed, load["ttft_ms"]["mean"], load["passes_per_token"], load["tokens_per_round"]])
    times = ", ".join(f"{name.replace('_', ' ')} {ms}" for name, ms in settings["ms"].items())
    note = f"{settings['seconds']:g} s of simulated time each, {settings['answers']} answers; times in ms: {times}"
    return Table([*header, "passes/token", "tokens/round"], rows, note=note)


def _recording(args: argparse.Namespace) -> Recording:
    """Read the recording of ``--recording``, or make it. Raises MoaError."""
    path: Path = args.recording
    if path.exists():
        for option in _MADE_WITH:
            if getattr(args, option) is not None:
                name = option.replace("_", "-")
                text = f"{path} holds a recording already: leave out --{name}, or choose another file"
                raise MoaError(text, code="contradiction")
        recording = Recording.read(path)
        if args.ngrams not in (None, recording.ngrams):
            made, option = ("with", "--no-ngrams") if recording.ngrams else ("without", "--ngrams")
            text = f"{path} was recorded {made} an n-gram index: leave out {option}, or choose another file"
            raise MoaError(text, code="contradiction")
        return recording
    if not path.absolute().parent.is_dir():
        raise MoaError(f"--recording {path}: there is no folder {path.parent}", code="folder_missing")
    recording = _recorded(args)
    recording.write(path)
    return recording


def _recorded(args: argparse.Namespace) -> Recording:
    """Record the bundle's drafter on the target's answers to the questions. Raises MoaError."""
    from moa_drafter.progress import Progress

    questions, bundle = options.questions_of(args), options.bundle_of(args)
    backend, manifest, engine = load_backend(bundle, args.backend), bundle.manifest, engine_of(args)
    tokenizer, most = ChatTokenizer.from_bundle(bundle), args.max_new_tokens or _MAX_NEW_TOKENS
    with Progress(total=sum(len(each.turns) for each in questions), desc="simulate: answers", unit="answer") as bar:
        answers = write_answers(
            engine, questions, tokenizer, max_new_tokens=most, on_answers=lambda written: bar.update(len(written))
        )
    longer = {prompt: answer for prompt, answer in answers.items() if len(answer) > 1}  # others have no rounds
    if not longer:
        raise MoaError("the target answered nothing longer than a token: ask other --questions", code="too_short")
    ngrams = args.ngrams is not False
    positions = sum(len(answer) - 1 for answer in longer.values())
    with Progress(total=positions, desc="simulate: recording", unit="token") as bar:
        recorded = [
            record(manifest, backend, engine, prompt, answer, ngrams=ngrams, on_position=bar.update)
            for prompt, answer in longer.items()
        ]
    prints, stops = manifest.fingerprints, manifest.stop_tokens
    return Recording(manifest.target, prints, manifest.vocab_size, stops, ngrams, recorded)
