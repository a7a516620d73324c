"""``moa-bench outage`` on the command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moa_bench.link.options import check_without_tls
from moa_bench.link.profiles import PROFILES, get_profile
from moa_bench.options import (
    add_bundle_option,
    add_command,
    add_question_options,
    add_server_options,
    add_target_options,
    bundle_of,
    check_at_least,
    endpoint_of,
    questions_of,
)
from moa_bench.outage import present
from moa_bench.output import INTERRUPTED, add_output_options, check_output_options, finish
from moa_bench.result import result_of
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra
from moa_runtime.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from moa_bench.outage.measure import Outage

_DESCRIPTION = """\
Cut the link in the middle of an answer, and say what is there once it is back.

Chats as they are by default ask over an emulated link. Behind some confirmed tokens the link hangs, as in a tunnel:
nothing passes, and nobody is told. The device writes on with what its bundle has, and the verifier finishes the answer
meanwhile.

confirmed            tokens of the target on screen when the link returned
written offline      tokens of the device behind them
kept                 of those, how many the target would have written
ms to the Hello      from the link's return until the client greets on a new connection; none where the outage was too
                     short to be noticed, and what follows counts from the link's return
from it to a token   from the Hello to the next confirmed token
to the whole answer  from the Hello to the last one
identical            whether every answer is, token for token, what the target writes alone
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "an answer whose link is lost in the middle, and what is there when it is back"
    parser = add_command(commands, "outage", summary, _DESCRIPTION, run)
    parser.add_argument(
        "--profile",
        default="lte",
        metavar="NAME",
        help=f"the link: one of {', '.join(sorted(PROFILES))} (default %(default)s)",
    )
    parser.add_argument(
        "--after", type=int, default=40, metavar="N", help="confirmed tokens before the cut (default %(default)s)"
    )
    parser.add_argument(
        "--outage", type=float, default=20.0, metavar="S", help="seconds without the link (default %(default)g)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="tokens of an answer at most (default %(default)s)"
    )
    add_question_options(parser, required=False)
    add_bundle_option(parser)
    add_target_options(parser)
    add_server_options(parser)
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; whole answers only, marked as partial, when interrupted or when something fails.

    Raises:
        MoaError: bad input, or a failure before the first answer.
    """
    profile = get_profile(args.profile)
    check_at_least(args, after=1, outage=1, max_new_tokens=args.after + 1)
    endpoint = endpoint_of(args)
    check_without_tls(endpoint, "name one without TLS")
    check_output_options(args)
    questions = questions_of(args)
    bundle = bundle_of(args)
    require_extra("bench", "moa-bench outage")
    # Imported late: --help should answer at once.
    from moa_bench.outage.measure import OutageSettings, Results, measure
    from moa_bench.prompts import prompts_of
    from moa_bench.verifier import open_verifier
    from moa_drafter.progress import Progress

    settings = OutageSettings(args.after, args.outage, args.max_new_tokens)
    tokenizer = ChatTokenizer.from_bundle(bundle)
    prompts, too_long = prompts_of(questions, tokenizer, bundle.manifest.max_context)
    results, problem = Results(), ""
    with (
        open_verifier(endpoint, model=args.model, drafter=args.drafter, dtype=args.dtype) as verifier,
        Progress(total=len(prompts), desc="outage", unit="answer") as progress,
    ):
        try:
            measure(bundle, verifier, prompts, profile, settings, results, progress.update)
        except KeyboardInterrupt:
            problem = INTERRUPTED
        except MoaError as error:
            if not results.outages:
                raise
            problem = str(error)
    result = result_of(
        "outage",
        {
            **_figures(results.outages),
            "skipped": [
                *map(dataclasses.asdict, too_long),
                *({"question": text, "reason": "its answer ends before the cut"} for text in results.skipped),
            ],
        },
        settings={
            "profile": args.profile,
            "questions": args.questions.name if args.questions else "built-in",
            "limit": args.limit,
            "target": bundle.manifest.target,
            "dtype": args.dtype,
            **dataclasses.asdict(settings),
            "own_verifier": endpoint is None,
            "pinned": verifier.pinned,
        },
        fingerprints=bundle.manifest.fingerprints,
        seconds=results.seconds,
        problem=problem,
    )
    return finish(result, args, present)


def _figures(outages: Sequence[Outage]) -> dict[str, Any]:
    """Means, and every answer; None where there is none."""

    def mean(name: str, *, times: int = 1, digits: int = 1) -> float | None:
        found = (getattr(outage, name) for outage in outages)
        figures = [times * figure for figure in found if figure is not None]
        return round(sum(figures) / len(figures), digits) if figures else None

    counts = {name: mean(name) for name in ("confirmed", "tentative", "kept", "tokens")}
    spans = {f"{name}_ms": mean(f"{name}_s", times=1000) for name in ("hello", "token", "whole")}
    identical = all(outage.identical for outage in outages)
    every = [dataclasses.asdict(outage) for outage in outages]
    return {"answers": len(outages), **counts, **spans, "identical": identical, "every": every}
