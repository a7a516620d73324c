"""Options that several benchmarks share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from moa_bench.builtin_questions import BUILTIN_QUESTIONS
from moa_bench.questions import Question, read_questions
from moa_chat.chat_config import open_bundle
from moa_drafter.pretrained import shipped_names
from moa_runtime.bundle import Bundle
from moa_runtime.draft_length import draft_length_of
from moa_runtime.drafter_names import DEFAULT_DRAFTER
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.transport import Endpoint
from moa_server.options import DTYPES


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """A command that ``run`` runs; its description keeps its lines."""
    parser = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    return parser


def add_question_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """``required=False``: without a file the built-in questions are asked."""
    default = "" if required else f" (default: {len(BUILTIN_QUESTIONS)} built-in questions)"
    parser.add_argument(
        "--questions",
        type=Path,
        required=required,
        metavar="FILE",
        help=f"JSON lines in the format of Spec-Bench{default}",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions")


def questions_of(args: argparse.Namespace) -> list[Question]:
    """Raises MoaError: a limit below 1, or a file that cannot be read (a broken line is named by number)."""
    if args.limit is not None and args.limit < 1:
        raise MoaError(f"--limit must be at least 1, not {args.limit}")
    if args.questions is None:
        return list(BUILTIN_QUESTIONS[: args.limit])
    return read_questions(args.questions, args.limit)


def add_bundle_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="what moa-export wrote (default: where it writes by itself)"
    )


def add_backend_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", metavar="NAME", help="onnx, executorch, web or coreml (default: the first that the bundle is for)"
    )


def bundle_of(args: argparse.Namespace) -> Bundle:
    """That of ``--bundle``, else that of the shipped drafter which ``--drafter`` names, else the default one.

    Raises:
        MoaError: no bundle there, or one that is damaged or of another drafter.
    """
    if args.bundle is not None:
        return Bundle.open(args.bundle)
    return open_bundle(None, next((name for name in shipped_names() if name == getattr(args, "drafter", None)), None))


def add_target_options(
    parser: argparse.ArgumentParser, *, without_bundle: str = "a name also chooses the bundle, as in moa-chat"
) -> None:
    """The target, and the drafter's checkpoint.

    Args:
        without_bundle: what ``--drafter`` means where there is no ``--bundle``.
    """
    parser.add_argument("--model", help="target: the built-in default, a folder, or a Hub id")
    parser.add_argument(
        "--drafter",
        metavar="NAME|FOLDER",
        help=f"checkpoint of the server half: {', '.join(shipped_names())}, or a folder; without --bundle "
        f"{without_bundle} (default: {DEFAULT_DRAFTER})",
    )


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """A verifier of the user's own, or the numbers of the one started for the benchmark."""
    parser.add_argument("--server", metavar="URL", help="measure this verifier instead of starting one")
    parser.add_argument("--dtype", choices=DTYPES, help=f"numbers of the target (default {DTYPES[0]}, see moa-serve)")
    parser.add_argument("--token", help="its bearer token; safer in the variable MOA_TOKEN")


def endpoint_of(args: argparse.Namespace) -> Endpoint | None:
    """Raises MoaError: no verifier's address, or options beside it that are for one started here."""
    if args.server is None:
        return None
    if any(option is not None for option in (args.model, args.drafter, args.dtype)):
        raise MoaError("--model, --drafter and --dtype belong to a verifier that is started here: leave out --server")
    endpoint = Endpoint(args.server, os.environ.get("MOA_TOKEN", "") if args.token is None else args.token)
    _ = endpoint.address  # raises on what is no address
    return endpoint


def add_draft_length_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-length",
        type=draft_length_of,
        default="auto",
        metavar="N",
        help="tokens of each draft, a chain, or auto: as many as pay; thompson or thompson-calibrated: as EESD chooses "
        "(default %(default)s)",
    )


def add_ngrams_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ngrams",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="mix what drafts with an n-gram index of the conversation, as the runtime does (default: yes)",
    )


def add_answer_options(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help="tokens of an answer at most (default %(default)s)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="of the target; 0, the default, is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="of the target, when sampling (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the target, when sampling (default %(default)s)")


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Raises MoaError: a number out of range."""
    if not 0 <= args.temperature < float("inf"):
        raise MoaError(f"--temperature must be 0 (greedy) or above, not {args.temperature}")
    if not 0 < args.top_p <= 1:
        raise MoaError(f"--top-p must be above 0 and at most 1, not {args.top_p}")
    if not 0 <= args.seed < 1 << 64:
        raise MoaError(f"--seed must be a whole number of 64 bits, not {args.seed}")
    return Sampling(args.temperature, args.top_p, args.seed)


def contexts_of(text: str | None) -> tuple[int, ...] | None:
    """What ``--contexts`` says: ``"512,128"`` is ``(128, 512)``. Raises MoaError."""
    try:
        return None if text is None else tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise MoaError(f"--contexts must be whole numbers with commas between them, not {text!r}") from error


def check_at_least(args: argparse.Namespace, **least: int) -> None:
    """``check_at_least(args, max_new_tokens=1)``. Raises MoaError naming the option."""
    for name, smallest in least.items():
        value = getattr(args, name)
        if not isinstance(value, str | None) and not value >= smallest:  # nor is NaN
            raise MoaError(f"--{name.replace('_', '-')} must be at least {smallest}, not {value}")
