"""``moa-bench accept``: how many tokens a round commits, on one machine."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moa_bench import options
from moa_bench.benchmark import Benchmark, Measured, Result, Table, sampling_note, skipped_notes
from moa_bench.harness import (
    Answer,
    Conversation,
    Device,
    LoopbackVerifier,
    RefusedError,
    Round,
    checkpoint_pair,
    device_of,
    engine_of,
    without_model,
)
from moa_bench.options import bundle_of
from moa_bench.questions import Question
from moa_bench.result import ratio, rounded
from moa_bench.simulated_clock import Clock, Pace
from moa_bench.target_answers import AnswerFile, Answers, ReplayEngine, rows_of, turn_messages, write_answers
from moa_bench.transcript import show_answer
from moa_drafter.config import CHECKPOINT_FOLDER
from moa_drafter.drafter_weights import parameters_of
from moa_drafter.pretrained import checkpoint_of, offered_names
from moa_runtime.datastore import Datastore
from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.draft_controllers import Controller, FixedShape, controller_for
from moa_runtime.errors import MoaError
from moa_runtime.options import ADAPTIVE, Adaptive
from moa_runtime.session.events import Sampling
from moa_runtime.session.handshake import Limits
from moa_runtime.session.memory_rows import encode_rows, encoding_of
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_server.engine.base import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from moa_server.engine.engine import LocalEngine

CHECKPOINT = "float32 checkpoint"
NO_MODEL = "none"
_DESCRIPTION = """\
Measure tau, the mean number of tokens that one round (a draft sent, a verdict received) commits.

Device and verifier run in this one process and talk over the real protocol, memory rows encoded as on the
wire; only the network is missing. Every question is a conversation of its own; later turns see the answers
before them. The first token of an answer comes with the verdict on the question and belongs to no round.

With --replay the target answers all questions first, in batches, and drafts are compared with its answers
instead of being verified: tau is the same (rounding may decide differently between two equally likely tokens), in a
fraction of the time. The protocol, the memory rows and the drafters are the real ones. --answers FILE keeps the
answers for the next run.

With --draft auto drafts have the shape that pays with the times of device, link and target, as in the runtime: in
this process, or on machines that --pace describes. The chosen shapes and the time of a token are in the result. With
--draft thompson or thompson-calibrated chains have the length that EESD's Thompson sampling draws.

By default the default bundle's graph drafts. With --drafter or --against and without --bundle a checkpoint drafts,
in PyTorch and float32; it may be of any architecture that moa-train knows. A shipped one is called by its name; a
word with a slash is always a folder. sssd is a drafter without a model that copies from the conversation and from
--datastore FILE (SSSD, arXiv 2411.05894). All at once:

  moa-bench accept --questions FILE --against {names}
