"""``moa-bench device`` on the command line."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moa_bench.device import present
from moa_bench.device.measure import AnswerSettings, Results, StepSettings, measure
from moa_bench.options import (
    add_answer_options,
    add_bundle_option,
    add_command,
    add_draft_length_option,
    add_question_options,
    add_server_options,
    add_target_options,
    bundle_of,
    check_at_least,
    contexts_of,
    endpoint_of,
    questions_of,
    sampling_of,
)
from moa_bench.output import INTERRUPTED, add_output_options, check_output_options, finish
from moa_bench.result import result_of
from moa_bench.verifier import Verifier, open_verifier
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra

if TYPE_CHECKING:
    from moa_drafter.progress import Progress

_DESCRIPTION = """\
Measure what drafting costs the device, for every target in the bundle that this machine can run.

Steps: milliseconds of one drafting step with 1 new token, as in a chain, and with 8, as in a level of a tree;
every new token is a query. A context of N means N cached tokens and N memory rows, both random. Beside each
step, in turns with it, runs its floor: the bare products with stored weights that the step contains, on the
same engine. The ratio of the two medians says how much everything else in the step adds.

Answers: processor seconds of the client, all of its threads, per token of real answers. This stands in for
energy, which programs cannot measure on every device. Of each question the first turn is asked. It needs a
verifier; unless --server names one, one is started, and the client then keeps to the other half of the
processors.

Each target is measured in processes of its own, so that times and memory are its own. Peak memory is that of
loading and of stepping at every context. Loading finds the files in the system's cache.
"""
_CONTEXTS = (0, 128, 512, 1024, 2048)
_PROFILE_CONTEXT = 512


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands, "device", "what drafting costs the device: time, memory, processor time", _DESCRIPTION, run
    )
    add_bundle_option(parser)
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
        metavar="N",
        help="processor threads of a step (default %(default)s, as in the runtime)",
    )
    parser.add_argument(
        "--contexts",
        metavar="N,N,...",
        help=f"contexts of the steps (default {','.join(map(str, _CONTEXTS))}, as far as the target holds them)",
    )
    parser.add_argument(
        "--repeats", type=int, default=50, metavar="N", help="timed calls of each step (default %(default)s)"
    )
    parser.add_argument(
        "--profile",
        type=int,
        nargs="?",
        const=_PROFILE_CONTEXT,
        metavar="CONTEXT",
        help="also show, operator by operator, where the time of a step goes (at context %(const)s by default)",
    )
    parser.add_argument("--no-answers", action="store_true", help="leave out the answers; no verifier is needed")
    add_question_options(parser, required=False)
    add_draft_length_option(parser)
    add_answer_options(parser, max_new_tokens=48)
    add_server_options(parser)
    add_target_options(parser)
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; with what there is, marked as partial, when interrupted or without a verifier.

    Raises:
        MoaError: bad input.
    """
    check_at_least(args, threads=1, repeats=1, draft_length=1, max_new_tokens=1)
    check_output_options(args)
    require_extra("bench", "moa-bench device")
    answers = None if args.no_answers else _answers(args)
    endpoint = endpoint_of(args)
    bundle = bundle_of(args)
    steps = _steps(args, bundle)
    if answers is not None and endpoint is not None:
        Verifier(endpoint).status()  # a wrong address should not show only after the steps
    results = Results()
    problem = ""
    try:
        with _progress(bundle, steps, answers) as bar:
            verifier = partial(open_verifier, endpoint, model=args.model, drafter=args.drafter, dtype=args.dtype)
            measure(bundle, steps, answers, verifier, results, bar.update)
    except KeyboardInterrupt:
        problem = INTERRUPTED
    except MoaError as error:
        problem = str(error)
    result = result_of(
        "device",
        {"targets": results.targets},
        settings={
            "target": bundle.manifest.target,
            **asdict(steps),
            "answers": None if answers is None else _answer_settings(args, answers),
        },
        fingerprints=bundle.manifest.fingerprints,
        seconds=results.seconds,
        problem=problem,
    )
    return finish(result, args, present)


def _steps(args: argparse.Namespace, bundle: Bundle) -> StepSettings:
    """Raises MoaError: a context that the target does not hold."""
    contexts = contexts_of(args.contexts) or _CONTEXTS
    settings = StepSettings(args.threads, contexts, args.repeats, args.profile)
    most = bundle.manifest.max_context - max(settings.tokens)
    if args.contexts is None:
        settings = replace(settings, contexts=tuple(context for context in settings.contexts if context <= most))
    for option, contexts in (("--contexts", settings.contexts), ("--profile", [settings.profile or 0])):
        for context in contexts:
            if not 0 <= context <= most:
                raise MoaError(
                    f"{option} {context} is out of range: the target holds {bundle.manifest.max_context} tokens, "
                    f"{max(settings.tokens)} of them new ones, so give 0 to {most}"
                )
    return settings


def _answers(args: argparse.Namespace) -> AnswerSettings:
    """Raises MoaError: questions or sampling that cannot be."""
    questions = tuple(question.turns[0] for question in questions_of(args))
    return AnswerSettings(questions, args.draft_length, args.max_new_tokens, sampling_of(args))


def _answer_settings(args: argparse.Namespace, answers: AnswerSettings) -> dict[str, Any]:
    """For JSON: the questions by the name of their file."""
    questions = "built-in" if args.questions is None else args.questions.name
    return {**asdict(answers), "questions": questions, "limit": args.limit}


def _progress(bundle: Bundle, steps: StepSettings, answers: AnswerSettings | None) -> Progress:
    """On stderr, over all steps and answers."""
    from moa_drafter.progress import Progress

    each = len(steps.contexts) * len(steps.tokens) + (len(answers.questions) if answers else 0)
    return Progress(total=each * len(bundle.manifest.targets), desc="device", unit="measurement")
