"""The settings of a verifier, and the options of ``moa-serve`` on a command line or in a file of Ray Serve."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moa_drafter.pretrained import shipped_names
from moa_runtime.cli_main import OptionParser, UsageError, add_version
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import install_command, require_extra
from moa_runtime.options import LARGEST_OPTION, MOST_THREADS
from moa_runtime.session.handshake import Limits
from moa_runtime.sockets import check_hosts, check_origins, check_token, is_loopback
from moa_server.edge.connection_limits import EdgeLimits
from moa_server.engine.base import Capabilities
from moa_server.engine.dtypes import DTYPES, MOST_RATIO
from moa_server.logging import FORMATS, LEVELS


@dataclass(frozen=True)
class Settings:
    """Settings of the ASGI app. Times are in seconds, sizes in bytes."""

    token: str = ""  # bearer token that requests must carry; empty for none
    # more bearer tokens, with names and budgets, see :mod:`moa_server.auth`; None for none
    token_file: Path | None = None
    loopback: bool = True  # whether the server listens on this machine only: requests for other hosts are then refused
    hosts: tuple[str, ...] = ()  # further host names that requests may have if ``loopback`` is set
    # origins of web pages that may send requests, such as ``http://localhost:3000``; ``*`` for all
    origins: tuple[str, ...] = ()
    max_sessions: int = 64  # conversations held at once, and plain decodings run at once
    keep_seconds: float = 3600.0  # how long a conversation outlives its connection
    away_seconds: float = 600.0  # how long an answer is continued while its client is disconnected; 0 for not at all
    away_tokens: int = 4096  # most tokens of an answer that are written meanwhile
    idle_seconds: float = 900.0  # silence after which a connection is closed
    hello_seconds: float = 10.0  # how long a new connection may take for its Hello
    answer_seconds: float = 120.0  # how long a frame may wait for its verdict before it is refused
    # most tokens of a step while others are served; None for as many as the cost of steps allows
    step_tokens: int | None = None
    max_draft_tokens: int = 1024  # tokens of one draft
    max_waiting_frames: int = 16  # frames of one connection that wait for the verdict of the one before
    max_frame_bytes: int = 1 << 20  # size of one WebSocket message, and of one HTTP body
    retry_after_ms: int = 5000  # delay before a retry, for clients that are refused because the verifier is full

    def limits(self, max_context: int, engine: Capabilities) -> Limits:
        """Return the limits for a Welcome."""
        drafted, idle = min(self.max_draft_tokens, engine.max_draft_tokens), max(1, int(self.idle_seconds))
        kept = int(self.away_seconds), int(self.keep_seconds)
        return Limits(max_context, drafted, self.max_frame_bytes, idle, engine.trees, *kept)


ENGINES = ("transformers", "vllm")

#: Options that are numbers: default, unit, help.
_LIMITS: dict[str, tuple[float, str, str]] = {
    "max_sessions": (Settings.max_sessions, "N", "conversations held at once, and requests answered at once"),
    "max_connections": (EdgeLimits.connections, "N", "connections open at once, if the descriptor limit allows"),
    "max_draft_tokens": (Settings.max_draft_tokens, "N", "tokens of one draft"),
    "max_frame_bytes": (Settings.max_frame_bytes, "N", "bytes of one message, and at most of one request"),
    "keep_seconds": (Settings.keep_seconds, "S", "how long a conversation outlives its connection"),
    "away_seconds": (Settings.away_seconds, "S", "how long a disconnected client's answer continues; 0 for not at all"),
    "away_tokens": (Settings.away_tokens, "N", "most tokens of an answer that are written meanwhile"),
    "idle_seconds": (Settings.idle_seconds, "S", "silence after which a connection is closed"),
    "answer_seconds": (Settings.answer_seconds, "S", "how long a frame may wait for its verdict"),
}
#: The least value of each option that is a number, if not 1.
_LEAST = {
    **dict.fromkeys(("keep_seconds", "away_seconds", "drain_seconds", "memory"), 0),
    **{"max_frame_bytes": 1024, "threads": 1, "step_tokens": 4, "max_context": 2, "cache_tokens": 1},
}


class ServeError(MoaError):
    """Invalid options."""


def parser() -> argparse.ArgumentParser:
    """Make the parser of ``moa-serve``'s options."""
    p = OptionParser(prog="moa-serve", description="Serve a target that verifies drafts over WebSocket.")
    add_version(p)
    p.add_argument(
        "--model",
        metavar="NAME",
        help="a name of --list-models, model folder, GGUF file or Hub id; what is missing is fetched (default: the "
        "built-in target)",
    )
    p.add_argument("--list-models", action="store_true", help="print targets with published drafters, and exit")
    p.add_argument(
        "--drafter",
        metavar="NAME|FOLDER",
        help="checkpoint whose server half makes the memory rows, and which drafts for clients that leave drafting to "
        f"the verifier: {', '.join(shipped_names())}, a folder or Hub id, or sssd: copies alone "
        "(default: that of --list-models, if any)",
    )
    p.add_argument(
        "--device",
        default="cpu",
        help="of the target: cpu, or one of torch's, such as cuda, which need torch (default: %(default)s)",
    )
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    p.add_argument("--port", type=int, default=8765, help="0 for any free one (default: %(default)s)")
    p.add_argument("--token", help="bearer token that clients must send; safer in the variable MOA_TOKEN")
    p.add_argument("--insecure", action="store_true", help="allow other hosts than loopback without a token")
    p.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin, such as http://localhost:3000, use all of the verifier; an app's web view "
        "has one too, such as capacitor://localhost; may be repeated",
    )
    p.add_argument(
        "--tls-cert",
        type=Path,
        metavar="PEM",
        help="certificate chain, for wss and https; auto makes one, with an authority that a phone must trust",
    )
    p.add_argument("--tls-key", type=Path, metavar="PEM", help="its private key")
    p.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="on a loopback address, answer requests for this host too, such as a proxy's name; may be repeated",
    )
    p.add_argument(
        "--token-file",
        type=Path,
        metavar="JSON",
        help="more bearer tokens, hashed, with names and budgets; SIGHUP reads it again",
    )
    p.add_argument("--new-token", metavar="NAME", help="print a fresh token and its entry for --token-file, and exit")

    web = p.add_argument_group("the page for phones and browsers")
    web.add_argument(
        "--web",
        action="store_true",
        help="serve it at /, to every machine that reaches this address; if others do, its sessions need the token, "
        "which is made and kept if none is given",
    )
    web.add_argument(
        "--bundle",
        type=Path,
        metavar="FOLDER",
        help="what clients may fetch, and what the page loads (default: those in the cache folder that fit the target, "
        "else one made at first)",
    )

    engine = p.add_argument_group("the engine")
    engine.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="what runs the target; vllm is for many conversations, verifies chains only and has its own install, "
        "see docs/serving.md (default: %(default)s)",
    )
    engine.add_argument("--max-context", type=int, metavar="TOKENS", help="default: what the target can hold")
    engine.add_argument(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="numbers of the target; int8 and int4 round a checkpoint, on a CPU. There auto is the type of a quantised "
        "GGUF file, else float32, or bfloat16 if checkpoint and processor have it and torch is installed; on other "
        "devices it is bfloat16 (default: %(default)s)",
    )
    engine.add_argument(
        "--memory",
        type=float,
        metavar="GB",
        help="refuse a target whose weights and caches need more, before it is fetched (default: no limit)",
    )
    engine.add_argument(
        "--accept-rounding",
        action="store_true",
        help=f"serve in int8 or int4 also if rounding raises the perplexity by more than {MOST_RATIO - 1:.0%}%",
    )
    engine.add_argument(
        "--cache-tokens",
        type=int,
        default=32768,
        metavar="N",
        help="tokens of all caches; beyond, the least recently used ones are computed again (default: %(default)s)",
    )
    step_help = "most tokens of a step while others are served (default: as many as their next tokens can wait for)"
    engine.add_argument("--step-tokens", type=int, metavar="N", help=step_help)
    engine.add_argument(
        "--no-drafts",
        action="store_true",
        help="do not draft for clients: each token takes a pass, if its device sends no drafts",
    )
    engine.add_argument("--threads", type=int, metavar="N", help="CPU threads of the target (default: all processors)")

    limits = p.add_argument_group("limits")
    for name, (default, unit, text) in _LIMITS.items():
        text = f"{text} (default: %(default)s)"
        limits.add_argument(_option(name), type=type(default), default=default, metavar=unit, help=text)

    operation = p.add_argument_group("operation")
    operation.add_argument(
        "--drain-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="after SIGTERM, how long the frames under way may take for their verdicts (default: %(default)g)",
    )
    timeline_help = "write what every session does and when, as a Chrome trace that Perfetto opens"
    operation.add_argument("--timeline", type=Path, metavar="FILE", help=timeline_help)
    doctor_help = "say what this machine can serve: load the target, time some steps, and exit"
    operation.add_argument("--doctor", action="store_true", help=doctor_help)
    operation.add_argument(
        "--until-stdin-ends",
        action="store_true",
        help="end at once when standard input does: a verifier never outlives the program that started it",
    )
    operation.add_argument("--json", action="store_true", help="print the ready line, or the report, as JSON")
    format_help = "json: one object a line (default: %(default)s)"
    operation.add_argument("--log-format", choices=FORMATS, default="text", help=format_help)
    level_help = "info tells of each session, debug has tracebacks (default: %(default)s)"
    operation.add_argument("--log-level", choices=LEVELS, default="warning", help=level_help)
    return p


