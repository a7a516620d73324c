"""``moa-bench server`` on the command line."""

from __future__ import annotations

import argparse
import dataclasses
import math
from contextlib import ExitStack

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
from moa_bench.result import result_of
from moa_bench.server import MODES, present
from moa_bench.verifier import open_verifier, open_verifiers
from moa_runtime.cpus import available_cpus
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra
from moa_runtime.session.handshake import Limits
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.options import ENGINES
from moa_server.settings import Settings

_MOST_SESSIONS = Settings().max_sessions

_DESCRIPTION = """\
Measure what N sessions at once get from one verifier, for each way in which they are served: chats that draft on
the device, are drafted for by the server, or by whoever is faster (auto), and plain decoding that is streamed.

Each session is a client in a process of its own. In a window all clients begin together and ask one question
after the other, each in a new conversation, until the window is over; the answers under way are then given up.
Only committed tokens that arrived within the window count. In all modes a client asks the same questions in
the same order. Verifier and clients have processors of their own where the machine has two or more.

tokens_per_s      of all sessions together
tokens_per_cpu_s  by processor seconds of the verifier's process, all of its threads; null with --server
ms_per_token      as one session sees it: k tokens that arrive t ms after those before them took t / k ms each;
                  the first token of an answer is left out
ttft_ms           from sending a question to its first token, of answers that began within the window
passes_per_token  forward passes of the target, prompts included, by tokens; passes whose tokens arrive just
                  outside the window blur it
tokens_per_round  committed by one verdict; null when streaming
peak_memory_mb    the verifier's largest resident set, in 10^6 bytes; null with --server
client_cpu_share  processor time of all clients by that of the processors they share; near 1 it is the clients,
                  not the verifier, that limit the figures: real devices would not share processors
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "server", "many sessions at once: drafting against streaming", _DESCRIPTION, run)
    parser.add_argument(
        "--sessions",
        default="1,4,8",
        metavar="N,N,...",
        help=f"how many at once, each from 1 to {_MOST_SESSIONS} (default %(default)s)",
    )
    parser.add_argument(
        "--modes", default=",".join(MODES), metavar="MODE,MODE,...", help="of %(default)s (default: all)"
    )
    parser.add_argument(
        "--seconds", type=float, default=15.0, metavar="S", help="length of a window (default %(default)g)"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, metavar="N", help="windows for each number and mode (default %(default)s)"
    )
    add_question_options(parser, required=False)
    add_bundle_option(parser)
    add_target_options(parser)
    add_server_options(parser)
    parser.add_argument(
        "--engine",
        metavar="NAME,NAME,...",
        help=f"what runs the target in the verifier, of {','.join(ENGINES)}; several are compared in one run (default: "
        f"{ENGINES[0]})",
    )
    add_draft_length_option(parser)
    add_answer_options(parser, max_new_tokens=64)
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; whole windows only, marked as partial, when interrupted or when a process ends early.

    Raises:
        MoaError: bad input.
    """
    sessions, modes, engines = sessions_of(args.sessions), modes_of(args.modes), engines_of(args.engine)
    _check_numbers(args)
    sampling = sampling_of(args)
    endpoint = endpoint_of(args)
    if endpoint is not None and engines:
        raise MoaError("--engine belongs to a verifier that is started here: leave out --server")
    check_output_options(args)
    questions = questions_of(args)
    bundle = bundle_of(args)
    require_extra("bench", "moa-bench server")
    # Imported late: the extra may be missing, and --help should answer at once.
    from moa_bench.prompts import prompts_of
    from moa_bench.server.figures import figures_of
    from moa_bench.server.fleet import open_fleet
    from moa_bench.server.measure import Results, measure, schedule, warm_up
    from moa_bench.server.modes import Workload
    from moa_drafter.progress import Progress

    prompts, skipped = prompts_of(questions, ChatTokenizer.from_bundle(bundle), bundle.manifest.max_context)
    # Conversations are forgotten as soon as they are left, but perhaps not before a client begins its next.
    options = ("--keep-seconds", "0", "--max-sessions", str(2 * sessions[-1]))
    results, problem = Results(), ""
    wanted = {"model": args.model, "drafter": args.drafter, "dtype": args.dtype}
    with ExitStack() as running:
        verifiers = (
            running.enter_context(open_verifiers(engines, **wanted, options=options))
            if engines
            else {"": running.enter_context(open_verifier(endpoint, **wanted, options=options))}
        )
        client_cpus, pinned = available_cpus(), all(verifier.pinned for verifier in verifiers.values())
        work = Workload(prompts, args.draft_length, args.max_new_tokens, sampling)
        with open_fleet(sessions[-1], bundle.folder, work) as fleet:
            warm_up(verifiers, fleet, modes)
            windows = schedule(sessions, args.repeats, modes, tuple(verifiers))
            try:
                measure(Progress(windows, desc="server", unit="window"), args.seconds, verifiers, fleet, results)
            except KeyboardInterrupt:
                problem = INTERRUPTED
            except MoaError as error:
                if not results.windows:
                    raise
                problem = str(error)
    figures = figures_of(results.windows, args.seconds, client_cpus)
    result = result_of(
        "server",
        {**figures, "skipped": [dataclasses.asdict(question) for question in skipped]},
        settings={
            "sessions": sessions,
            "modes": modes,
            "engines": engines,
            "seconds": args.seconds,
            "repeats": args.repeats,
            "questions": args.questions.name if args.questions else "built-in",
            "limit": args.limit,
            "target": bundle.manifest.target,
            "dtype": args.dtype,
            "draft_length": args.draft_length,
            "max_new_tokens": args.max_new_tokens,
            "sampling": dataclasses.asdict(sampling),
            "own_verifier": endpoint is None,
            "client_cpus": client_cpus,
            "pinned": pinned,
        },
        fingerprints=bundle.manifest.fingerprints,
        seconds=results.seconds,
        problem=problem,
    )
    return finish(result, args, present)


