"""``moa-bench accept`` on the command line."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from moa_bench.accept import present
from moa_bench.accept.measure import AcceptSettings, Results, measure
from moa_bench.conversation import Answer
from moa_bench.inprocess import device_of, engine_of, with_progress
from moa_bench.options import (
    add_answer_options,
    add_backend_option,
    add_bundle_option,
    add_question_options,
    add_target_options,
    bundle_of,
    questions_of,
    sampling_of,
)
from moa_bench.output import INTERRUPTED, add_output_options, check_output_options, finish
from moa_bench.result import result_of, rounded
from moa_bench.timeline_option import add_timeline_option, check_timeline_option, recording
from moa_bench.transcript import show_answer
from moa_runtime.drafters.tree import TreeShape
from moa_runtime.errors import MoaError
from moa_runtime.extras import require_extra

_DESCRIPTION = """\
Measure tau, the mean number of tokens that one round (a draft sent, a verdict received) commits.

Device and verifier run in this one process and talk over the real protocol, memory rows encoded as on the
wire; only the network is missing. Every question is a conversation of its own; later turns see the answers
before them. The first token of an answer comes with the verdict on the question and counts for no round.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "accept",
        help="tokens committed per round (tau), on one machine",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_question_options(parser)
    add_bundle_option(parser)
    add_backend_option(parser)
    add_target_options(parser)
    add_answer_options(parser, max_new_tokens=128)
    parser.add_argument(
        "--draft", choices=("chain", "tree"), default="chain", help="shape of the drafts (default %(default)s)"
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help=f"tokens of a tree of --draft-length levels (default {TreeShape().nodes})",
    )
    parser.add_argument("--show", action="store_true", help="print the answers, each token with its origin")
    add_timeline_option(parser)
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; with what there is, marked as partial, when interrupted.

    Raises:
        MoaError: bad input.
    """
    if args.nodes is not None and args.draft == "chain":
        raise MoaError("--nodes is the size of a tree: add --draft tree")
    nodes = None if args.draft == "chain" else (TreeShape().nodes if args.nodes is None else args.nodes)
    settings = AcceptSettings(args.draft_length, nodes, args.max_new_tokens, sampling_of(args))
    check_output_options(args)
    check_timeline_option(args)
    questions = questions_of(args)
    bundle = bundle_of(args)
    require_extra("server", "moa-bench accept")
    device = device_of(bundle, args.backend)
    engine = engine_of(args)
    results = Results(settings.draft_length)

    def show(turn: str, answer: Answer) -> None:
        if args.show:
            show_answer(turn, answer.tokens, answer.origins, device.tokenizer)

    problem = ""
    try:
        with recording(args, "device and verifier") as ends:
            measure(with_progress(questions, "accept"), device, engine, settings, results, show, ends.device)
    except KeyboardInterrupt:
        problem = INTERRUPTED
    result = result_of(
        "accept",
        _figures(results),
        settings={
            "questions": args.questions.name,
            "limit": args.limit,
            "target": bundle.manifest.target,
            "draft_length": settings.draft_length,
            "nodes": settings.nodes,
            "max_new_tokens": settings.max_new_tokens,
            "sampling": dataclasses.asdict(settings.sampling),
        },
        fingerprints=bundle.manifest.fingerprints,
        seconds=results.seconds,
        problem=problem,
    )
    return finish(result, args, present)


def _figures(results: Results) -> dict[str, Any]:
    total = results.total.as_dict()
    return {
        "tau": rounded(results.tau),
        "tasks": {name: tally.as_dict() for name, tally in results.tasks.items()},
        "accuracy_by_depth": total["accuracy_by_depth"],
        "accepted_length_histogram": total["accepted_length_histogram"],
        "questions": total["questions"],
        "rounds": total["rounds"],
        "tokens": total["tokens"],
        "skipped": [dataclasses.asdict(turn) for turn in results.skipped],
    }
