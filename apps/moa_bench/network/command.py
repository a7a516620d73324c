"""``moa-bench network`` on the command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from moa_bench.link import LinkProfile
from moa_bench.link.options import DIRECT, add_link_options, check_without_tls, link_names, profiles_of
from moa_bench.network import present
from moa_bench.network.settings import NetworkSettings
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
    endpoint_of,
    questions_of,
    sampling_of,
)
from moa_bench.output import INTERRUPTED, add_output_options, check_output_options, finish
from moa_bench.output_file import check_output_file
from moa_bench.result import result_of
from moa_bench.timeline_option import add_timeline_option, recording
from moa_bench.transcript import show_answer
from moa_bench.verifier import open_verifier
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.transport import Endpoint

if TYPE_CHECKING:
    from moa_bench.network.answer import Answer, Turn

MODES = ("stream", "per-call", "device", "server", "auto", "oracle")
_DESCRIPTION = f"""\
Measure what an answer costs over a network, for each way of serving the same target on the same engine:

  stream    the server decodes alone and streams its tokens, as chat APIs do
  per-call  one request for each token; the server keeps its cache
  device    the device drafts with its bundle, the server verifies
  server    the server goes on by itself within a credit, and drafts for itself where it has a drafter
  auto      whoever is faster, as the runtime finds out: what a chat does by default
  oracle    as device, but what is drafted is always right and takes no time: the limit

Every question is asked over every link in all modes, which take turns in coming first. Only first turns are asked,
each in a new conversation on a new connection, through a new link, so that outages and recorded links begin anew
with each answer. Connecting is not timed.

ttft_ms              from sending the question to the first token; mean over the answers
ms_per_token         k tokens that arrive t ms after those before them took t / k ms each; without first tokens
longest_gap_ms       the longest silence within an answer; mean over the answers
tokens_per_round     committed by one verdict; null when streaming
passes_per_token     forward passes of the target, prompts included, by tokens; all sessions of a verifier count,
                     so one of your own (--server) should have nothing else to do
bytes_up_per_token   what the link carried, TCP payload; over {DIRECT!r} the messages alone, without HTTP's and
bytes_down_per_token WebSocket's framing
identical            whether every answer is, token for token, what the target writes alone

Below the tables, auto's ms a token by that of stream, and by that of the fastest of stream, device and server, with
95 % intervals: bootstrap over the questions, each of which all modes answered. Each answer weighs the same.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands, "network", "latency, passes and bytes per token over emulated links", _DESCRIPTION, run
    )
    add_link_options(parser)
    parser.add_argument(
        "--modes",
        default=",".join(MODES),
        metavar="NAMES",
        help="ways of serving to compare, separated by commas (default %(default)s)",
    )
    add_question_options(parser, required=False)
    add_bundle_option(parser)
    add_target_options(parser)
    add_server_options(parser)
    add_draft_length_option(parser)
    add_answer_options(parser, max_new_tokens=32)
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="processor threads of the drafter (default %(default)s)"
    )
    parser.add_argument(
        "--answer-timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="give up after an answer that takes longer (default %(default)g)",
    )
    parser.add_argument("--show", action="store_true", help="print the answers, each token with its origin")
    add_timeline_option(parser)
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; whole answers only, marked as partial, when interrupted or when something fails.

    Raises:
        MoaError: bad input, or a failure before the first answer.
    """
    check_at_least(args, draft_length=1, max_new_tokens=1, threads=1, answer_timeout=1)
    settings = NetworkSettings(
        args.draft_length, args.max_new_tokens, sampling_of(args), args.threads, args.answer_timeout
    )
    names = mode_names(args.modes)
    endpoint = endpoint_of(args)
    links = links_of(args, endpoint)
    check_output_options(args)
    check_output_file("timeline", args)
    questions = questions_of(args)
    bundle = bundle_of(args)
    require_extra("bench", "moa-bench network")
    # Imported late: --help should answer at once.
    from moa_bench.network.measure import Results, measure, warm_up
    from moa_bench.network.modes import make_modes
    from moa_bench.prompts import prompts_of
    from moa_drafter.progress import Progress

    tokenizer = ChatTokenizer.from_bundle(bundle)
    prompts, skipped = prompts_of(questions, tokenizer, bundle.manifest.max_context)
    results, problem = Results(links, names), ""
    total = len(prompts) * len(links) * len(names)

    with recording(args) as ends:
        modes = make_modes(names, bundle, settings, ends.device)

        def on_answer(link: str, mode: str, turn: Turn, answer: Answer) -> None:
            progress.update()
            ends.device.mark(f"answered over {link}, {mode}", "answers", tokens=len(answer.tokens))
            if args.show:
                show_answer(f"[{link}, {mode}] {turn.text}", answer.tokens, answer.origins, tokenizer)

        wanted = {"model": args.model, "drafter": args.drafter, "dtype": args.dtype}
        with (
            open_verifier(endpoint, **wanted, options=ends.verifier_options) as verifier,
            Progress(total=total, desc="network", unit="answer") as progress,
        ):
            warm_up(prompts[0], verifier, modes, settings)
            try:
                measure(prompts, verifier, links, modes, settings, results, on_answer)
            except KeyboardInterrupt:
                problem = INTERRUPTED
            except MoaError as error:
                if not results.answers:
                    raise
                problem = str(error)
    result = result_of(
        "network",
        {
            "profiles": results.as_dict(),
            "auto": results.paired(),
            "skipped": [dataclasses.asdict(question) for question in skipped],
        },
        settings={
            "questions": args.questions.name if args.questions else "built-in",
            "limit": args.limit,
            "trace": [path.name for path in args.trace] if args.trace else None,
            "round_trip_ms": args.round_trip_ms,
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


def mode_names(chosen: str) -> list[str]:
    """``"auto, stream"`` is ``["auto", "stream"]``. Raises MoaError: an unknown mode, or none."""
    names = list(dict.fromkeys(name.strip() for name in chosen.split(",")))
    for name in names:
        if name not in MODES:
            raise MoaError(f"unknown mode {name!r} in --modes; choose from {', '.join(MODES)}")
    return names


def links_of(args: argparse.Namespace, endpoint: Endpoint | None) -> Mapping[str, LinkProfile | None]:
    """The links by name, None for the way there is.

    Raises:
        MoaError: see :func:`moa_bench.link.options.profiles_of`; or an emulator before a verifier with TLS.
    """
    profiles = {profile.name: profile for profile in profiles_of(args)}
    if profiles:
        check_without_tls(endpoint, f"measure it with --profiles {DIRECT}")
    return {name: profiles.get(name) for name in link_names(args)}
