"""``moa-bench offline`` on the command line."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

from moa_bench.inprocess import device_of, engine_of, with_progress
from moa_bench.offline import present
from moa_bench.offline.measure import WRITERS, OfflineSettings, Results, Trial, measure
from moa_bench.offline.show import show_trial
from moa_bench.options import (
    add_backend_option,
    add_bundle_option,
    add_command,
    add_ngrams_option,
    add_question_options,
    add_target_options,
    bundle_of,
    questions_of,
)
from moa_bench.output import INTERRUPTED, add_output_options, check_output_options, finish
from moa_bench.result import result_of
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra

_DESCRIPTION = """\
Measure what a device writes while the link is away, and what is left of it when the link is back.

The first turn of every question is asked, and the link is cut in the middle of the answer. Then, each from
the same point, write on: "writer", the bundle's whole model, if it has one; "moa", its drafter, which stops
when it is no longer sure; "moa-unbounded", the same drafter without its manners; "ngram", which copies what
followed the last one to five tokens earlier in the conversation; and "nothing", a device that waits.
Afterwards each reconnects, and the target verifies the text in one pass: it is rolled back from the first
token that the target would not have written.
Everything is greedy, so the text before the cut does not depend on the drafter, and results from before and after
a training can be compared.

For each writer and length:
  written            tokens on screen during the outage; fewer than the length where the writer ends the turn or stops
  agreement          leading tokens equal to the target's own continuation
  kept, share_kept   tokens that survive the reconnection, also as a share of all written
  perplexity         of the text under the target: exp of the mean negative log-probability of a token
  target_perplexity  the same of the target's own continuation, as many tokens as were written
  perplexity_ratio   the one divided by the other
  distinct           share of 4-grams that are new in their text; target_distinct the same of the target's own

Read the ratio together with "distinct": a text that repeats itself is easy to predict, so its ratio falls with
the length, even below 1.

Device and verifier run in this one process and talk over the real protocol, without sockets or waiting. Going
offline is no special case there: the session hears that the connection is gone, and its tentative text grows.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    defaults = OfflineSettings()
    parser = add_command(
        commands, "offline", "what is written without the link, and how much of it is kept", _DESCRIPTION, run
    )
    add_question_options(parser)
    add_bundle_option(parser)
    add_backend_option(parser)
    add_target_options(parser)
    parser.add_argument(
        "--after",
        type=int,
        default=defaults.after,
        metavar="N",
        help="committed tokens of the answer before the cut; a question with a shorter answer is skipped, "
        "and listed (default %(default)s)",
    )
    parser.add_argument(
        "--lengths",
        default=",".join(map(str, defaults.lengths)),
        metavar="N,N,...",
        help="tokens to write during the cut (default %(default)s)",
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="print, for every question, the text before the cut, what was written offline with the part that "
        "was kept and the part rolled back, and what the target wrote instead",
    )
    add_ngrams_option(parser)
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; with what there is, marked as partial, when interrupted.

    Raises:
        MoaError: bad input.
    """
    settings = OfflineSettings(args.after, _lengths(args.lengths))
    check_output_options(args)
    questions = questions_of(args)
    bundle = bundle_of(args)
    require_extra("server", "moa-bench offline")
    problem = ""
    with with_progress(questions, "offline") as asked:  # to be seen while all is loaded, too
        device = device_of(bundle, args.backend, ngrams=args.ngrams)
        engine = engine_of(args)
        from moa_server.engine.scoring import log_probabilities  # imported late: it brings torch

        results = Results(settings.lengths, WRITERS if device.new_writer else WRITERS[1:])

        def show(trial: Trial) -> None:
            if args.show:
                show_trial(trial, device.tokenizer)

        asked.unpause()  # what is to go is reckoned without the loading
        try:
            score = functools.partial(log_probabilities, engine)
            measure(asked, device, engine, score, settings, results, show)
        except KeyboardInterrupt:
            problem = INTERRUPTED
    result = result_of(
        "offline",
        _figures(results),
        settings={
            "questions": args.questions.name,
            "limit": args.limit,
            "target": bundle.manifest.target,
            "ngrams": args.ngrams,
            "after": settings.after,
            "lengths": list(settings.lengths),
        },
        fingerprints=bundle.manifest.fingerprints,
        seconds=results.seconds,
        problem=problem,
    )
    return finish(result, args, present)


def _lengths(text: str) -> tuple[int, ...]:
    """``"64,16"`` is ``(16, 64)``. Raises MoaError."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise MoaError(f"--lengths must be whole numbers with commas between them, not {text!r}") from error


def _figures(results: Results) -> dict[str, Any]:
    return {
        "questions": results.questions,
        "writers": {
            writer: {str(length): tally.as_dict() for length, tally in tallies.items()}
            for writer, tallies in results.tallies.items()
        },
        "skipped": [dataclasses.asdict(question) for question in results.skipped],
    }
