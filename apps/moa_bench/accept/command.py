"""``moa-bench accept`` on the command line."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from moa_bench.accept import present
from moa_bench.accept.answer_file import AnswerFile
from moa_bench.accept.contender import Contender, contenders_of
from moa_bench.accept.measure import AcceptSettings, measure
from moa_bench.accept.replay import ReplayEngine
from moa_bench.accept.written import Answers, write_answers
from moa_bench.conversation import Answer
from moa_bench.inprocess import with_progress
from moa_bench.options import (
    add_answer_options,
    add_backend_option,
    add_bundle_option,
    add_command,
    add_ngrams_option,
    add_question_options,
    add_target_options,
    questions_of,
    sampling_of,
)
from moa_bench.output import INTERRUPTED, add_output_options, check_output_options, finish
from moa_bench.output_file import check_output_file
from moa_bench.pace import Pace
from moa_bench.questions import Question
from moa_bench.result import result_of
from moa_bench.timeline_option import Recording, add_timeline_option, recording
from moa_bench.transcript import show_answer
from moa_drafter.pretrained import offered_names
from moa_runtime.draft_length import ADAPTIVE
from moa_runtime.drafters.base import Budget
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra

_DESCRIPTION = """\
Measure tau, the mean number of tokens that one round (a draft sent, a verdict received) commits.

Device and verifier run in this one process and talk over the real protocol, memory rows encoded as on the
wire; only the network is missing. Every question is a conversation of its own; later turns see the answers
before them. The first token of an answer comes with the verdict on the question and counts for no round.

With --replay the target answers all questions first, many at once, and drafts are compared with its answers
instead of being verified: tau is the same (rounding may decide otherwise between two equally likely tokens), in a
fraction of the time. The protocol, the memory rows and what drafts stay the real ones. --answers FILE keeps the
answers for the next run.

With --draft auto drafts have the shape that pays with what device, link and target take, as in the runtime: in
this process, or on machines that --pace tells of. What was chosen and the time of a token are in the result. With
--draft thompson or thompson-calibrated chains have the length that EESD's Thompson sampling draws.