"""
_CHOSEN = {
    "auto": "as large as pays",
    "thompson": "chains by Thompson sampling",
    "thompson-calibrated": "chains by calibrated Thompson sampling",
}
#: Depths in the table of drafts whose shape is chosen; deeper ones share a column.
_DEPTHS_SHOWN = 6


class Accept(Benchmark):
    """Tokens committed per round, for one drafter or several."""

    name = "accept"
    purpose = "How many tokens a round commits, on one machine."
    summary = "tokens committed per round (tau), on one machine"
    description = _DESCRIPTION.format(names=" ".join(offered_names()))

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = options.adder(parser)
        options.add_question_options(parser)
        options.add_bundle_options(parser, backend=True)
        options.add_target_options(parser, without_bundle="it drafts itself, and may be sssd")
        add(
            "--against NAME|FOLDER",
            "drafters to measure after it on the same questions, as checkpoints in float32, and to compare with "
            f"it: {', '.join(offered_names())}, or folders",
            nargs="+",
        )
        add(
            "--draft",
            "shape of the drafts; auto: the one that pays, as in the runtime; thompson, thompson-calibrated: "
            "chains, as in EESD (default %(default)s)",
            choices=("chain", "tree", *ADAPTIVE),
            default="chain",
        )
        add(
            "--pace STEP,QUERY,PASS,TOKEN,ROUND_TRIP",
            "with a chosen shape: milliseconds of a drafter's step and of each token that it continues, of a pass "
            "of the target and of each token in it, and of the round trip (default: the times of this process)",
        )
        tree, settings = Budget.tree(), AcceptSettings
        add(
            "--draft-length N",
            f"tokens of a chain (default {settings.draft_length}), or levels of a tree (default {tree.levels})",
        )
        add("--nodes N", f"tokens of a tree (default {tree.nodes})")
        add("--width N", f"tokens continued on each level of a tree (default {tree.width})")
        options.add_ngrams_option(parser)
        add("--datastore FILE", "also copy from these earlier texts, made by moa-export datastore (default: none)")
        options.add_answer_options(parser, max_new_tokens=settings.max_new_tokens, draft_length=False)
        add("--replay", "compare drafts with answers that the target writes before", action="store_true")
        add("--answers FILE", "with --replay: keep the target's answers in this file, and reuse those in it")
        add("--show", "print the answers, each token with its origin", action="store_true")
        options.add_timeline_option(parser)

    def measure(self, args: argparse.Namespace) -> Generator[Measured, None, None]:
        from moa_drafter.progress import Progress

        settings = settings_of(args)
        questions = options.questions_of(args)
        candidates = candidates_of(args)
        first = candidates[0]
        answers = _target_answers(first, questions, settings, args.answers) if args.replay else None
        results = [Results(settings.draft_length, settings.timed) for _ in candidates]

        def figures() -> dict[str, Any]:
            found = [
                {**candidate.properties(), **each.as_dict()}
                for candidate, each in zip(candidates, results, strict=True)
            ]
            return {**found[0], "skipped": results[0].skipped, "rivals": found[1:]}

        measured = Measured(figures, _settings_for_json(args, settings, first), first.device.fingerprints)
        yield measured
        with options.recording(args, "device and verifier") as (timeline, _):
            for candidate, each in zip(candidates, results, strict=True):
                engine, tokenizer = candidate.engine, candidate.device.tokenizer
                judge = engine if answers is None else ReplayEngine(engine, answers, has_rows=engine.makes_rows)

                def show(turn: str, answer: Answer, tokenizer: Any = tokenizer) -> None:
                    if args.show:
                        show_answer(turn, answer.tokens, answer.origins, tokenizer)

                asked = Progress(questions, desc=f"accept: {candidate.name}", unit="question")
                for _ in count_rounds(asked, candidate.device, judge, settings, each, show, timeline):
                    yield measured

    def tables(self, result: Result) -> list[Table]:
        rows = [[name, t["questions"], t["rounds"], t["tokens"], t["tau"]] for name, t in result["tasks"].items()]
        rows.append(["mean over tasks", result["questions"], result["rounds"], result["tokens"], result["tau"]])
        settings = result["settings"]
        drafted = settings["draft_length"] or _DEPTHS_SHOWN
        histogram, accuracy = result["accepted_length_histogram"], result["accuracy_by_depth"]
        more = [f"more, up to {len(histogram) - 1}"] if len(histogram) > drafted + 1 else []
        deeper = [sum(histogram[drafted + 1 :])] if more else []
        return [
            Table(["task", "questions", "rounds", "tokens", "tau"], rows),
            Table(
                ["tokens of a draft", *map(str, range(drafted + 1)), *more],
                [
                    ["accuracy at this depth", "", *accuracy[:drafted], *("" for _ in more)],
                    ["rounds that accepted this many", *histogram[: drafted + 1], *deeper],
                ],
                note="\n".join([_conditions(result), *skipped_notes(result)]),
            ),
            *([_shape(result)] if settings.get("draft") in _CHOSEN else []),
            *([_comparison(result)] if result.get("rivals") else []),
        ]

    def plot(self, result: Result, figure: Figure) -> None:
        """Draw tau by task, the histogram of accepted lengths, and accuracy by depth."""
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


@dataclass(frozen=True)
class AcceptSettings:
    """Shape of the drafts, and how every answer is written.

    Args:
        draft_length: tokens of each draft, a greedy chain, or levels of each tree; for chosen shapes the least number
            of depths that are counted.
        nodes, width: tokens of each tree (None drafts chains), and nodes continued on each of its levels.
        adaptive: how the shape of each draft is chosen, as in the runtime; None for a fixed shape.
        pace: of simulated machines; None for the times of this one.

    Raises:
        MoaError: a number out of range.
    """

    draft_length: int = 6
    nodes: int | None = None
    width: int = Budget.tree().width
    max_new_tokens: int = 128
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    adaptive: Adaptive | None = None
    pace: Pace | None = None

    def __post_init__(self) -> None:
        length, nodes, width, most = self.draft_length, self.nodes, self.width, Limits().max_draft_tokens
        if not 1 <= length <= most:
            raise MoaError(f"the draft length must be 1 to {most} tokens, not {length}", code="out_of_range")
        if nodes is not None and not length <= nodes <= most:
            text = f"a tree of {length} levels has {length} to {most} nodes, not {nodes}"
            raise MoaError(text, code="out_of_range")
        if nodes is not None and not 1 <= width <= nodes:
            text = f"a level of a tree of {nodes} nodes continues 1 to {nodes}, not {width}"
            raise MoaError(text, code="out_of_range")

    @property
    def timed(self) -> bool:
        """Whether the time of a token says something: the shape depends on it, or it is that of a pace."""
        return self.adaptive == "auto" or self.pace is not None

    def controller(self) -> Controller:
        """Make the controller of one conversation."""
        if self.adaptive is not None:
            return controller_for(self.adaptive)
        if self.nodes is None:
            return FixedShape(Budget.chain(self.draft_length))
        return FixedShape(Budget.tree(self.nodes, self.draft_length, self.width))


def settings_of(args: argparse.Namespace) -> AcceptSettings:
    """Make the settings. Raises MoaError for options that contradict each other, or a number out of range."""
    options.check_at_least(args, max_new_tokens=1)
    rest = {"max_new_tokens": args.max_new_tokens, "sampling": options.sampling_of(args)}
    pace = None if args.pace is None else Pace.parse(args.pace)
    adaptive = next((word for word in ADAPTIVE if word == args.draft), None)
    if args.answers and not args.replay:
        raise MoaError("--answers keeps the answers of --replay: add --replay", code="contradiction")
    if pace is not None and adaptive is None:
        text = "--pace is for chosen shapes: add --draft auto or a thompson, or leave out --pace"
        raise MoaError(text, code="contradiction")
    if adaptive is not None and args.draft_length is not None:
        text = f"--draft {adaptive} chooses the length by itself: leave out --draft-length or --draft"
        raise MoaError(text, code="contradiction")
    if adaptive == "auto" and args.replay and pace is None:
        text = "--draft auto depends on the target's time, and a replay takes none: add --pace"
        raise MoaError(text, code="contradiction")
    if args.draft != "tree" and (args.nodes is not None or args.width is not None):
        raise MoaError("--nodes and --width are the size of a tree: add --draft tree", code="contradiction")
    if args.draft == "tree":
        given = {"nodes": args.nodes, "levels": args.draft_length, "width": args.width}
        tree = dataclasses.replace(Budget.tree(), **{name: size for name, size in given.items() if size is not None})
        width = tree.width if args.width is not None else min(tree.width, tree.nodes)
        return AcceptSettings(tree.levels, tree.nodes, width, **rest)
    draft_length = AcceptSettings.draft_length if args.draft_length is None else args.draft_length
    return AcceptSettings(draft_length, **rest, adaptive=adaptive, pace=pace)


def _settings_for_json(args: argparse.Namespace, settings: AcceptSettings, first: Candidate) -> dict[str, Any]:
    return {
        **options.question_settings(args),
        "target": first.target,
        "dtype": first.engine.facts.dtype,
        "draft": args.draft,
        "pace_ms": settings.pace.in_ms() if settings.pace else None,
        "draft_length": None if settings.adaptive else settings.draft_length,
        "nodes": settings.nodes,
        "width": settings.width if settings.nodes else None,
        "ngrams": args.ngrams,
        "datastore": None if args.datastore is None else args.datastore.name,
        "replay": args.replay,
        "max_new_tokens": settings.max_new_tokens,
        "sampling": dataclasses.asdict(settings.sampling),
    }


def _target_answers(
    candidate: Candidate, questions: list[Question], settings: AcceptSettings, path: Path | None
) -> Answers:
    """Let the target, the same for every candidate, answer the questions; keep the answers in ``path``, if given."""
    from moa_drafter.progress import Progress

    engine, turns = candidate.engine, sum(len(question.turns) for question in questions)
    kept = None
    if path:
        target = engine.fingerprints.target
        kept = AnswerFile(path, target, settings.max_new_tokens, settings.sampling, vocab_size=engine.vocab_size)
    with Progress(total=turns, desc="accept: answers", unit="answer") as bar:

        def keep(written: list[tuple[list[int], list[int]]]) -> None:
            bar.update(len(written))
            if kept:
                kept.add(written)

        return write_answers(
            engine,
            questions,
            candidate.device.tokenizer,
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            known=kept.answers if kept else {},
            on_answers=keep,
            on_known=bar.update,
        )


# -- measuring -------------------------------------------------------------------------------------------


def tau_of(rounds: Sequence[Round]) -> float | None:
    """Return the mean number of tokens committed per round; None without rounds."""
    return sum(each.committed for each in rounds) / len(rounds) if rounds else None


def accuracy_by_depth(rounds: Sequence[Round], least_depth: int) -> list[float | None]:
    """Return conditional acceptance at depths 1, 2, ..., at least ``least_depth`` of them.

    It is the share of rounds with a correct k-th drafted token, of the rounds with k - 1 correct ones and a judged k-th
    one. A token is not judged if the draft was shorter, or if the answer ended before it. Depths without a judged token
    are None. A tree is correct at a depth if one of its tokens there is.
    """
    # Without a bonus token the answer ended with the last accepted one.
    judged = [r.accepted if r.committed == r.accepted else min(r.accepted + 1, r.depth) for r in rounds]
    shares = []
    for depth in range(max([least_depth, *judged])):
        count = sum(depth < each for each in judged)
        shares.append(sum(depth < each.accepted for each in rounds) / count if count else None)
    return shares


def figures_of(rounds: Sequence[Round], questions: int, draft_length: int, *, timed: bool = False) -> dict[str, Any]:
    """Return plain figures for JSON of the rounds of one task, or of several.

    A round is one draft and its verdict. The question's own verdict, which brings the first token of every answer, is
    no round, and its token is not counted. An answer's last round may commit fewer tokens than the drafter had right,
    because the answer ends there; it counts as it is. A long answer weighs more than a short one.

    ``nodes`` and ``levels`` are the mean tokens of a draft and of its longest path, ``steps`` the mean steps of the
    model, ``branched`` the share of drafts with branches. ``ms_per_token`` is the time of all rounds by their tokens,
    None unless ``timed``. The histogram counts rounds by accepted drafted tokens, beginning with none.

    Example: drafts of 3 tokens; one round accepts 2 and commits 3, the next accepts 0 and commits 1. Then tau is 2, the
    histogram ``[1, 0, 1, 0]``, and the accuracy by depth ``[0.5, 1.0, 0.0]``.

    Args:
        draft_length: least number of depths in both lists; they are longer if more tokens were sent, such as copies
            after the draft, and accepted.
    """
    tokens = sum(each.committed for each in rounds)
    seconds = sum(each.seconds for each in rounds) if timed else 0.0
    histogram = np.bincount([each.accepted for each in rounds], minlength=draft_length + 1)
    return {
        "tau": rounded(tau_of(rounds)),
        "rounds": len(rounds),
        "tokens": tokens,
        "questions": questions,
        "nodes": ratio(sum(each.drafted for each in rounds), len(rounds)),
        "levels": ratio(sum(each.depth for each in rounds), len(rounds)),
        "steps": ratio(sum(each.steps for each in rounds), len(rounds)),
        "branched": ratio(sum(each.drafted > each.depth for each in rounds), len(rounds)),
        "ms_per_token": rounded(1000 * seconds / tokens, 2) if seconds else None,
        "accuracy_by_depth": [rounded(share) for share in accuracy_by_depth(rounds, draft_length)],
        "accepted_length_histogram": histogram.tolist(),
    }


@dataclass
class Results:
    """Measurements of one drafter so far, with whole rounds of an unfinished question.

    Attributes:
        rounds: by task, in the order of the questions.
        questions: number of finished questions by task.
        target_passes: forwards of the target, those over questions included.
    """

    draft_length: int
    timed: bool = False
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    questions: Counter[str] = field(default_factory=Counter)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    target_passes: int = 0

    @property
    def tau(self) -> float | None:
        """The benchmark's figure: the plain mean of the tasks' taus, without tasks that have no rounds."""
        taus = [tau for rounds in self.rounds.values() if (tau := tau_of(rounds)) is not None]
        return sum(taus) / len(taus) if taus else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain figures for JSON; ``tau`` is the mean over tasks, that of each task over its rounds."""
        figures = partial(figures_of, draft_length=self.draft_length, timed=self.timed)
        every = [each for rounds in self.rounds.values() for each in rounds]
        return {
            **figures(every, self.questions.total()),
            "tau": rounded(self.tau),
            "tasks": {task: figures(rounds, self.questions[task]) for task, rounds in self.rounds.items()},
            "draft_ms": ratio(1000 * sum(each.draft_s for each in every), len(every), 2),
            "target_passes": self.target_passes,
        }


