"""Options that several benchmarks share, and the values that they stand for."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

from moa_bench.questions import BUILTIN_QUESTIONS, Question, read_questions
from moa_chat.chat_config import open_bundle
from moa_drafter.pretrained import shipped_names
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError
from moa_runtime.options import DEFAULT_DRAFTER, draft_length_of
from moa_runtime.session.events import Sampling
from moa_runtime.timeline import NO_TIMELINE, Timeline, read_sink, write_timeline
from moa_runtime.transport import Endpoint
from moa_server.engine.dtypes import DTYPES

#: Types of options' values by their names in the help.
_TYPES = {"N": int, "S": float, "MS": float, "FILE": Path, "DIR": Path}


def adder(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """Return a function that adds an option and its help: ``add("--limit N", "only the first N questions")``.

    The word after the option names its value, and chooses the type.
    """

    def add(option: str, text: str, **more: Any) -> None:
        name, _, value = option.partition(" ")
        named = {"metavar": value, "type": _TYPES.get(value)} if value else {}
        parser.add_argument(name, help=text, **{**named, **more})

    return add


def add_question_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add ``--questions`` and ``--limit``; with ``required=False`` the built-in questions are the default."""
    add = adder(parser)
    default = "" if required else f" (default: {len(BUILTIN_QUESTIONS)} built-in questions)"
    add("--questions FILE", f"JSON lines in the format of Spec-Bench{default}", required=required)
    add("--limit N", "only the first N questions")


def questions_of(args: argparse.Namespace) -> list[Question]:
    """Read the questions. Raises MoaError for a limit below 1, or a file that cannot be read."""
    check_at_least(args, limit=1)
    if args.questions is None:
        return list(BUILTIN_QUESTIONS[: args.limit])
    return read_questions(args.questions, args.limit)


def question_settings(args: argparse.Namespace) -> dict[str, object]:
    """Name the questions for JSON, without a path of this machine."""
    return {"questions": args.questions.name if args.questions else "built-in", "limit": args.limit}


def add_bundle_options(parser: argparse.ArgumentParser, *, backend: bool = False) -> None:
    """Add ``--bundle``, and with ``backend`` the choice of a graph in it."""
    add = adder(parser)
    add("--bundle DIR", "what moa-export wrote (default: the folder that it writes to)")
    if backend:
        add("--backend NAME", "onnx, executorch, web or coreml (default: the first that the bundle is for)")


def bundle_of(args: argparse.Namespace) -> Bundle:
    """Open the bundle of ``--bundle``, else of the shipped drafter that ``--drafter`` names, else the default one.
    Raises MoaError: no bundle there, or one that is damaged or of another drafter."""
    if args.bundle is not None:
        return Bundle.open(args.bundle)
    return open_bundle(None, next((name for name in shipped_names() if name == getattr(args, "drafter", None)), None))


def add_target_options(
    parser: argparse.ArgumentParser, *, without_bundle: str = "a name also chooses the bundle, as in moa-chat"
) -> None:
    """Add ``--model``, ``--drafter`` and ``--dtype``; ``without_bundle`` explains the second without ``--bundle``."""
    add = adder(parser)
    add("--model", "target: the built-in default, a folder, a GGUF file, or a Hub id")
    add(
        "--drafter NAME|FOLDER",
        f"checkpoint of the server half: {', '.join(shipped_names())}, or a folder; without --bundle "
        f"{without_bundle} (default: {DEFAULT_DRAFTER})",
    )
    add("--dtype", f"numbers of the target (default {DTYPES[0]}, see moa-serve)", choices=DTYPES)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a verifier of the user's own."""
    add = adder(parser)
    add("--server URL", "measure this verifier instead of starting one")
    add("--token", "its bearer token; safer in the variable MOA_TOKEN")


def endpoint_of(args: argparse.Namespace) -> Endpoint | None:
    """Return the verifier that ``--server`` names; None if one is to be started. Raises MoaError: an invalid address,
    or options beside it that are for a verifier started here."""
    if args.server is None:
        return None
    if any(option is not None for option in (args.model, args.drafter, args.dtype)):
        text = "--model, --drafter and --dtype belong to a verifier that is started here: leave out --server"
        raise MoaError(text, code="contradiction")
    endpoint = Endpoint(args.server, os.environ.get("MOA_TOKEN", "") if args.token is None else args.token)
    _ = endpoint.address  # raises if it is no address
    return endpoint


