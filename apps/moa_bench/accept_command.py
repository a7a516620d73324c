"""``moa-bench accept`` on the command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moa_bench.accept import AcceptSettings, Device, Results, measure
from moa_bench.questions import Question, read_questions
from moa_bench.table import format_table
from moa_bench.tally import rounded
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.errors import MoaError
from moa_runtime.extras import require_extra
from moa_runtime.paths import default_bundle
from moa_runtime.session.events import Sampling
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
    parser.add_argument(
        "--questions", type=Path, required=True, metavar="FILE", help="JSON lines in the format of Spec-Bench"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions")
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="what moa-export wrote (default: where it writes by itself)"
    )
    parser.add_argument("--model", help="target: the built-in default, a folder, or a Hub id")
    parser.add_argument(
        "--drafter", type=Path, metavar="FOLDER", help="checkpoint of the server half (default: the shipped weights)"
    )
    parser.add_argument(
        "--draft-length", type=int, default=6, metavar="N", help="tokens of each draft, a chain (default %(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="tokens of an answer at most (default %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="of the target; 0, the default, is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="of the target, when sampling (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the target, when sampling (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 130 with what there is, marked as partial, when interrupted.

    Raises:
        MoaError: bad input.
    """
    sampling = Sampling(args.temperature, args.top_p, args.seed)
    settings = AcceptSettings(args.draft_length, args.max_new_tokens, sampling)
    questions = _read(args)
    bundle = Bundle.open(args.bundle or default_bundle())
    device = _device(bundle)
    engine = _engine(args)
    results = Results(settings.draft_length)
    partial = False
    try:
        measure(_with_progress(questions), device, engine, settings, results)
    except KeyboardInterrupt:
        partial = True
    if args.json:
        print(json.dumps(_as_dict(args, settings, bundle, results, partial)))
    else:
        _print_table(settings, results, partial)
    return 130 if partial else 0


def _read(args: argparse.Namespace) -> list[Question]:
    if args.limit is not None and args.limit < 1:
        raise MoaError(f"--limit must be at least 1, not {args.limit}")
    return read_questions(args.questions, args.limit)


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


def _as_dict(
    args: argparse.Namespace, settings: AcceptSettings, bundle: Bundle, results: Results, partial: bool
) -> dict[str, Any]:
    total = results.total.as_dict()
    return {
        "tau": rounded(results.tau),
        "tasks": {name: tally.as_dict() for name, tally in results.tasks.items()},
        "accuracy_by_depth": total["accuracy_by_depth"],
        "accepted_length_histogram": total["accepted_length_histogram"],
        "rounds": total["rounds"],
        "tokens": total["tokens"],
        "partial": partial,
        "skipped": [dataclasses.asdict(turn) for turn in results.skipped],
        "settings": {
            "questions": args.questions.name,
            "limit": args.limit,
            "target": bundle.manifest.target,
            "draft_length": settings.draft_length,
            "max_new_tokens": settings.max_new_tokens,
            "sampling": dataclasses.asdict(settings.sampling),
        },
        "fingerprints": dataclasses.asdict(bundle.manifest.fingerprints),
        "seconds": round(results.seconds, 2),
    }


def _print_table(settings: AcceptSettings, results: Results, partial: bool) -> None:
    rows = [[name, t.questions, t.rounds, t.tokens, t.tau] for name, t in results.tasks.items()]
    total = results.total
    rows.append(["mean over tasks", total.questions, total.rounds, total.tokens, results.tau])
    print(format_table(["task", "questions", "rounds", "tokens", "tau"], rows))
    print()
    lengths = range(settings.draft_length + 1)
    print(
        format_table(
            ["tokens of a draft", *map(str, lengths)],
            [
                ["accuracy at this depth", "", *total.accuracy_by_depth],
                ["rounds that accepted so many", *total.histogram],
            ],
        )
    )
    print()
    sampling = settings.sampling
    how = f"temperature {sampling.temperature}, top-p {sampling.top_p}, seed {sampling.seed}"
    print(
        f"chain of {settings.draft_length}, {how if sampling.temperature else 'greedy'}, "
        f"answers of at most {settings.max_new_tokens} tokens, {results.seconds:.0f} s"
    )
    for turn in results.skipped:
        print(f"skipped: question {turn.question_id} from turn {turn.turn} on: {turn.reason}", file=sys.stderr)
    if partial:
        print("partial: interrupted before the last question was answered")