def count_rounds(
    questions: Iterable[Question],
    device: Device,
    engine: Engine,
    settings: AcceptSettings,
    results: Results,
    on_answer: Callable[[str, Answer], None] = lambda turn, answer: None,
    timeline: Timeline = NO_TIMELINE,
) -> Generator[None, None, None]:
    """Hold every conversation to its end and count its rounds into ``results``; yields after each question.

    A turn that does not fit the target's context is skipped with the rest of its question, and listed.

    Args:
        on_answer: called with each user's turn and its answer.
        timeline: gets the spans of both ends.

    Raises:
        RefusedError: bundle and engine do not belong together.
    """
    passes = engine.forwards
    for question in questions:
        rounds = results.rounds.setdefault(question.task, [])
        try:
            skipped = _converse(question, device, engine, settings, rounds.append, on_answer, timeline)
        finally:
            results.target_passes = engine.forwards - passes
        results.skipped += [skipped] if skipped else []
        results.questions[question.task] += 1
        yield


def _converse(
    question: Question,
    device: Device,
    engine: Engine,
    settings: AcceptSettings,
    count: Callable[[Round], None],
    on_answer: Callable[[str, Answer], None],
    timeline: Timeline,
) -> dict[str, Any] | None:
    """Ask all turns of one question; returns the turn that did not fit (they count from 1), if any, for JSON."""
    history: list[dict[str, str]] = []
    drafter, controller, clock = device.new_drafter(), settings.controller(), Clock(settings.pace)
    prints, stops, rows = device.fingerprints, device.stop_tokens, device.row_encoding
    with closing(LoopbackVerifier(engine, timeline, settings.pace)) as verifier:
        conversation = Conversation(verifier, drafter, prints, stops, controller, clock, timeline, row_encoding=rows)
        for number, text in enumerate(question.turns, 1):
            prompt = device.tokenizer.continue_chat(conversation.committed, history, text)
            try:
                answer = conversation.answer(
                    prompt, settings.sampling, max_new_tokens=settings.max_new_tokens, on_round=count
                )
            except RefusedError as refusal:
                if refusal.code != "CONTEXT_FULL":
                    raise
                return {"question_id": question.id, "turn": number, "reason": str(refusal)}
            on_answer(text, answer)
            history += turn_messages(text, device.tokenizer.decode(answer.tokens))
    return None


