"""``moa-serve``: the verifier as a program."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

from moa_runtime.errors import MoaError
from moa_runtime.extras import require_extra
from moa_runtime.listening import is_loopback, listen, url_of
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_server.settings import Settings

DEFAULT_PORT = 8765
_PING_SECONDS = 20.0


class ServeError(MoaError):
    """Options that no verifier can be started with."""


def parser() -> argparse.ArgumentParser:
    own = Settings()
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
    p.add_argument("--max-context", type=int, metavar="TOKENS", help="default: what the target can hold")
    p.add_argument("--max-sessions", type=int, default=own.max_sessions, metavar="N", help="default: %(default)s")
    p.add_argument(
        "--keep-seconds",
        type=float,
        default=own.keep_seconds,
        metavar="S",
        help="how long a conversation outlives its connection (default: %(default)s)",
    )
    p.add_argument(
        "--idle-seconds",
        type=float,
        default=own.idle_seconds,
        metavar="S",
        help="silence after which a connection is closed (default: %(default)s)",
    )
    p.add_argument("--max-frame-bytes", type=int, default=own.max_frame_bytes, metavar="N", help="default: %(default)s")
    p.add_argument("--threads", type=int, metavar="N", help="CPU threads of the target (default: torch's choice)")
    p.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write what every session does and when, as a Chrome trace that Perfetto opens",
    )
    p.add_argument("--json", action="store_true", help="say that the verifier is ready as one JSON object")
    return p


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Exit status 0 after either, 2 after a refusal."""
    options = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="moa-serve: %(levelname)s: %(message)s")
    try:
        _serve(options)
    except MoaError as error:
        print(f"moa-serve: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while the model loads
        return 130
    return 0


def _serve(options: argparse.Namespace) -> None:
    settings = _settings(options)
    _check_exposure(options, settings)
    tls = _check_tls(options)
    # The port first: loading a model only to find the port taken would waste the user's time.
    with _bind(options.host, options.port) as listening, contextlib.closing(_timeline(options)) as timeline:
        engine = _load(options)
        _run(engine, settings, options, listening, tls, timeline)


def _settings(options: argparse.Namespace) -> Settings:
    least = (("max_sessions", 1), ("max_frame_bytes", 1024), ("keep_seconds", 0), ("idle_seconds", 1), ("threads", 1))
    for name, smallest in least:
        value = getattr(options, name)
        if value is not None and not value >= smallest:
            raise ServeError(f"--{name.replace('_', '-')} must be at least {smallest}, not {value}")
    return Settings(
        token=os.environ.get("MOA_TOKEN", "") if options.token is None else options.token,
        origins=tuple(options.allow_origin),
        max_sessions=options.max_sessions,
        keep_seconds=options.keep_seconds,
        idle_seconds=options.idle_seconds,
        max_frame_bytes=options.max_frame_bytes,
    )


def _check_exposure(options: argparse.Namespace, settings: Settings) -> None:
    """Refuse to serve the whole network without a token unless told to."""
    if not (is_loopback(options.host) or settings.token or options.insecure):
        raise ServeError(
            f"--host {options.host} is open to other machines: set a token with --token or MOA_TOKEN, "
            "or pass --insecure"
        )


def _check_tls(options: argparse.Namespace) -> bool:
    if not options.tls_cert and not options.tls_key:
        return False
    if not (options.tls_cert and options.tls_key):
        raise ServeError("--tls-cert and --tls-key belong together; pass both")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ServeError(f"cannot use {options.tls_cert} with {options.tls_key}: {error}") from error
    return True


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ServeError(f"--port must lie in 0..65535, not {port}")
    try:
        return listen(host, port)
    except MoaError as error:
        raise ServeError(f"{error}; choose another with --host and --port") from error


def _timeline(options: argparse.Namespace) -> Timeline:
    return Timeline("verifier", options.timeline) if options.timeline else NO_TIMELINE


def _load(options: argparse.Namespace) -> Any:
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
    return TransformersEngine.load(model, drafter, options.device, options.max_context)


def _run(
    engine: Any,
    settings: Settings,
    options: argparse.Namespace,
    listening: socket.socket,
    tls: bool,
    timeline: Timeline,
) -> None:
    import uvicorn

    from moa_server.app import SESSION_PATH, create_app

    host, port = listening.getsockname()[:2]
    url = url_of("wss" if tls else "ws", listening, SESSION_PATH)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(ready_line(url, host, port, engine, as_json=options.json), flush=True)

    config = uvicorn.Config(
        create_app(engine, settings, timeline),
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        **server_options(settings),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn stops gracefully and then raises the signal again for the handler that was there before.
        signal.signal(number, _exit)
    Server(config).run(sockets=[listening])


def _exit(*_: object) -> None:
    raise SystemExit(0)


def server_options(settings: Settings) -> dict[str, Any]:
    """What the app needs of uvicorn, as arguments of ``uvicorn.Config``."""
    return {
        "ws": "websockets-sansio",
        # The app answers a frame that is too large with a fault; far larger ones never reach it.
        "ws_max_size": 2 * settings.max_frame_bytes,
        "ws_ping_interval": _PING_SECONDS,
        "ws_ping_timeout": _PING_SECONDS,
        "ws_per_message_deflate": False,
        "timeout_graceful_shutdown": 3,
        "log_config": None,
        "log_level": "warning",
        "access_log": False,
    }


def ready_line(url: str, host: str, port: int, engine: Any, *, as_json: bool) -> str:
    """The line on stdout that says that clients may connect."""
    prints = engine.fingerprints
    if as_json:
        fingerprints = {"target": prints.target, "tokenizer": prints.tokenizer, "drafter": prints.drafter}
        return json.dumps({"event": "ready", "url": url, "host": host, "port": port, "fingerprints": fingerprints})
    return f"moa-serve: ready on {url} (target {prints.target}, drafter {prints.drafter or 'none'})"
