"""``moa-chat``: talk to the target, in the terminal or with one prompt."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from moa_runtime.errors import MoaError

DEFAULT_SERVER = "ws://127.0.0.1:8765"


class UsageError(MoaError):
    """Options that are wrong or exclude each other."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence like every other error, instead of the usage and an exit."""
        raise UsageError(f"{message} (moa-chat --help lists the options)")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="moa-chat",
        description="Chat with a target behind a verifier. A small drafter on this machine proposes the tokens, "
        "and writes on alone while the network is away.",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--terminal", action="store_true", help="chat in this terminal (default in a terminal)")
    mode.add_argument("--once", metavar="PROMPT", help="answer one prompt and leave")
    parser.add_argument("--json", action="store_true", help="with --once: print one JSON object at the end")

    where = parser.add_argument_group("where")
    where.add_argument("--server", metavar="URL", help=f"the verifier (default: $MOA_SERVER or {DEFAULT_SERVER})")
    where.add_argument("--local", action="store_true", help="start a verifier on this machine for as long as the chat")
    where.add_argument("--token", help="bearer token of the verifier; safer in the variable MOA_TOKEN")
    where.add_argument("--tls-ca", type=Path, metavar="FILE", help="trust this certificate authority (PEM) for wss")
    where.add_argument("--bundle", type=Path, metavar="DIR", help="written by moa-export (default: its default)")

    answer = parser.add_argument_group("answers")
    answer.add_argument("--system", metavar="TEXT", help="system message")
    answer.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="default: %(default)s")
    answer.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy, the default")
    answer.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: %(default)s")
    answer.add_argument("--seed", type=int, help="of the sampling (default: a new one for each answer)")

    drafting = parser.add_argument_group("drafting")
    drafting.add_argument("--draft-length", type=int, default=6, metavar="N", help="tokens (default: %(default)s)")
    drafting.add_argument(
        "--backend", metavar="NAME", help="onnx or coreml (default: the first that the bundle is for)"
    )
    drafting.add_argument("--threads", type=int, default=2, metavar="N", help="of the drafter (default: %(default)s)")
    drafting.add_argument(
        "--offline-limit",
        type=int,
        default=256,
        metavar="N",
        help="tokens written at most without the verifier (default: %(default)s)",
    )
    drafting.add_argument(
        "--policy",
        choices=("rollback", "keep"),
        default="rollback",
        help="what becomes of text written offline: back to the first disagreement, or kept (default: %(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 2 after an error the user can mend, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding lacks
    try:
        options = build_parser().parse_args(argv)
        _check(options)
        return _run(options)
    except MoaError as error:
        print(f"moa-chat: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("moa-chat: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read stdout has left. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _check(options: argparse.Namespace) -> None:
    if options.once is None and not options.terminal and not sys.stdin.isatty():
        raise UsageError("stdin is no terminal: pass --once PROMPT, or --terminal to read questions from it")
    if options.once is not None and not options.once.strip():
        raise UsageError("--once needs a prompt, not an empty text")
    if options.json and options.once is None:
        raise UsageError("--json belongs to --once PROMPT")
    if options.local and options.server:
        raise UsageError("--local starts its own verifier: leave out --server")
    if options.local and (options.token or options.tls_ca):
        raise UsageError("--local makes its own token and needs no TLS: leave out --token and --tls-ca")
    for name, least in (("max_new_tokens", 1), ("draft_length", 0), ("threads", 1), ("offline_limit", 0)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(options, name)}")
    if not 0 <= options.temperature < float("inf"):
        raise UsageError(f"--temperature must be 0 (greedy) or larger, not {options.temperature}")
    if not 0 < options.top_p <= 1:
        raise UsageError(f"--top-p must be above 0 and at most 1, not {options.top_p}")
    if options.seed is not None and not 0 <= options.seed < 1 << 64:
        raise UsageError(f"--seed must be between 0 and 2^64 - 1, not {options.seed}")
    for name in ("once", "system"):
        try:
            (getattr(options, name) or "").encode()
        except UnicodeEncodeError:
            raise UsageError(f"--{name} holds bytes that are no valid UTF-8 text") from None


def _run(options: argparse.Namespace) -> int:
    # Imported late, so that --help and refused options answer at once.
    from moa_chat.local import ensure_bundle, local_verifier
    from moa_chat.once import run_once
    from moa_chat.setup import endpoint_for, open_bundle, setup_for
    from moa_chat.terminal import run_terminal

    with contextlib.ExitStack() as stack:
        if options.local:
            # A closed terminal window or `kill` must stop the verifier too.
            for name in ("SIGTERM", "SIGHUP"):
                if hasattr(signal, name):
                    signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
            if options.bundle is None:
                ensure_bundle()
            bundle = open_bundle(options.bundle)
            endpoint = stack.enter_context(local_verifier()).endpoint
        else:
            bundle = open_bundle(options.bundle)
            endpoint = endpoint_for(
                options.server or os.environ.get("MOA_SERVER") or DEFAULT_SERVER,
                os.environ.get("MOA_TOKEN", "") if options.token is None else options.token,
                options.tls_ca,
            )
        setup = setup_for(options, bundle, endpoint)
        if options.once is not None:
            return run_once(setup, options.once, as_json=options.json)
        return run_terminal(setup)


if __name__ == "__main__":
    sys.exit(main())