# -- tables ----------------------------------------------------------------------------------------------


def _shape(result: Result) -> Table:
    """Make the table of chosen shapes."""
    names = ("nodes", "levels", "steps", "branched", "tau", "ms_per_token")
    pace = result["settings"]["pace_ms"]
    times = ", ".join(f"{name.replace('_', ' ')} {ms:g}" for name, ms in pace.items()) if pace else ""
    condition = f"at a pace of ({times}) ms" if pace else "at the pace of this machine, without a network"
    return Table(
        ["shape of the drafts", "tokens", "levels", "steps", "with branches", "tau", "ms a token"],
        [[name, *map(each.get, names)] for name, each in {**result["tasks"], "all": result}.items()],
        note=f"{condition}; tau of all is the mean over tasks",
    )


def _comparison(result: Result) -> Table:
    """Make the table with a column for each drafter."""
    drafters = [result, *result["rivals"]]
    tasks = list(dict.fromkeys(task for drafter in drafters for task in drafter["tasks"]))
    depths = range(min(len(drafter["accuracy_by_depth"]) for drafter in drafters))

    def row(title: str, name: str) -> list[object]:
        return [title, *(drafter[name] for drafter in drafters)]

    millions = [
        [title, *(drafter[name] / 1e6 for drafter in drafters)]
        for title, name in (("parameters, millions", "parameters"), ("and of the target's layers", "frozen_parameters"))
    ]
    same = "same settings, one after the other:"
    return Table(
        row("", "name"),
        [
            *(row(name, name) for name in ("architecture", "weights")),
            *millions,
            row("bytes a row", "row_bytes"),
            *(row(name, name) for name in ("questions", "rounds")),
            *([f"tau, {task}", *(d["tasks"].get(task, {}).get("tau") for d in drafters)] for task in tasks),
            row("tau, mean over tasks", "tau"),
            *([f"accuracy at depth {n + 1}", *(d["accuracy_by_depth"][n] for d in drafters)] for n in depths),
            row("ms a draft", "draft_ms"),
            *([row("ms a token", "ms_per_token")] if drafters[0].get("ms_per_token") else []),
            row("passes of the target", "target_passes"),
        ],
        f"Partial, so not of the same questions; {same}" if result["partial"] else f"Same questions, {same}",
    )


