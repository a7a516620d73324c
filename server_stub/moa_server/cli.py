"""``moa-serve``: the verifier as a program."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import ssl
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from moa_drafter.catalogue import CATALOGUE, COLUMNS, catalogue_rows, drafter_advice
from moa_export.progress import JsonProgress, Progress
from moa_runtime.checked_file import open_checked
from moa_runtime.cli_main import run_program
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.manifest import read_manifest
from moa_runtime.optional_deps import require_extra
from moa_runtime.paths import expanded
from moa_runtime.sockets import is_loopback, listen, url_of
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_server.auth import Authenticator, new_token
from moa_server.edge.connection_limits import EdgeLimits
from moa_server.engine.base import Engine
from moa_server.engine.load import load_engine, server_drafts
from moa_server.logging import complain, configure
from moa_server.settings import ServeError, Settings, parser, settings_of

if TYPE_CHECKING:
    from moa_server.web.setup import WebSetup


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Return the exit status: 0 after either, otherwise that of :func:`run_program`."""
    configure()  # options that cannot be parsed are refused in the log, too
    return run_program("moa-serve", lambda: _serve(parser().parse_args(argv)), complain=complain)


def _serve(options: argparse.Namespace) -> int:
    configure(options.log_format, options.log_level)
    if options.new_token is not None:
        token, entry = new_token(options.new_token)
        print(f"token: {token}\nentry: {entry}")
        return 0
    if options.list_models:
        print(_models(as_json=options.json))
        return 0
    require_extra("server", "moa-serve")
    # Imported late, so that --help needs no web server; before torch, see ProcessExit.
    from moa_server.edge.process_exit import ProcessExit
    from moa_server.process import end_with_stdin
    from moa_server.web.setup import WebSetup, check_web_options

    if options.until_stdin_ends:
        end_with_stdin()
    settings = settings_of(options)
    check_web_options(options)
    if options.bundle is not None:
        options.bundle = expanded(options.bundle)
        read_manifest(options.bundle)  # refuse it before the target is loaded
    web = WebSetup(options, settings) if options.web and not options.doctor else None
    settings = web.settings if web else settings
    authenticator = Authenticator(settings.token, settings.token_file)
    if options.doctor:
        _diagnose(settings, options)
        return 0
    if authenticator.open and not (is_loopback(options.host) or options.insecure):
        text = f"--host {options.host} is open to other machines: set --token, MOA_TOKEN or --token-file, or --insecure"
        raise ServeError(text, code="token_missing")
    if settings.token_file and hasattr(signal, "pthread_sigmask"):
        # It would end the process while the model loads: VerifierServer takes it when it listens for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    tls = (web.tls if web else None) or _check_tls(options)
    end = ProcessExit()
    # The port first: loading a model only to find the port taken would waste the user's time.
    if not 0 <= options.port <= 65535:
        raise ServeError(f"--port must lie in 0..65535, not {options.port}", code="out_of_range")
    try:
        listening = listen(options.host, options.port)
    except MoaError as error:
        raise ServeError(f"{error}; choose another with --host and --port", code=error.code) from error
    with (
        listening,
        contextlib.closing(Timeline("verifier", options.timeline) if options.timeline else NO_TIMELINE) as timeline,
    ):
        if web:
            web.find_bundle()
        progress = _progress(options)
        with contextlib.closing(load_engine(options, progress)) as engine:
            _run(engine, settings, options, listening, tls, timeline, web, progress)
    end.served = True
    return 0


def _progress(options: argparse.Namespace) -> Progress:
    """Return the progress of a start; silent if the log is JSON, or another program started this one, which may show
    it: with ``--json`` it is on stdout, before the ready line."""
    if options.until_stdin_ends and options.json:
        return JsonProgress(sys.stdout)
    quiet = options.log_format == "json" or options.until_stdin_ends
    return Progress(sys.stderr, quiet=quiet, program="moa-serve")


