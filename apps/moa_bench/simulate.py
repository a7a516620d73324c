"""``moa-bench simulate``: shapes of drafts, and fleets of sessions, on machines described by their times."""

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
from moa_bench.target_answers import write_answers
from moa_runtime.backends.load import load_backend
from moa_runtime.errors import MoaError
from moa_runtime.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_NEW_TOKENS = 80
_MADE_WITH = ("questions", "limit", "max_new_tokens", "bundle", "backend", "model", "drafter")
_WORST = 10


class _View(NamedTuple):
    """How scenarios are shown: their main figure (more is better), its aim, and the horizontal axis."""

    figure: str
    aim: float
    title: str
    across: str

    def sorted(self, scenarios: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Sort scenarios, the worst first."""
        return sorted(scenarios, key=lambda each: each[self.figure])


_VIEWS = {
    "shapes": _View("share", 0.95, "tokens/s of chosen shapes by those of the best fixed shape", "round trip, ms"),
    "fleet": _View("ratio", 0.97, "tokens/s of auto by those of the best of streaming, device and server", "sessions"),
}


class Simulate(Benchmark):
    """The choices of runtime and verifier against the best fixed ones, in simulated scenarios."""

    name = "simulate"
    purpose = "The runtime's choices on devices, links and verifiers that are described by their times."
    summary = "shapes of drafts, and fleets of sessions, in simulated scenarios"
    description = f"""\
Simulate devices, links and verifiers that are described by their times. Loops, sessions, growth of trees, prices and
scheduler are the real ones; only time is simulated. The drafter's predictions are recorded at every position of the
target's answers: --recording FILE is read, or made if it is not there (half a second and more a token).

  shapes     tokens a second of drafts whose shape the runtime chooses, by those of the best fixed shape, which is
             chosen for each scenario with knowledge of its answers; aim: {_VIEWS["shapes"].aim} or more
  fleet      tokens a second of 1 to 256 sessions at once on one verifier, each with a device of its own, if runtime and
             verifier choose who drafts and what is verified (auto), by those of the best of streaming, of drafts by
             the device alone, and by the server alone (copies); steps of the target take what they do on a processor
             in 4 bits and in float32, and on a GPU; all write the same texts, which is checked; aim:
             {_VIEWS["fleet"].aim} or more

For each kind of scenario a row shows the median, the worst of 100, the worst, and the share that reaches the aim; then
means: of shapes tokens (tau), steps, nodes and continued nodes of a draft, of fleets auto by streaming, and sessions in
a pass. Times of the worst scenarios: a step of the device's drafter and each node that it continues (query); a pass of
the target, and each token in it or a pass with all sessions (full pass); the round trip (trip).
"""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = options.adder(parser)
        add("question", "what to simulate, see above", choices=tuple(_VIEWS))
        add("--recording FILE", "recorded predictions; options from --questions on are for making them", required=True)
        add("--scenarios N", "number of scenarios (default: 1000 shapes, 200 fleets)")
        add("--seed", "of the scenarios (default %(default)s)", type=int, default=0)
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

        options.check_at_least(args, scenarios=1, seed=0, max_new_tokens=2)
        recording, question = _recording(args), args.question
        count = args.scenarios or {"shapes": 1000, "fleet": 200}[question]
        tokens = simulation.TOKENS if question == "shapes" else simulation.FLEET_TOKENS
        settings = {"question": question, "drafter": recording.drafter, "ngrams": recording.ngrams}
        settings |= {"answers": len(recording.answers), "tokens": sum(recording.lengths)}
        settings |= {"tokens_of_a_scenario": tokens, "seed": args.seed}
        found: list[dict[str, Any]] = []
        measured = Measured(lambda: {"scenarios": found}, settings, recording.fingerprints)
        yield measured
        if question == "shapes":
            draw, compare = simulation.draw_shapes, simulation.Field(recording).run
        else:
            draw, compare = simulation.draw_fleets, partial(simulation.compare_fleets, recording)
        drawn = draw(count, args.seed, recording.lengths)
        for scenario in Progress(drawn, total=count, desc="simulate", unit="scenario"):
            found.append(compare(scenario))
            yield measured

    def tables(self, result: Result) -> list[Table]:
        settings = result["settings"]
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
        header = ["kind", "scenarios", "median", "1 of 100", "worst", f"at {view.aim} or above", *means]
        cases = [
            [each["kind"], each.get("sessions"), each["best"], each[view.figure], *each["ms"].values()]
            for each in worst
        ]
        return [
            Table(header, [*rows, _summary("all", scenarios, view)], f"{view.title}:", note),
            Table(["kind", "sessions", "best", view.figure, *times], cases, title="The worst (times in ms):"),
        ]

    def plot(self, result: Result, figure: Figure) -> None:
        """Draw the scenarios' figure, sorted, and against the round trip or the number of sessions."""
        view, scenarios = _VIEWS[result["settings"]["question"]], result["scenarios"]
        ranks, across = figure.subplots(1, 2)
        figures = [each[view.figure] for each in view.sorted(scenarios)]
        ranks.plot([100 * (at + 0.5) / len(figures) for at in range(len(figures))], figures)
        ranks.set(title="all scenarios", xlabel="scenarios that are worse (%)", ylabel=view.title)
        for kind in sorted({each["kind"] for each in scenarios}):
            alike = [each for each in scenarios if each["kind"] == kind]
            places = [each.get("sessions", each["ms"]["trip"]) for each in alike]
            across.plot(places, [each[view.figure] for each in alike], ".", markersize=4, label=kind)
        across.set(title=f"by {view.across}", xlabel=view.across)
        for axes in (ranks, across):
            axes.axhline(view.aim, linestyle="--", linewidth=1, color="grey")
        if scenarios:
            across.legend()


def _summary(kind: str, scenarios: Sequence[dict[str, Any]], view: _View) -> list[object]:
    figures = [each[view.figure] for each in view.sorted(scenarios)]
    if not figures:
        return [kind, 0, *[None] * 4]
    reached = sum(figure >= view.aim for figure in figures) / len(figures)
    means = [sum(each["means"][name] for each in scenarios) / len(scenarios) for name in scenarios[0]["means"]]
    return [kind, len(figures), median(figures), figures[len(figures) // 100], figures[0], reached, *means]


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
