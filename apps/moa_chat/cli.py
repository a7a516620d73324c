"""``moa-chat``: talk to the target in a window, in the terminal, with one prompt, or from other programs."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moa_chat.options import DEFAULT_SERVER, build_parser, check_options
from moa_runtime.atomic_file import remove_private
from moa_runtime.cli_main import run_program
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import drafter_option
from moa_runtime.paths import data_dir

if TYPE_CHECKING:
    from moa_runtime.bundle import Bundle


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
    # Imported late, so that --help and refused options answer at once.
    from moa_chat.chat_config import chat_config_for, endpoint_for, open_datastore
    from moa_chat.local_verifier import local_verifier
    from moa_chat.oneshot import run_once
    from moa_chat.server_bundle import bundle_for_server, shown_progress
    from moa_chat.terminal.app import run_terminal

    if options.serve is not None:
        require_extra("gateway", "--serve")
        from moa_chat.gateway.serve import address_for, run_gateway

        address = address_for(options)  # refuse it before a verifier is started
    with contextlib.ExitStack() as stack:
        verifier = None
        if options.local:
            # A closed terminal window or `kill` must stop the verifier too.
            for name in ("SIGTERM", "SIGHUP"):
                if hasattr(signal, name):
                    signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
            # With the same drafter, so that the same one drafts if the verifier does.
            bundle, served = _local_bundle(options)
            open_datastore(options.datastore, bundle)  # refuse it before a verifier is started
            verifier = stack.enter_context(local_verifier(served, restarts=True))
            endpoint = verifier.endpoint
        else:
            endpoint = endpoint_for(
                options.server or os.environ.get("MOA_SERVER") or DEFAULT_SERVER,
                os.environ.get("MOA_TOKEN", "") if options.token is None else options.token,
                options.tls_ca,
            )
            writer = (options.offline or ("writer" if options.serve is None else "off")) == "writer"
            with shown_progress(endpoint.address) as progress:
                bundle = bundle_for_server(endpoint, options.bundle, options.drafter, writer=writer, progress=progress)
        config = chat_config_for(options, bundle, endpoint)
        if options.once is not None:
            return run_once(config, options.once, as_json=options.json)
        if options.serve is not None:
            return run_gateway(config, address, verifier, as_json=options.json)
        return run_terminal(config)


def _local_bundle(options: argparse.Namespace) -> tuple[Bundle, tuple[str, ...]]:
    """Open the bundle of ``--local``, made if necessary; return it with the options of its verifier."""
    from moa_chat.chat_config import open_bundle
    from moa_chat.local_verifier import ensure_bundle, serve_options

    if options.bundle is None and options.model is None:
        ensure_bundle(options.drafter)
        return open_bundle(None, options.drafter), drafter_option(options.drafter)
    folder, own = options.bundle, None
    if folder is None:
        from moa_export.plain_bundle import cached_plain_bundle

        folder = cached_plain_bundle(options.model)
    if isinstance(options.drafter, Path):
        own, options.drafter = str(options.drafter), None
    bundle = open_bundle(folder, options.drafter)
    return bundle, serve_options(bundle.manifest, options.model, own)


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
