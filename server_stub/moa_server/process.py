"""The process around the app: its server, its signals, its exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moa_runtime.errors import MoaError
from moa_server.app import Verifier
from moa_server.edge.connection_limits import EdgeLimits
from moa_server.edge.server import EdgeServer, freeze_loaded_objects
from moa_server.engine.load import warm_up
from moa_server.logging import handle_loop_error
from moa_server.scheduling.kept_cost import keep, restore
from moa_server.settings import ServeError

_log = logging.getLogger(__name__)

_RENEW_SECONDS = 600.0


class VerifierServer(EdgeServer):
    """Serves the verifier on a socket until a signal: the first SIGINT or SIGTERM drains, a second one ends at once.

    SIGHUP reads the token file again, and ends the work of tokens that left it.

    Args:
        drain_seconds: time for frames under way after the signal.
        on_ready: called when clients may connect.
        tls: certificate and key files.
        renew_tls: called from time to time, in a thread; rewrites these files if necessary.
        warm: run some steps before clients may connect, see :func:`moa_server.engine.load.warm_up`.
        kept: file of :mod:`moa_server.scheduling.kept_cost`: with what it holds no steps are run; None for none.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        limits: EdgeLimits | None = None,
        drain_seconds: float = 10.0,
        on_ready: Callable[[], None] = lambda: None,
        tls: tuple[Path, Path] | None = None,
        renew_tls: Callable[[], object] | None = None,
        warm: bool = False,
        kept: Path | None = None,
    ) -> None:
        limits = limits or EdgeLimits()
        # The app answers a frame that is too large with a fault; far larger ones never reach it.
        most = max(limits.unused_bytes, 2 * verifier.settings.max_frame_bytes)
        super().__init__(verifier.app, replace(limits, unused_bytes=most), tls)
        self.verifier = verifier
        self._warm, self._kept, self._renew_tls = warm, kept, renew_tls
        self._renewing: asyncio.Future[None] | None = None
        self._on_ready, self._drain_seconds = on_ready, drain_seconds
        self._draining: asyncio.Future[None] | None = None
        self._hurry = asyncio.Event()
        self._handlers: dict[int, Any] = {}  # of signals, before this server's

    async def startup(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(handle_loop_error)
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # in a thread
                self._handlers[number] = signal.signal(number, self.handle_exit)
        if self._warm:
            if self.verifier.grammars is not None and self._kept is None:  # no other session waits on a machine's own
                self.verifier.grammars.load()
            await self._measure_steps()
            freeze_loaded_objects()
        await super().startup()
        slots, metrics, website = self.slots, self.verifier.metrics, self.verifier.website
        # A connection that downloads is busy, and most of those are for sessions.
        website.downloads.most = min(website.downloads.most, max(1, slots.ceiling // 4))
        metrics.watch("moa_connections", "TCP connections, sessions and requests alike.", lambda: len(slots))
        metrics.watch("moa_connections_limit", "TCP connections that may be open.", lambda: slots.ceiling)
        if self._renew_tls is not None:
            self._renewing = asyncio.ensure_future(self._keep_renewed(self._renew_tls))
        with contextlib.suppress(NotImplementedError, AttributeError, ValueError, RuntimeError):  # Windows, a thread
            loop.add_signal_handler(signal.SIGHUP, self.verifier.authenticator.reload)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # one that came while the model was loaded
        if not self.should_exit:
            self._on_ready()

    async def _measure_steps(self) -> None:
        cost = self.verifier.worker.cost
        if self._kept is not None and restore(self._kept, cost):
            return
        await warm_up(self.verifier.engine, cost)
        if self._kept is not None:
            keep(self._kept, cost)

    def handle_exit(self, sig: int, frame: object) -> None:
        """Handle a signal."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Drain, then end; on the second call, end at once. Belongs to the event loop's thread."""
        if self._draining is None:
            _log.info("shutting down: frames under way have %g seconds", self._drain_seconds)
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._hurry.set()

    async def shutdown(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        await super().shutdown()
        for number, handler in self._handlers.items():  # the event loop closes next
            # A process that a signal ends leaves in order: one more signal does not kill it on its way out.
            signal.signal(number, signal.SIG_IGN if self._draining is not None else handler)

    async def _keep_renewed(self, renew: Callable[[], object]) -> None:
        """Renew the certificate before it expires or when the addresses change."""
        assert self._tls is not None
        certificate, _ = self._tls
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            try:
                before = certificate.read_bytes()
                await asyncio.to_thread(renew)
                if certificate.read_bytes() != before:
                    self.renew()
            except (MoaError, OSError) as error:
                _log.warning("the certificate was not renewed: %s", error)

    async def _drain(self) -> None:
        try:
            await self.verifier.drain(self._drain_seconds, self._hurry)
            self._hurry.clear()  # one more signal does not wait for the peers either
            # Let written data go out and peers close.
            deadline = time.monotonic() + 2 * self._limits.close_seconds
            while self.guard.tasks and time.monotonic() < deadline and not self._hurry.is_set():
                await asyncio.sleep(0.02)
        finally:
            self.should_exit = True


def end_with_stdin() -> None:
    """End this process with exit status 0 when its standard input ends: a pipe does when its writer is gone, however
    that ended.

    Raises:
        ServeError: there is no standard input.
    """
    try:
        descriptor = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError) as error:  # None, or closed
        text = "--until-stdin-ends needs a standard input to read: give it a pipe"
        raise ServeError(text, code="no_stdin") from error

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(descriptor, 4096):
                pass
        # At once: no client waits for a verdict any more, and signals are not handled while a model is loading.
        os._exit(0)

    threading.Thread(target=watch, name="moa-stdin", daemon=True).start()