def settings_of(options: argparse.Namespace) -> Settings:
    """Make the settings of the app from the options.

    Raises:
        ServeError: a number is out of range.
        MoaError: an origin or the token is invalid.
    """
    check_origins(options.allow_origin)
    check_hosts(options.allow_host)
    for name, least in {**dict.fromkeys(_LIMITS, 1), **_LEAST}.items():
        value = getattr(options, name)
        most = {"threads": MOST_THREADS, "memory": math.inf}.get(name, LARGEST_OPTION)
        if value is not None and not least <= value <= most:
            raise ServeError(f"{_option(name)} must be between {least} and {most}, not {value}", code="out_of_range")
    chosen = {each.name: getattr(options, each.name) for each in fields(Settings) if hasattr(options, each.name)}
    if options.token is None:
        chosen["token"] = os.environ.get("MOA_TOKEN", "")
    check_token(chosen["token"], "--token", "MOA_TOKEN")
    chosen |= {"origins": tuple(options.allow_origin), "hosts": tuple(options.allow_host)}
    return Settings(loopback=is_loopback(options.host), **chosen)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


#: Release of Ray that is tested: its routers and autoscaling are young, another one may call them otherwise.
TESTED = "2.60"


def require_ray(program: str) -> None:
    """Check that Ray Serve is installed, in the tested release.

    Raises:
        MoaError: it is not; the message gives the install command.
    """
    require_extra("ray", program)
    found = version("ray")
    if not found.startswith(f"{TESTED}."):
        text = f"{program} is tested with Ray {TESTED} and may fail with {found}: {install_command('ray')}"
        raise MoaError(text, code="wrong_version")


