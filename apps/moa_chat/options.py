"""The options of ``moa-chat``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from moa_drafter.pretrained import offered_names
from moa_runtime.checked_file import read_checked_text
from moa_runtime.cli_main import OptionParser, UsageError, add_version
from moa_runtime.errors import json_problem, reason_of
from moa_runtime.options import (
    DEFAULT_DRAFTER,
    DRAFTERS,
    DRAFTINGS,
    LARGEST_OPTION,
    MOST_THREADS,
    OFFLINES,
    OVERFLOWS,
    DrafterName,
    draft_length_of,
)
from moa_runtime.paths import expanded

if TYPE_CHECKING:
    from moa_runtime.session.events import Grammar

DEFAULT_SERVER = "ws://127.0.0.1:8765"
DEFAULT_GATEWAY = "127.0.0.1:11435"


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="moa-chat",
        description="Chat with a model on a server. A small drafter on this device proposes tokens, and continues the "
        "answer alone while the network is away.",
    )
    add_version(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--terminal", action="store_true", help="chat in this terminal (default: in a window)")
    mode.add_argument("--once", metavar="PROMPT", help="answer one prompt and leave")
    mode.add_argument(
        "--serve",
        nargs="?",
        const=DEFAULT_GATEWAY,
        metavar="HOST:PORT",
        help=f"an OpenAI-compatible endpoint for other programs (default: {DEFAULT_GATEWAY})",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object: with --once at the end, with --serve when it is ready"
    )

    where = parser.add_argument_group("where")
    where.add_argument("--server", metavar="URL", help=f"the server (default: $MOA_SERVER or {DEFAULT_SERVER})")
    where.add_argument("--local", action="store_true", help="start a server on this device while the chat runs")
    where.add_argument(
        "--model",
        metavar="NAME",
        help="with --local, the model: a built-in name, Hub id, folder or GGUF file; without --bundle, a "
        "bundle without a drafter is made for it",
    )
    where.add_argument("--token", help="bearer token of the server; safer in the variable MOA_TOKEN")
    where.add_argument("--tls-ca", type=Path, metavar="FILE", help="trust this certificate authority (PEM) for wss")
    where.add_argument(
        "--bundle", type=Path, metavar="DIR", help="the bundle (default: that of moa-export, or the server's)"
    )

    keeping = parser.add_argument_group("with --terminal")
    keeping.add_argument(
        "--chat",
        type=Path,
        metavar="FILE",
        help="keep the conversation in FILE, and continue the one in it (default: terminal/ in the profile "
        "folder $MOA_EDGE_PROFILE, if the input is a terminal)",
    )
    keeping.add_argument("--no-save", action="store_true", help="do not keep the conversation")

    gateway = parser.add_argument_group("with --serve")
    gateway.add_argument(
        "--gateway-token",
        metavar="TOKEN",
        help="bearer token that requests must carry; safer in the variable MOA_GATEWAY_TOKEN (default: none)",
    )
    gateway.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin, such as http://localhost:3000, use the endpoint; an app's web view has one "
        "too, such as capacitor://localhost; may be repeated",
    )
    gateway.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="on a loopback address, answer requests for this host too, such as host.docker.internal; may be repeated",
    )

    answer = parser.add_argument_group("answers")
    answer.add_argument("--system", metavar="TEXT", help="system message")
    answer.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="let the model reason before it answers, or not, if its template has that switch (default: the "
        "template's)",
    )
    answer.add_argument(
        "--context-overflow",
        choices=OVERFLOWS,
        help="if a conversation is longer than the model's context, leave its oldest turns out (trim), or refuse the "
        "question (error) (default: trim; error with --serve)",
    )
    answer.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="default: %(default)s")
    answer.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 is greedy (default: the recommendation of the model's authors, which the bundle holds)",
    )
    answer.add_argument("--top-p", type=float, metavar="P", help="default: 1 with --temperature, else as recommended")
    answer.add_argument(
        "--schema",
        type=grammar_of,
        metavar="json|FILE",
        help="answer in JSON: any object, or as the JSON schema in FILE says (the server needs the extra grammar)",
    )
    answer.add_argument("--seed", type=int, help="seed of the sampling (default: a new one for each answer)")

    drafting = parser.add_argument_group("drafting")
    drafting.add_argument(
        "--drafting",
        choices=DRAFTINGS,
        default="auto",
        help="draft on this device, on the server, which then streams, or where it is faster (auto) "
        "(default: %(default)s)",
    )
    drafting.add_argument("--drafter", type=drafter_of, metavar="NAME|DIR", help=drafters_help())
    drafting.add_argument(
        "--draft-length",
        type=draft_length_of,
        default="auto",
        metavar="N",
        help="tokens of a draft; auto: as many as pay; thompson and thompson-calibrated: as many as EESD would choose, "
        "for comparisons (default: %(default)s)",
    )
    drafting.add_argument(
        "--ngrams",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also draft by copying from earlier parts of the conversation (default: yes)",
    )
    drafting.add_argument(
        "--datastore",
        type=lambda text: None if text == "off" else expanded(text),
        metavar="FILE",
        help="also draft by copying from this datastore of earlier texts, made by moa-export datastore (default: "
        "none; off is accepted for one more release)",
    )
    drafting.add_argument(
        "--backend", metavar="NAME", help="onnx, executorch or coreml (default: the first one in the bundle)"
    )
    drafting.add_argument("--threads", type=int, default=2, metavar="N", help="for the drafter (default: %(default)s)")
    drafting.add_argument(
        "--offline",
        choices=OFFLINES,
        help="without a server, answers are written by the bundle's writer (by the drafter if it has none), by the "
        "drafter, or not at all (default: writer; off with --serve, where a request may say otherwise)",
    )
    drafting.add_argument(
        "--offline-limit",
        type=int,
        default=256,
        metavar="N",
        help="write at most N tokens without a server (default: %(default)s)",
    )
    drafting.add_argument(
        "--policy",
        choices=("rollback", "keep", "ask"),
        help="if the server disagrees with text written offline, take it back from the first difference on, keep it, "
        "or ask you (default: ask in a dialogue, rollback with --once; --serve always keeps it)",
    )
    return parser


def drafters_help() -> str:
    """Return the help text of ``--drafter``: each drafter with its use."""
    kinds = "; ".join(f"{name}: {DRAFTERS[name].help}" for name in offered_names())
    own = "with --local and --bundle, the folder of the checkpoint from which the bundle was made"
    return f"{kinds}; or, {own} (default: the bundle's own; that of the default bundle is {DEFAULT_DRAFTER})"


def drafter_of(text: str) -> DrafterName | Path:
    """Parse the name of a drafter, or the folder of a checkpoint. Raises ArgumentTypeError for other words."""
    for name in offered_names():
        if text == name:
            return name
    if Path(text).is_dir():
        return Path(text)
    hint = "; --drafting server leaves drafts to the server" if text == "none" else ""
    raise argparse.ArgumentTypeError(f"{text!r} is neither a folder nor one of {', '.join(offered_names())}{hint}")


def grammar_of(text: str) -> Grammar:
    """Return the grammar of the answers. Raises ArgumentTypeError if the file cannot be read or is no JSON."""
    from moa_runtime.session.events import Grammar  # late: --help needs none

    if text == "json":
        return Grammar("json_object")
    try:
        schema = json.loads(read_checked_text(expanded(text)))
    except (OSError, ValueError, RecursionError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else json_problem(error)
        raise argparse.ArgumentTypeError(f"{text!r} holds no JSON schema: {reason}") from None
    return Grammar("json_schema", json.dumps(schema))


def check_options(options: argparse.Namespace) -> None:
    """Raise UsageError if options exclude each other, or a value is out of range."""
    once, serve = options.once is not None, options.serve is not None
    if once and not options.once.strip():
        raise UsageError("--once needs a prompt, not an empty text", code="empty")
    if options.json and not (once or serve):
        raise UsageError("--json belongs to --once PROMPT or --serve", code="excluded")
    if not serve and (options.gateway_token is not None or options.allow_origin or options.allow_host):
        raise UsageError("--gateway-token, --allow-origin and --allow-host belong to --serve", code="excluded")
    if serve and options.policy not in (None, "keep"):
        text = f"--serve cannot take back what it has sent: leave out --policy {options.policy}"
        raise UsageError(text, code="excluded")
    if once and options.policy == "ask":
        raise UsageError("--once asks nothing: choose --policy rollback or keep", code="excluded")
    window = not (options.terminal or once or serve)
    if (options.no_save and window) or (options.chat is not None and not options.terminal):
        keeps = "the window keeps its chats in its profile" if window else "--once and --serve keep nothing"
        raise UsageError(f"--chat and --no-save belong to --terminal; {keeps}", code="excluded")
    if options.chat is not None and options.no_save:
        raise UsageError("--no-save keeps nothing: leave out --chat", code="excluded")
    if options.local and options.server:
        raise UsageError("--local starts its own server: leave out --server", code="excluded")
    if options.local and (options.token or options.tls_ca):
        text = "--local makes its own token and needs no TLS: leave out --token and --tls-ca"
        raise UsageError(text, code="excluded")
    if options.model is not None and not options.local:
        raise UsageError("--model belongs to --local: a server elsewhere has its own model", code="excluded")
    window = not (once or serve or options.terminal)
    if options.schema is not None and (serve or window):
        text = (
            "--schema is for --terminal and --once: requests to --serve have response_format, chats in the window have"
        )
        raise UsageError(f"{text} settings", code="excluded")
    if options.model is not None and window:
        text = "--model is for --terminal, --once and --serve: the window takes a bundle, made by moa-export"
        raise UsageError(text, code="excluded")
    if isinstance(options.drafter, Path) and (window or not (options.local and options.bundle)):
        text = f"--drafter {options.drafter} is a folder: give --local too, and --bundle with the bundle made from it"
        of = f" --model {options.model}" if options.model else ""
        made = f"`moa-export --target onnx{of} --drafter {options.drafter} --out DIR` makes one"
        raise UsageError(f"{text} ({made})", code="bad_option")
    for name, least in (("max_new_tokens", 1), ("draft_length", 0), ("threads", 1), ("offline_limit", 0)):
        value, most = getattr(options, name), MOST_THREADS if name == "threads" else LARGEST_OPTION
        if isinstance(value, int) and not least <= value <= most:
            text = f"--{name.replace('_', '-')} must be between {least} and {most}, not {value}"
            raise UsageError(text, code="out_of_range")
    if not 0 <= (options.temperature or 0) < float("inf"):
        text = f"--temperature must be 0 (greedy) or larger, not {options.temperature}"
        raise UsageError(text, code="out_of_range")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UsageError(f"--top-p must be above 0 and at most 1, not {options.top_p}", code="out_of_range")
    if options.seed is not None and not 0 <= options.seed < 1 << 64:
        raise UsageError(f"--seed must be between 0 and 2^64 - 1, not {options.seed}", code="out_of_range")
    copies = options.drafter in DRAFTERS and not DRAFTERS[options.drafter].has_graph
    if copies and (options.backend or not options.ngrams):
        text = f"--drafter {options.drafter} has no graph: leave out --backend and --no-ngrams"
        raise UsageError(text, code="excluded")
    for name in ("once", "system"):
        try:
            (getattr(options, name) or "").encode()
        except UnicodeEncodeError:
            raise UsageError(f"--{name} holds bytes that are no valid UTF-8 text", code="not_utf8") from None