What drafts is a bundle's graph, by default that of the default bundle. With --drafter or --against and without
--bundle it is the checkpoint itself, in PyTorch and float32; it may be of any architecture that moa-train knows.
A shipped one goes by its name; a word with a slash is always a folder. The name sssd is a drafter without a model,
which copies from the conversation and from --datastore FILE (SSSD, arXiv 2411.05894). All that are there at once:

  moa-bench accept --questions FILE --against {names}
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    described = _DESCRIPTION.format(names=" ".join(offered_names()))
    parser = add_command(commands, "accept", "tokens committed per round (tau), on one machine", described, run)
    add_question_options(parser)
    add_bundle_option(parser)
    add_backend_option(parser)
    add_target_options(parser, without_bundle="it drafts itself, and may be sssd")
    parser.add_argument(
        "--against",
        nargs="+",
        metavar="NAME|FOLDER",
        help="drafters to measure after it on the same questions, as checkpoints in float32, and to compare with it: "
        f"{', '.join(offered_names())}, or folders",
    )
    parser.add_argument(
        "--draft",
        choices=("chain", "tree", *ADAPTIVE),
        default="chain",
        help="shape of the drafts; auto: what pays, as in the runtime; thompson, thompson-calibrated: chains, as in "
        "EESD (default %(default)s)",
    )
    parser.add_argument(
        "--pace",
        metavar="STEP,QUERY,PASS,TOKEN,ROUND_TRIP",
        help="where --draft chooses: milliseconds that a step of the drafter takes and each token that it continues, a "
        "pass of the target and each token that it is over, and the round trip (default: as long as they take here)",
    )
    tree = Budget.tree()
    parser.add_argument(
        "--draft-length",
        type=int,
        metavar="N",
        help=f"tokens of a chain (default {AcceptSettings.draft_length}), or levels of a tree (default {tree.levels})",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help=f"tokens of a tree (default {tree.nodes})")
    parser.add_argument(
        "--width", type=int, metavar="N", help=f"tokens continued on each level of a tree (default {tree.width})"
    )
    add_ngrams_option(parser)
    parser.add_argument(
        "--datastore",
        type=Path,
        metavar="FILE",
        help="copy from these earlier texts too, of moa-export datastore (default: none)",
    )
    add_answer_options(parser, max_new_tokens=128)
    parser.add_argument(
        "--replay", action="store_true", help="compare drafts with answers that the target writes before, all at once"
    )
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="FILE",
        help="with --replay: keep the target's answers in this file, and take those that it holds already",
    )
    parser.add_argument("--show", action="store_true", help="print the answers, each token with its origin")
    add_timeline_option(parser)
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; with what there is, marked as partial, when interrupted.

    Raises:
        MoaError: bad input.
    """
    settings = settings_of(args)
    check_output_options(args)
    check_output_file("timeline", args)
    questions = questions_of(args)
    require_extra("server", "moa-bench accept")
    contenders = contenders_of(args, settings.draft_length)
    problem = ""
    try:
        answers = _answers(contenders[0], questions, settings, args.answers) if args.replay else None
        with recording(args, "device and verifier") as ends:
            for contender in contenders:
                _measure(contender, questions, settings, answers, ends, show=args.show)
    except KeyboardInterrupt:
        problem = INTERRUPTED
    first, *others = contenders
    result = result_of(
        "accept",
        {
            **first.figures(),
            "skipped": [dataclasses.asdict(turn) for turn in first.results.skipped],
            "rivals": [contender.figures() for contender in others],
        },
        settings={
            "questions": args.questions.name,
            "limit": args.limit,
            "target": first.target,
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
        },
        fingerprints=first.device.fingerprints,
        seconds=sum(contender.results.seconds for contender in contenders),
        problem=problem,
    )
    return finish(result, args, present)


def settings_of(args: argparse.Namespace) -> AcceptSettings:
    """The shape of the drafts that is asked for, and how answers are written.

    Raises:
        MoaError: options that contradict each other, or a number out of range.
    """
    rest = {"max_new_tokens": args.max_new_tokens, "sampling": sampling_of(args)}
    if args.answers and not args.replay:
        raise MoaError("--answers keeps what --replay compares with: add --replay")
    pace = None if args.pace is None else Pace.parse(args.pace)
    adaptive = next((word for word in ADAPTIVE if word == args.draft), None)
    if pace is not None and adaptive is None:
        raise MoaError("--pace is what drafts of --draft auto go by: add that or a thompson, or leave out --pace")
    if adaptive is not None:
        if args.draft_length is not None:
            raise MoaError(f"--draft {adaptive} chooses the length by itself: leave out --draft-length or --draft")
        if adaptive == "auto" and args.replay and pace is None:
            raise MoaError("--draft auto goes by the target's time, and a replay takes none: add --pace")
    if args.draft == "tree":
        asked = {"nodes": args.nodes, "levels": args.draft_length, "width": args.width}
        tree = dataclasses.replace(Budget.tree(), **{name: value for name, value in asked.items() if value is not None})
        width = tree.width if args.width is not None else min(tree.width, tree.nodes)
        return AcceptSettings(tree.levels, tree.nodes, width, **rest)
    for option in ("nodes", "width"):
        if getattr(args, option) is not None:
            raise MoaError(f"--{option} is the size of a tree: add --draft tree")
    length = AcceptSettings.draft_length if args.draft_length is None else args.draft_length
    return AcceptSettings(length, **rest, adaptive=adaptive, pace=pace)


def _answers(contender: Contender, questions: list[Question], settings: AcceptSettings, path: Path | None) -> Answers:
    """What the target, the same for every contender, answers to ``questions``; kept in ``path``, if there is one."""
    from moa_drafter.progress import Progress

    engine, turns = contender.engine, sum(len(question.turns) for question in questions)
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
            contender.device.tokenizer,
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            known=kept.answers if kept else {},
            on_answers=keep,
            on_known=bar.update,
        )


def _measure(
    contender: Contender,
    questions: list[Question],
    settings: AcceptSettings,
    answers: Answers | None,
    ends: Recording,
    *,
    show: bool,
) -> None:
    def show_it(turn: str, answer: Answer) -> None:
        if show:
            show_answer(turn, answer.tokens, answer.origins, contender.device.tokenizer)

    asked = with_progress(questions, f"accept: {contender.name}")
    engine = contender.engine
    judge = engine if answers is None else ReplayEngine(engine, answers, has_rows=bool(engine.row_reads))
    measure(asked, contender.device, judge, settings, contender.results, show_it, ends.device)
