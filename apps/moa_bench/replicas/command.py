"""``moa-bench replicas`` on the command line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys

from moa_bench.options import (
    add_bundle_option,
    add_command,
    add_question_options,
    add_target_options,
    bundle_of,
    check_at_least,
    questions_of,
)
from moa_bench.output import INTERRUPTED, add_output_options, check_output_options, finish
from moa_bench.replicas import MOST_SESSIONS, PROXIES, REPLICAS, present
from moa_bench.replicas.fleet import Fleet
from moa_bench.result import result_of
from moa_runtime.errors import MoaError
from moa_runtime.extras import require_extra
from moa_runtime.tokenizer import ChatTokenizer

_PATIENCE_S = 60.0

_DESCRIPTION = """\
Run two verifiers behind a proxy on this machine, let N chats ask without a pause, drain one verifier, kill the other
once the first is replaced, and say what the chats felt. Every text is compared with the target's plain decoding.

The chats let the verifier draft. Every second one samples, with a seed of its own for each answer; the others are
greedy. Connections stay where they are, so the verifier that is killed has all chats. Behind haproxy: two moa-serve
and the configuration that is shipped; draining is SIGTERM, and one that has ended is started again. Behind ray: the
application for Ray Serve, deployed from a configuration; draining is a deployment with one replica less, and Ray
replaces the one that was killed.

It takes minutes: four times a verifier loads the target, and in each of three phases every chat finishes an answer.
The hundred chats in docs/replicas.md, with a tiny target on two busy cores, wrote for five to six minutes; then all of
their answers are written once more, alone.

resumes           answers that lost their connection and went on
s to go on        from the last confirmed token before to the first one behind: what a reader waits
until replaced    from telling it to end, or its death, until the proxy knew another one in its place
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "what chats feel when one of two replicas drains and one dies"
    parser = add_command(commands, "replicas", summary, _DESCRIPTION, run)
    parser.add_argument(
        "--behind", choices=PROXIES, default=PROXIES[0], help="what stands before them (default %(default)s)"
    )
    parser.add_argument(
        "--sessions",
        type=int,
        default=100,
        metavar="N",
        help=f"chats at once, at most {MOST_SESSIONS} (default %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=48,
        metavar="N",
        help="tokens of an answer at most (default %(default)s)",
    )
    add_question_options(parser, required=False)
    add_bundle_option(parser)
    add_target_options(parser)
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; with what there is, marked as partial, when interrupted or when a session or replica fails.

    Raises:
        MoaError: bad input, or the fleet does not start.
    """
    check_at_least(args, sessions=1, max_new_tokens=1)
    if args.sessions > MOST_SESSIONS:
        raise MoaError(f"--sessions must be at most {MOST_SESSIONS}, not {args.sessions}: all chats have one address")
    check_output_options(args)
    questions = questions_of(args)
    bundle = bundle_of(args)
    if args.max_new_tokens > (context := bundle.manifest.max_context):
        raise MoaError(f"--max-new-tokens must be at most {context}, the target's context, not {args.max_new_tokens}")
    require_extra("bench", "moa-bench replicas")
    # Imported late: the extra may be missing, and --help should answer at once.
    from moa_bench.prompts import prompts_of
    from moa_bench.replicas.figures import figures_of
    from moa_bench.replicas.measure import Phases, Results, compare, measure
    from moa_bench.replicas.session import Session
    from moa_bench.verifier import Verifier
    from moa_drafter.progress import Progress
    from moa_runtime.chat import Chat
    from moa_runtime.loop_settings import LoopSettings
    from moa_runtime.transport import Timing

    tokenizer = ChatTokenizer.from_bundle(bundle)
    prompts, skipped = prompts_of(questions, tokenizer, bundle.manifest.max_context)
    texts = [prompt.text for prompt in prompts]
    settings = LoopSettings(drafting="server", offline="off")
    # All share the processors of this machine: an answer to a ping that comes late is no outage.
    timing = Timing(open_timeout=_PATIENCE_S, ping_timeout=_PATIENCE_S)
    results, problem = Results(), ""
    with _fleet(args) as fleet, Progress(total=3 * args.sessions, desc="replicas", unit="session") as progress:

        async def talk() -> None:
            phases = Phases(args.sessions, progress.update)
            sessions = [
                Session(
                    number,
                    Chat(bundle, fleet.endpoint, drafter=None, settings=settings, timing=timing),
                    texts,
                    args.max_new_tokens,
                    phases.answered,
                )
                for number in range(args.sessions)
            ]
            await measure(sessions, phases, fleet, results)

        try:
            asyncio.run(talk())
            answers = [answer for session in results.sessions for answer in session.answers]
            progress.close()
            with Progress(total=len(answers), desc="replicas: plain decoding", unit="answer") as bar:
                compare(Verifier(fleet.endpoint), answers, args.max_new_tokens, results, bar.update)
        except KeyboardInterrupt:
            problem = INTERRUPTED
        except MoaError as error:
            problem = str(error)
    result = result_of(
        "replicas",
        {**figures_of(results), "skipped": [dataclasses.asdict(question) for question in skipped]},
        settings={
            "behind": args.behind,
            "replicas": REPLICAS,
            "sessions": args.sessions,
            "questions": args.questions.name if args.questions else "built-in",
            "limit": args.limit,
            "target": bundle.manifest.target,
            "max_new_tokens": args.max_new_tokens,
        },
        fingerprints=bundle.manifest.fingerprints,
        seconds=results.seconds,
        problem=problem,
    )
    status = finish(result, args, present)
    if results.different:
        print("moa-bench: texts differ from what the target writes alone", file=sys.stderr)
    return status or int(bool(results.different))


def _fleet(args: argparse.Namespace) -> contextlib.AbstractContextManager[Fleet]:
    options = _options(args)
    if args.behind == "haproxy":
        from moa_bench.replicas.behind_haproxy import behind_haproxy

        return behind_haproxy(options)
    from moa_bench.replicas.behind_ray import behind_ray

    return behind_ray(options)


def _options(args: argparse.Namespace) -> dict[str, object]:
    """Of ``moa-serve``, without dashes. All sessions are one replica's at last."""
    given = {"model": args.model, "drafter": args.drafter}
    chosen = {name: value for name, value in given.items() if value is not None}
    return {**chosen, "threads": 1, "max-sessions": 2 * args.sessions}