def _conditions(result: Result) -> str:
    settings = result["settings"]
    drafts = f"chain of {settings['draft_length']}"
    if settings.get("draft") in _CHOSEN:
        drafts = _CHOSEN[settings["draft"]]
    elif settings.get("nodes"):
        drafts = f"tree of {settings['nodes']} nodes in {settings['draft_length']} levels"
        drafts += f", {settings['width']} continued on each"
    replayed = ", written before and replayed" if settings.get("replay") else ""
    texts = " and a datastore" if settings.get("datastore") else ""
    mixed = f"mixed with an n-gram index of the conversation{texts}, " if settings.get("ngrams") else ""
    return (
        f"{drafts}, {sampling_note(settings['sampling'])}, {mixed}"
        f"answers of at most {settings['max_new_tokens']} tokens{replayed}, {result['seconds']:.0f} s without loading"
    )


# -- the drafters to measure -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A drafter to measure: its name for people, and its weights: of a bundle, a checkpoint, or none."""

    name: str
    weights: str
    target: str
    device: Device
    engine: LocalEngine

    def properties(self) -> dict[str, object]:
        """Return what the drafter is, for JSON.

        ``parameters`` are those of the checkpoint, ``frozen_parameters`` those of the target's layers that a step runs
        too, ``row_bytes`` the size of a token's memory row on the wire.
        """
        drafter = self.engine.drafter
        parameters, frozen = (0, 0) if drafter is None else parameters_of(drafter.config)
        return {
            "name": self.name,
            "architecture": drafter.config.architecture if drafter else self.name,
            "weights": self.weights,
            "parameters": parameters,
            "frozen_parameters": frozen,
            "row_bytes": row_bytes(self.engine),
        }