def add_ngrams_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--ngrams`` and ``--no-ngrams``."""
    text = "mix the drafter with an n-gram index of the conversation, as the runtime does (default: yes)"
    adder(parser)("--ngrams", text, action=argparse.BooleanOptionalAction, default=True)


def add_answer_options(parser: argparse.ArgumentParser, *, max_new_tokens: int, draft_length: bool = True) -> None:
    """Add the options of answers, and with ``draft_length`` that of drafts."""
    add = adder(parser)
    if draft_length:
        chosen = "auto: as many as pay; thompson or thompson-calibrated: as EESD chooses (default %(default)s)"
        add("--draft-length N", f"tokens of each draft, a chain; {chosen}", type=draft_length_of, default="auto")
    add("--max-new-tokens N", "tokens of an answer at most (default %(default)s)", default=max_new_tokens)
    add("--temperature", "of the target; 0, the default, is greedy", type=float, default=0.0)
    add("--top-p", "of the target, when sampling (default %(default)s)", type=float, default=1.0)
    add("--seed", "of the target, when sampling (default %(default)s)", type=int, default=0)


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Return how the target chooses. Raises MoaError for a number out of range."""
    if not 0 <= args.temperature < inf:
        text = f"--temperature must be 0 (greedy) or above, not {args.temperature}"
        raise MoaError(text, code="out_of_range")
    if not 0 < args.top_p <= 1:
        raise MoaError(f"--top-p must be above 0 and at most 1, not {args.top_p}", code="out_of_range")
    if not 0 <= args.seed < 1 << 64:
        raise MoaError(f"--seed must be a whole number of 64 bits, not {args.seed}", code="out_of_range")
    return Sampling(args.temperature, args.top_p, args.seed)


def numbers_of(option: str, text: str, least: float = -inf, most: float = inf) -> tuple[int, ...]:
    """Parse numbers with commas between them: ``"512,128"`` is ``(128, 512)``. Raises MoaError naming the option."""
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        message = f"{option} must be whole numbers with commas between them, not {text!r}"
        raise MoaError(message, code="not_a_number") from error
    for number in numbers:
        if not least <= number <= most:
            bounds = f"at least {least}" if most == inf else f"{least} to {most}"
            raise MoaError(f"{option} must be {bounds}, not {number}", code="out_of_range")
    return numbers


def names_of(option: str, kind: str, text: str, known: Sequence[str]) -> list[str]:
    """Parse names with commas between them, each once. Raises MoaError for an unknown ``kind`` of thing, or none."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            text = f"unknown {kind} {name!r} in {option}; choose from {', '.join(known)}"
            raise MoaError(text, code=f"unknown_{kind}")
    return names


def check_at_least(args: argparse.Namespace, **least: int) -> None:
    """Check options against their least values: ``check_at_least(args, max_new_tokens=1)``. None and words pass. Raises
    MoaError: a smaller number, or NaN; the message names the option."""
    for name, smallest in least.items():
        value = getattr(args, name)
        if not isinstance(value, str | None) and not value >= smallest:
            text = f"--{name.replace('_', '-')} must be at least {smallest}, not {value}"
            raise MoaError(text, code="out_of_range")


def add_timeline_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--timeline``, see :func:`recording`."""
    adder(parser)(
        "--timeline FILE",
        "write the work of device and verifier over time as a Chrome trace (JSON) that Perfetto opens; of a "
        "verifier that was not started here only the device's side is known",
    )


@contextlib.contextmanager
def recording(args: argparse.Namespace, process: str = "device") -> Iterator[tuple[Timeline, Sequence[str]]]:
    """Record while the context is open and write the file at its end, also after an error.

    Yields the timeline of this process, which is called ``process`` in the trace, and options of ``moa-serve`` that
    make the verifier record too. Without ``--timeline`` nothing is recorded. Raises MoaError: the file cannot be
    written.
    """
    if args.timeline is None:
        yield NO_TIMELINE, ()
        return
    with tempfile.TemporaryDirectory(prefix="moa-timeline-") as scratch:
        sink, device = Path(scratch) / "verifier.json", Timeline(process)
        try:
            yield device, ("--timeline", str(sink))
        finally:
            write_timeline(args.timeline, [*device.events, *(read_sink(sink) if sink.exists() else [])])