def sessions_of(text: str) -> list[int]:
    """``"8,1,4,4"`` is ``[1, 4, 8]``. Raises MoaError: no number, or one out of range."""
    try:
        sessions = sorted({int(number) for number in text.split(",")})
    except ValueError:
        sessions = []
    if not sessions or sessions[0] < 1 or sessions[-1] > _MOST_SESSIONS:
        raise MoaError(
            f"--sessions {text}: expected numbers from 1 to {_MOST_SESSIONS} with commas between, such as 1,4,8"
        )
    return sessions


def modes_of(text: str) -> list[str]:
    """``"stream"`` is ``["stream"]``. Raises MoaError: an unknown mode."""
    modes = list(dict.fromkeys(text.split(",")))
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise MoaError(f"unknown mode {unknown[0]!r} in --modes; choose from {', '.join(MODES)}")
    return modes


def engines_of(text: str | None) -> list[str]:
    """``"vllm"`` is ``["vllm"]``, None none. Raises MoaError: an unknown engine."""
    engines = [] if text is None else list(dict.fromkeys(text.split(",")))
    unknown = [engine for engine in engines if engine not in ENGINES]
    if unknown:
        raise MoaError(f"unknown engine {unknown[0]!r} in --engine; choose from {', '.join(ENGINES)}")
    return engines


def _check_numbers(args: argparse.Namespace) -> None:
    if not 0 < args.seconds < math.inf:
        raise MoaError(f"--seconds must be above 0, not {args.seconds:g}")
    check_at_least(args, repeats=1, max_new_tokens=1)
    longest_draft = Limits().max_draft_tokens
    if isinstance(args.draft_length, int) and not 1 <= args.draft_length <= longest_draft:
        raise MoaError(f"--draft-length must be 1 to {longest_draft} tokens, not {args.draft_length}")