def candidates_of(args: argparse.Namespace) -> list[Candidate]:
    """Load the drafter that ``--bundle`` or ``--drafter`` names, then those of ``--against``. Raises MoaError: a file
    that cannot be found or read, or drafter and target that do not fit together."""
    # Imported late: this brings torch, and --help should answer at once.
    from moa_drafter.target import load_target
    from moa_drafter.target_source import DEFAULT_TARGET

    def place_of(given: str | None) -> str | Path:
        return without_model(given or "") or checkpoint_of(given)

    model, against = args.model or DEFAULT_TARGET, [place_of(given) for given in args.against or ()]
    if args.datastore is not None and not args.ngrams and not any(map(without_model, (args.drafter, *against))):
        text = "--datastore is copied from together with n-grams: leave out --datastore or --no-ngrams"
        raise MoaError(text, code="contradiction")
    if args.bundle is not None or (args.drafter is None and not against):
        bundle = bundle_of(args)
        prints = bundle.manifest.fingerprints
        datastore = None if args.datastore is None else Datastore.open(args.datastore, prints.tokenizer)
        device = device_of(bundle, args.backend, ngrams=args.ngrams, datastore=datastore)
        engine = engine_of(args)
        found = [Candidate("bundle", "bundle", bundle.manifest.target, device, engine)]
        target, places = load_target(model) if against else None, against
    else:
        if args.backend is not None:
            raise MoaError("--backend chooses among the graphs of a bundle: add --bundle", code="contradiction")
        if args.dtype not in (None, "float32"):
            text = "the target of a checkpoint computes in float32: add --bundle, or leave out --dtype"
            raise MoaError(text, code="contradiction")
        first = place_of(args.drafter)
        if args.drafter is None:  # the default drafter is not measured twice
            against = [place for place in against if place != first]
        found, target, places = [], load_target(model), [first, *against]
    target_name = Path(model).resolve().name if Path(model).is_dir() else model  # no path of this machine
    for place in places:
        weights = NO_MODEL if without_model(place) else CHECKPOINT
        ends = checkpoint_pair(place, target, ngrams=args.ngrams, datastore=args.datastore)
        found.append(Candidate(_distinct(_name(place), found), weights, target_name, *ends))
    return found


def row_bytes(engine: LocalEngine) -> int:
    """Return the bytes of one token's memory row on the wire, with its scales; 0 if none are sent."""
    if engine.drafter is None or (rows := rows_of(engine, [0])) is None:
        return 0
    encoded = encode_rows(0, rows.keys, rows.values, encoding_of(engine.drafter.config.architecture))
    return len(encoded.data) + len(encoded.scales)


def _name(place: str | Path) -> str:
    """Return the drafter's name, or the folder's; for moa-train's ``OUT/drafter`` that of the run."""
    if isinstance(place, str):
        return place
    place = place.resolve()
    return place.parent.name if place.name == CHECKPOINT_FOLDER and place.parent.name else place.name


def _distinct(name: str, before: Sequence[Candidate]) -> str:
    """Number a name that occurred before: the second ``a`` is ``a (2)``."""
    same = sum(each.name == name or each.name.startswith(f"{name} (") for each in before)
    return f"{name} ({same + 1})" if same else name