#: Options of the process around the app, which Ray provides.
_OF_THE_PROCESS = (
    *("host", "port", "tls-cert", "tls-key", "allow-host", "max-connections"),
    *("web", "bundle", "new-token", "list-models", "doctor", "timeline", "json", "until-stdin-ends"),
)


def options_of(args: Mapping[str, Any]) -> argparse.Namespace:
    """Parse the ``args`` of an application of Ray Serve: options of ``moa-serve`` without their dashes.

    ``{"model": "my-llama", "threads": 1, "no-drafts": True, "allow-origin": ["https://app.example"]}``

    Raises:
        ServeError: an option is unknown or invalid for replicas, or a value is invalid.
    """
    words = []
    for name, value in args.items():
        if name in _OF_THE_PROCESS:
            raise ServeError(
                f"a replica has no option {name}: it is Ray's, see docs/serving.md", code="not_for_replicas"
            )
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                words.append(f"--{name}")
            elif each is not False and each is not None:
                words.append(f"--{name}={each}")
    # All clients come through Ray's proxy, so the address is not loopback.
    try:
        return parser().parse_args([*words, "--host", "0.0.0.0"])
    except UsageError as error:
        text = f"the args of the application are options of moa-serve: {error}"
        raise ServeError(text, code="bad_option") from error
