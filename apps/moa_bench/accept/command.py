"""``moa-bench accept`` on the command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any

from moa_bench.accept import present
from moa_bench.accept.measure import AcceptSettings, Device, Results, measure
from moa_bench.conversation import Answer
from moa_bench.options import (
    add_answer_options,
    add_bundle_option,
    add_question_options,
    add_target_options,
    bundle_of,
    questions_of,
    sampling_of,
)
from moa_bench.output import INTERRUPTED, add_output_options, check_output_options, finish
from moa_bench.questions import Question
from moa_bench.result import result_of, rounded
from moa_bench.transcript import show_answer
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.extras import require_extra
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.engine import Engine

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
    add_target_options(parser)
    add_answer_options(parser, max_new_tokens=128)
    parser.add_argument("--show", action="store_true", help="print the answers, each token with its origin")
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; with what there is, marked as partial, when interrupted.

    Raises:
        MoaError: bad input.
    """
    settings = AcceptSettings(args.draft_length, args.max_new_tokens, sampling_of(args))
    check_output_options(args)
    questions = questions_of(args)
    bundle = bundle_of(args)
    device = _device(bundle)
    engine = _engine(args)
    results = Results(settings.draft_length)

    def show(turn: str, answer: Answer) -> None:
        if args.show:
            show_answer(turn, answer.tokens, answer.origins, device.tokenizer)

    problem = ""
    try:
        measure(_with_progress(questions), device, engine, settings, results, show)
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
            "max_new_tokens": settings.max_new_tokens,
            "sampling": dataclasses.asdict(settings.sampling),
        },
        fingerprints=bundle.manifest.fingerprints,
        seconds=results.seconds,
        problem=problem,
    )
    return finish(result, args, present)


def _device(bundle: Bundle) -> Device:
    backend, manifest = load_backend(bundle), bundle.manifest
    return Device(
        manifest.fingerprints,
        ChatTokenizer.from_bundle(bundle),
        # The graph is shared; each conversation has caches of its own.
        lambda: MoaDrafter(backend, max_context=manifest.max_context, stop_tokens=manifest.stop_tokens),
        manifest.stop_tokens,
    )


def _with_progress(questions: list[Question]) -> Iterable[Question]:
    """The questions, with a progress bar on stderr if that is a terminal."""
    from tqdm import tqdm

    return tqdm(questions, desc="accept", unit="question", disable=None)


def _engine(args: argparse.Namespace) -> Engine:
    require_extra("server", "moa-bench accept")
    # Imported late: this brings torch, and --help should answer at once.
    from moa_drafter.checkpoint import shipped_checkpoint
    from moa_drafter.target import DEFAULT_TARGET
    from moa_server.transformers_engine import TransformersEngine

    return TransformersEngine.load(args.model or DEFAULT_TARGET, args.drafter or shipped_checkpoint())


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
