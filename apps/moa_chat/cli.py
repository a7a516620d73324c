"""``moa-chat``: talk to the target in a window, in the terminal, with one prompt, or from other programs."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from moa_chat.options import DEFAULT_SERVER, build_parser, check_options
from moa_runtime.atomic_file import remove_private
from moa_runtime.cli_main import run_program
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import drafter_option
from moa_runtime.paths import data_dir


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return exit status 0, or as :func:`~moa_runtime.cli_main.run_program` says."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding lacks
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # refused in a sentence later, whatever the locale
    return run_program("moa-chat", lambda: _run(build_parser().parse_args(argv)))


def _run(options: argparse.Namespace) -> int:
    check_options(options)
    _delete_datastore_of_chats()
    if options.once is None and options.serve is None and not options.terminal:
        return _open_window(options)
    if options.serve is not None:
        require_extra("gateway", "--serve")
        from moa_chat.gateway.serve import address_for, run_gateway
        from moa_runtime.sockets import listen

        address = address_for(options)
    # A closed terminal window or `kill` must stop the verifier of --local too; what came of a download is kept.
    for number in (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")):
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, _stop)
    with contextlib.ExitStack() as stack:
        if options.serve is not None:  # refused before a verifier is started, or a bundle fetched
            listening = stack.enter_context(listen(address.host, address.port))
        verifier = None
        if options.local:
            # Late, so that --help and refused options answer at once.
            from moa_chat.local_verifier import local_verifier

            # With the same drafter, so that the same one drafts if the verifier does.
            served = _options_of_verifier(options)
            verifier = stack.enter_context(local_verifier(served, restarts=True, waits=False))
        # While the verifier starts, so does this program.
        from moa_chat.chat_config import chat_config_for, endpoint_for, open_bundle, open_datastore
        from moa_chat.oneshot import run_once
        from moa_chat.server_bundle import bundle_for_server, shown_progress
        from moa_chat.terminal.app import run_terminal
        from moa_runtime.transport import Endpoint

        if verifier is not None:
            bundle = open_bundle(options.bundle, options.drafter)
            open_datastore(options.datastore, bundle)  # refused before the verifier is waited for
            config = chat_config_for(options, bundle, Endpoint(""))
            if options.serve is None:
                config = config.loaded()
            config = replace(config, endpoint=verifier.wait())
        else:
            endpoint = endpoint_for(
                options.server or os.environ.get("MOA_SERVER") or DEFAULT_SERVER,
                os.environ.get("MOA_TOKEN", "") if options.token is None else options.token,
                options.tls_ca,
            )
            writer = options.offline in (None, "writer")  # with --serve, requests may ask for it
            with shown_progress(endpoint.address) as progress:
                bundle = bundle_for_server(endpoint, options.bundle, options.drafter, writer=writer, progress=progress)
            config = chat_config_for(options, bundle, endpoint)
        if options.once is not None:
            return run_once(config, options.once, as_json=options.json)
        if options.serve is not None:
            return run_gateway(config, address, listening, verifier, as_json=options.json)
        return run_terminal(config)


def _stop(number: int, _: object) -> NoReturn:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print("moa-chat: stopped", file=sys.stderr, flush=True)
    sys.exit(128 + number)


def _options_of_verifier(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the options of ``moa-serve`` for ``--local``. ``bundle`` and ``drafter`` become those of the client, whose
    bundle is made if necessary."""
    from moa_chat.local_verifier import ensure_bundle, serve_options

    if options.bundle is None and options.model is None:
        ensure_bundle(options.drafter)
        return drafter_option(options.drafter)
    own = None
    if options.bundle is None:
        from moa_export.plain_bundle import cached_plain_bundle

        options.bundle = cached_plain_bundle(options.model)
    if isinstance(options.drafter, Path):
        own, options.drafter = str(options.drafter), None
    from moa_chat.chat_config import open_bundle

    manifest = open_bundle(options.bundle, options.drafter).manifest  # refused before a verifier is started
    return serve_options(manifest, options.model, own)


def _delete_datastore_of_chats() -> None:
    """Delete the copies of the user's chats that older versions made for drafting. A failure is only reported."""
    path = data_dir() / "chats.moadata"
    there = os.path.lexists(path)
    try:
        remove_private(path)
        done = "is deleted"
    except OSError as error:
        done = f"cannot be deleted: {reason_of(error)}"
    if there:
        print(f"moa-chat: {path}, which is no longer used, {done}", file=sys.stderr)


def _open_window(options: argparse.Namespace) -> int:
    try:
        require_extra("desktop", "the window")
    except MoaError as error:
        raise MoaError(f"{error}; or pass --terminal to chat in this terminal", code=error.code) from error
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"} & set(os.environ):
        text = "there is no display for the window: pass --terminal to chat in this terminal"
        raise MoaError(text, code="no_display")
    from moa_chat.desktop.app import run_desktop

    return run_desktop(options)


if __name__ == "__main__":
    sys.exit(main())