def _models(*, as_json: bool) -> str:
    """Return the catalogue, a line for each model."""
    if as_json:
        return json.dumps({name: asdict(model) for name, model in CATALOGUE.items()})
    rows = [COLUMNS, *catalogue_rows()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([*lines, "GB: in 4 bits / in 16, with caches of 4,096 tokens"])


def _check_tls(options: argparse.Namespace) -> tuple[Path, Path] | None:
    if not options.tls_cert and not options.tls_key:
        return None
    if not (options.tls_cert and options.tls_key):
        raise ServeError("--tls-cert and --tls-key belong together; pass both", code="incomplete")
    try:
        for file in (options.tls_cert, options.tls_key):
            open_checked(file).close()  # OpenSSL would wait for a pipe
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        format_error = isinstance(error, ssl.SSLError)  # its own text is for programmers
        reason = "expected a certificate chain in PEM format and its private key" if format_error else reason_of(error)
        text = f"cannot use {options.tls_cert} with {options.tls_key}: {reason}"
        raise ServeError(text, code="bad_certificate") from error
    return options.tls_cert, options.tls_key


def _diagnose(settings: Settings, options: argparse.Namespace) -> None:
    progress = _progress(options)
    with contextlib.closing(load_engine(options, progress)) as engine:
        from moa_server.doctor import facts, measure, measure_drafting, report, table, this_machine

        machine = this_machine(options.threads)  # before the steps, whose memory is not the target's
        with progress.stage("timing steps"):
            timed = asyncio.run(measure(engine))
        with progress.stage("timing drafts"):
            worth = asyncio.run(measure_drafting(engine))
        known = facts(engine.facts, options.max_connections, settings.max_sessions)
        found = report(known, machine, engine, timed, worth)
    print(json.dumps(found, indent=2) if options.json else table(found))


def _run(
    engine: Engine,
    settings: Settings,
    options: argparse.Namespace,
    listening: socket.socket,
    tls: tuple[Path, Path] | None,
    timeline: Timeline,
    web: WebSetup | None,
    progress: Progress,
) -> None:
    from moa_drafter.target_source import DEFAULT_TARGET
    from moa_server.app import SESSION_PATH, Verifier
    from moa_server.process import VerifierServer
    from moa_server.scheduling.kept_cost import place_of

    prints, (host, port) = engine.fingerprints, listening.getsockname()[:2]
    url = url_of("wss" if tls else "ws", listening, SESSION_PATH)

    starting = contextlib.ExitStack()

    def ready() -> None:
        starting.close()
        facts = engine.facts
        of = f"target {prints.target} in {facts.dtype} by the pass {facts.target_pass}"
        line = f"moa-serve: ready on {url} ({of}, drafter {prints.drafter or 'none'})"
        if options.json:
            fingerprints = {"target": prints.target, "tokenizer": prints.tokenizer, "drafter": prints.drafter}
            event = {"event": "ready", "url": url, "host": host, "port": port, "fingerprints": fingerprints}
            event |= {"dtype": facts.dtype, "target_pass": facts.target_pass}
            line = json.dumps(event | ({"pages": web.urls(port), "authority": web.fingerprint} if web else {}))
        elif web:
            line += f"\n{web.invitation(port)}"
        print(line, flush=True)
        if not (prints.drafter or options.drafter or options.json):
            print(f"moa-serve: note: {drafter_advice(options.model or DEFAULT_TARGET)}", file=sys.stderr, flush=True)

    from moa_server.offered_bundles import bundles_to_offer

    files = web.files(prints) if web else None
    bundles = bundles_to_offer(prints, options.model, options.drafter, web.bundle if web else options.bundle)
    server = VerifierServer(
        Verifier(engine, settings, timeline, server_drafts(engine, settings, options), files, bundles),
        limits=EdgeLimits(connections=options.max_connections),
        drain_seconds=options.drain_seconds,
        on_ready=ready,
        tls=tls,
        renew_tls=web.renew if web and web.tls else None,
        warm=True,
        kept=place_of(engine, options.threads) if options.until_stdin_ends else None,
    )
    with starting:
        starting.enter_context(progress.stage("the first steps"))
        server.run(listening)


if __name__ == "__main__":
    sys.exit(main())
