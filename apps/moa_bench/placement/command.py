"""``moa-bench placement`` on the command line."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from moa_bench.options import add_command, check_at_least
from moa_bench.output import INTERRUPTED, add_output_options, check_output_options, finish
from moa_bench.placement import present
from moa_bench.result import result_of
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra

_DESCRIPTION = """\
Compare who the runtime lets draft (auto) with the device alone and the server alone, in scenarios: a device, a link
and a verifier that are told by their times, drawn at random, some of which change in the middle.

The drafting loop, its choice, the sessions of both ends, the drafts and their prices are the real ones; only time is
simulated. What the drafter expects was recorded by moa-bench shapes: --recording FILE. Both ends draft with that
drafter, each with prices of its own. All three write the same text, which is checked. A figure is the milliseconds a
token of auto by those of whoever was faster in the scenario, which nobody can know before; first tokens are left out.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands, "placement", "who drafts, against device and server alone, in simulated scenarios", _DESCRIPTION, run
    )
    parser.add_argument(
        "--recording", type=Path, required=True, metavar="FILE", help="of moa-bench shapes: what the drafter expected"
    )
    parser.add_argument("--scenarios", type=int, default=1000, metavar="N", help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the scenarios (default %(default)s)")
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; with what there is, marked as partial, when interrupted.

    Raises:
        MoaError: bad input.
    """
    check_at_least(args, scenarios=1, seed=0)
    check_output_options(args)
    require_extra("server", "moa-bench placement")
    from moa_bench.placement.measure import compared
    from moa_bench.placement.scenarios import TOKENS, scenarios
    from moa_bench.shapes.recording import Recording
    from moa_bench.shapes.replay import Replay
    from moa_drafter.progress import Progress

    if not args.recording.exists():
        raise MoaError(f"there is no {args.recording}: make it with moa-bench shapes --recording {args.recording}")
    recording = Recording.read(args.recording)
    replays = [Replay(recording, answer) for answer in recording.answers]
    began, problem, outcomes = time.monotonic(), "", []
    drawn = scenarios(args.scenarios, args.seed, recording.lengths)
    try:
        for scenario in Progress(drawn, total=args.scenarios, desc="placement", unit="scenario"):
            outcomes.append(compared(replays, scenario))
    except KeyboardInterrupt:
        problem = INTERRUPTED
    result = result_of(
        "placement",
        {"scenarios": [outcome.as_dict() for outcome in outcomes]},
        settings={**recording.settings, "tokens_of_a_scenario": TOKENS, "scenarios": args.scenarios, "seed": args.seed},
        fingerprints=recording.fingerprints,
        seconds=time.monotonic() - began,
        problem=problem,
    )
    return finish(result, args, present)
