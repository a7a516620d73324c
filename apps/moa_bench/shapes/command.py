"""``moa-bench shapes`` on the command line."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from moa_bench.accept.written import write_answers
from moa_bench.inprocess import engine_of
from moa_bench.options import (
    add_backend_option,
    add_bundle_option,
    add_command,
    add_ngrams_option,
    add_question_options,
    add_target_options,
    bundle_of,
    check_at_least,
    questions_of,
)
from moa_bench.output import INTERRUPTED, add_output_options, check_output_options, finish
from moa_bench.result import result_of
from moa_bench.shapes import present
from moa_bench.shapes.fixed import SHAPES
from moa_bench.shapes.measure import TOKENS, Field, scenarios
from moa_bench.shapes.record import record
from moa_bench.shapes.recording import Recording
from moa_bench.shapes.replay import Replay
from moa_runtime.backends.load import load_backend
from moa_runtime.drafting.cost_model import Throughput
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra
from moa_runtime.tokenizer import ChatTokenizer

_DESCRIPTION = f"""\
Compare drafts whose shape the runtime chooses by its price with the best of {len(SHAPES)} fixed shapes (nothing, copies
alone, chains, trees), in scenarios: a device, a link and a target that are told by their times, drawn at random.

The drafting loop, its controller, the growth of trees and the protocol are the real ones; only time is not. What
the drafter expects was recorded before, at every position of the target's answers: --recording FILE is read if it is
there, and made first if it is not (half a second and more for each token of the answers). The best shape is
chosen for each scenario with what its answers bring, which no program can know before.
"""

_MAX_NEW_TOKENS = 80


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "shapes",
        "drafts at their price against the best fixed shape, in simulated scenarios",
        _DESCRIPTION,
        run,
    )
    parser.add_argument(
        "--recording",
        type=Path,
        required=True,
        metavar="FILE",
        help="what the drafter expected in answers of the target; the options from --questions on are for making it",
    )
    parser.add_argument("--scenarios", type=int, default=1000, metavar="N", help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the scenarios (default %(default)s)")
    add_question_options(parser, required=False)
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help=f"tokens of an answer at most (default {_MAX_NEW_TOKENS})"
    )
    add_bundle_option(parser)
    add_backend_option(parser)
    add_target_options(parser)
    add_ngrams_option(parser)
    parser.set_defaults(ngrams=None)  # a recording that is there says it
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; with what there is, marked as partial, when interrupted.

    Raises:
        MoaError: bad input.
    """
    from moa_drafter.progress import Progress

    check_at_least(args, scenarios=1, seed=0, max_new_tokens=2)
    check_output_options(args)
    require_extra("server", "moa-bench shapes")
    recording = _recording(args)
    replays = [Replay(recording, answer) for answer in recording.answers]
    began, problem, outcomes = time.monotonic(), "", []
    try:
        with Progress(total=len(replays), desc="shapes: fixed", unit="answer") as bar:
            field = Field(replays, bar.update)
        drawn = scenarios(args.scenarios, args.seed, recording.lengths)
        for scenario in Progress(drawn, total=args.scenarios, desc="shapes", unit="scenario"):
            outcomes.append(field.run(scenario, Throughput()))
    except KeyboardInterrupt:
        problem = INTERRUPTED
    result = result_of(
        "shapes",
        {"scenarios": [outcome.as_dict() for outcome in outcomes]},
        settings={
            **recording.settings,
            "tokens_of_a_scenario": TOKENS,
            "scenarios": args.scenarios,
            "seed": args.seed,
            "fixed_shapes": len(SHAPES),
        },
        fingerprints=recording.fingerprints,
        seconds=time.monotonic() - began,
        problem=problem,
    )
    return finish(result, args, present)


def _recording(args: argparse.Namespace) -> Recording:
    """That of ``--recording``, which is made if it is not there. Raises MoaError."""
    path: Path = args.recording
    if path.exists():
        for option in ("questions", "limit", "max_new_tokens", "bundle", "backend", "model", "drafter"):
            if getattr(args, option) is not None:
                name = option.replace("_", "-")
                raise MoaError(f"{path} holds a recording already: leave out --{name}, or choose another file")
        recording = Recording.read(path)
        if args.ngrams not in (None, recording.ngrams):
            made, option = ("with", "--no-ngrams") if recording.ngrams else ("without", "--ngrams")
            raise MoaError(f"{path} was recorded {made} an n-gram index: leave out {option}, or choose another file")
        return recording
    if not path.absolute().parent.is_dir():
        raise MoaError(f"--recording {path}: there is no folder {path.parent}")
    recording = _recorded(args)
    recording.write(path)
    return recording


def _recorded(args: argparse.Namespace) -> Recording:
    """What the bundle's drafter expects in the target's answers to the questions. Raises MoaError."""
    from moa_drafter.progress import Progress

    questions, bundle = questions_of(args), bundle_of(args)
    backend, manifest, engine = load_backend(bundle, args.backend), bundle.manifest, engine_of(args)
    with Progress(total=sum(len(each.turns) for each in questions), desc="shapes: answers", unit="answer") as bar:
        answers = write_answers(
            engine,
            questions,
            ChatTokenizer.from_bundle(bundle),
            max_new_tokens=_MAX_NEW_TOKENS if args.max_new_tokens is None else args.max_new_tokens,
            on_answers=lambda written: bar.update(len(written)),
        )
    longer = {prompt: answer for prompt, answer in answers.items() if len(answer) > 1}  # the rest has no rounds
    if not longer:
        raise MoaError("the target answered nothing longer than a token: ask other --questions")
    ngrams = args.ngrams is not False
    positions = sum(len(answer) - 1 for answer in longer.values())
    with Progress(total=positions, desc="shapes: recording", unit="token") as bar:
        recorded = [
            record(manifest, backend, engine, prompt, answer, ngrams=ngrams, on_position=bar.update)
            for prompt, answer in longer.items()
        ]
    return Recording(
        manifest.target, manifest.fingerprints, manifest.vocab_size, manifest.stop_tokens, ngrams, recorded
    )
