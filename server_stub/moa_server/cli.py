"""``moa-serve``: the verifier as a program."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import ssl
from pathlib import Path

from moa_runtime.errors import MoaError
from moa_runtime.extras import require_extra
from moa_runtime.listening import is_loopback, listen, url_of
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_server.bearers import Bearers, new_token
from moa_server.engine import Engine
from moa_server.logs import FORMATS, LEVELS, complain, configure
from moa_server.places import EdgeLimits
from moa_server.settings import Settings

DEFAULT_PORT = 8765
DEFAULT_CACHE_TOKENS = 32768

_OWN = Settings()
#: Options with numbers: name, default, unit, help. None may be below 1, but for --keep-seconds.
_LIMITS = (
    ("max-sessions", _OWN.max_sessions, "N", "conversations held at once, and requests answered at once"),
    (
        "max-connections",
        EdgeLimits().connections,
        "N",
        "connections open at once, if the descriptor limit allows",
    ),
    ("max-draft-tokens", _OWN.max_draft_tokens, "N", "tokens of one draft"),
    ("max-frame-bytes", _OWN.max_frame_bytes, "N", "bytes of one message and of one request"),
    ("keep-seconds", _OWN.keep_seconds, "S", "how long a conversation outlives its connection"),
    ("idle-seconds", _OWN.idle_seconds, "S", "silence after which a connection is closed"),
    ("answer-seconds", _OWN.answer_seconds, "S", "how long a frame may wait for its verdict"),
)


class ServeError(MoaError):
    """Options that no verifier can be started with."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="moa-serve", description="Serve a target that verifies drafts over WebSocket.")
    p.add_argument("--model", metavar="NAME", help="a model folder or Hub id (default: the built-in target)")
    p.add_argument(
        "--drafter",
        type=Path,
        metavar="FOLDER",
        help="checkpoint whose server half makes the memory rows (default: the shipped one, with the default model)",
    )
    p.add_argument("--device", default="cpu", help="torch device of the target (default: %(default)s)")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    p.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 for any free one (default: %(default)s)")
    p.add_argument("--token", help="bearer token that clients must send; safer in the variable MOA_TOKEN")
    p.add_argument("--insecure", action="store_true", help="allow other hosts than loopback without a token")
    p.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin, such as http://localhost:3000, use the verifier; may be repeated",
    )
    p.add_argument("--tls-cert", type=Path, metavar="PEM", help="certificate chain, for wss")
    p.add_argument("--tls-key", type=Path, metavar="PEM", help="its private key")
    p.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="on a loopback address, answer requests for this host too, such as the name of a proxy in front; "
        "may be repeated",
    )
    p.add_argument(
        "--token-file",
        type=Path,
        metavar="JSON",
        help="more bearer tokens, hashed, with names and budgets; SIGHUP reads it again",
    )
    p.add_argument("--new-token", metavar="NAME", help="print a fresh token and its entry for --token-file, and exit")

    engine = p.add_argument_group("the engine")
    engine.add_argument("--max-context", type=int, metavar="TOKENS", help="default: what the target can hold")
    engine.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="numbers of the target; auto is float32 on a CPU, bfloat16 elsewhere (default: %(default)s)",
    )
    engine.add_argument(
        "--cache-tokens",
        type=int,
        default=DEFAULT_CACHE_TOKENS,
        metavar="N",
        help="tokens of all conversations whose keys and values are kept; beyond, the least recently used are "
        "computed again when they return (default: %(default)s)",
    )
    engine.add_argument(
        "--step-tokens",
        type=int,
        metavar="N",
        help="most tokens of a step while others are served (default: as many as their next tokens can wait for)",
    )
    engine.add_argument("--threads", type=int, metavar="N", help="CPU threads of the target (default: torch's choice)")

    limits = p.add_argument_group("limits")
    for name, default, metavar, text in _LIMITS:
        limits.add_argument(
            f"--{name}", type=type(default), default=default, metavar=metavar, help=f"{text} (default: %(default)s)"
        )

    operation = p.add_argument_group("operation")
    operation.add_argument(
        "--drain-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="after SIGTERM, how long the frames under way may take for their verdicts (default: %(default)g)",
    )
    operation.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write what every session does and when, as a Chrome trace that Perfetto opens",
    )
    operation.add_argument("--json", action="store_true", help="say that the verifier is ready as one JSON object")
    operation.add_argument(
        "--log-format", choices=FORMATS, default="text", help="json: one object a line (default: %(default)s)"
    )
    operation.add_argument(
        "--log-level",
        choices=LEVELS,
        default="warning",
        help="info tells of each session, debug has tracebacks (default: %(default)s)",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Exit status 0 after either, 2 after a refusal."""
    options = parser().parse_args(argv)
    configure(options.log_format, options.log_level)
    try:
        _serve(options)
    except MoaError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:  # while the model loads
        return 130
    return 0


def _serve(options: argparse.Namespace) -> None:
    if options.new_token is not None:
        token, entry = new_token(options.new_token)
        print(f"token: {token}\nentry: {entry}")
        return
    settings = _settings(options)
    bearers = Bearers(settings.token, settings.token_file)
    _check_exposure(options, bearers)
    tls = _check_tls(options)
    # The port first: loading a model only to find the port taken would waste the user's time.
    with (
        _bind(options.host, options.port) as listening,
        contextlib.closing(_timeline(options)) as timeline,
        contextlib.closing(_load(options)) as engine,
    ):
        _run(engine, settings, options, listening, tls, timeline)


def _settings(options: argparse.Namespace) -> Settings:
    least = {name.replace("-", "_"): 1 for name, *_ in _LIMITS}
    least |= {"keep_seconds": 0, "drain_seconds": 0, "max_frame_bytes": 1024, "threads": 1, "step_tokens": 4}
    for name, smallest in (least | {"cache_tokens": 1}).items():
        value = getattr(options, name)
        if value is not None and not value >= smallest:
            raise ServeError(f"--{name.replace('_', '-')} must be at least {smallest}, not {value}")
    return Settings(
        token=os.environ.get("MOA_TOKEN", "") if options.token is None else options.token,
        token_file=options.token_file,
        origins=tuple(options.allow_origin),
        loopback=is_loopback(options.host),
        hosts=tuple(options.allow_host),
        max_sessions=options.max_sessions,
        keep_seconds=options.keep_seconds,
        idle_seconds=options.idle_seconds,
        answer_seconds=options.answer_seconds,
        step_tokens=options.step_tokens,
        max_draft_tokens=options.max_draft_tokens,
        max_frame_bytes=options.max_frame_bytes,
    )


def _check_exposure(options: argparse.Namespace, bearers: Bearers) -> None:
    """Refuse to serve the whole network without a token unless told to."""
    if bearers.open and not (is_loopback(options.host) or options.insecure):
        raise ServeError(
            f"--host {options.host} is open to other machines: set a token with --token or MOA_TOKEN, "
            "more of them with --token-file, or pass --insecure"
        )


def _check_tls(options: argparse.Namespace) -> tuple[Path, Path] | None:
    if not options.tls_cert and not options.tls_key:
        return None
    if not (options.tls_cert and options.tls_key):
        raise ServeError("--tls-cert and --tls-key belong together; pass both")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ServeError(f"cannot use {options.tls_cert} with {options.tls_key}: {error}") from error
    return options.tls_cert, options.tls_key


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ServeError(f"--port must lie in 0..65535, not {port}")
    try:
        return listen(host, port)
    except MoaError as error:
        raise ServeError(f"{error}; choose another with --host and --port") from error


def _timeline(options: argparse.Namespace) -> Timeline:
    return Timeline("verifier", options.timeline) if options.timeline else NO_TIMELINE


def _load(options: argparse.Namespace) -> Engine:
    require_extra("server", "moa-serve")
    # Late, so that --help and refused options need no torch.
    import torch

    from moa_drafter.checkpoint import shipped_checkpoint
    from moa_drafter.target_source import DEFAULT_TARGET
    from moa_server.transformers_engine import TransformersEngine

    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise ServeError(f"no torch device {options.device!r}: {str(error).splitlines()[0]}") from error
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, drafter = options.model or DEFAULT_TARGET, options.drafter
    if drafter is None and model == DEFAULT_TARGET:
        drafter = shipped_checkpoint()
    return TransformersEngine.load(
        model,
        drafter,
        options.device,
        options.max_context,
        dtype=options.dtype,
        cache_tokens=options.cache_tokens,
    )


def _run(
    engine: Engine,
    settings: Settings,
    options: argparse.Namespace,
    listening: socket.socket,
    tls: tuple[Path, Path] | None,
    timeline: Timeline,
) -> None:
    from moa_server.app import SESSION_PATH
    from moa_server.serve import VerifierServer

    host, port = listening.getsockname()[:2]
    url = url_of("wss" if tls else "ws", listening, SESSION_PATH)
    server = VerifierServer(
        engine,
        settings,
        limits=EdgeLimits(connections=options.max_connections),
        drain_seconds=options.drain_seconds,
        on_ready=lambda: print(ready_line(url, host, port, engine, as_json=options.json), flush=True),
        tls=tls,
        timeline=timeline,
    )
    server.run(sockets=[listening])


def ready_line(url: str, host: str, port: int, engine: Engine, *, as_json: bool) -> str:
    """The line on stdout that says that clients may connect."""
    prints = engine.fingerprints
    if as_json:
        fingerprints = {"target": prints.target, "tokenizer": prints.tokenizer, "drafter": prints.drafter}
        return json.dumps({"event": "ready", "url": url, "host": host, "port": port, "fingerprints": fingerprints})
    return f"moa-serve: ready on {url} (target {prints.target}, drafter {prints.drafter or 'none'})"
