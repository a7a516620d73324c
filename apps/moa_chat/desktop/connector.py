"""From the settings to a running chat, a verifier of this machine and an export included."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from PySide6.QtCore import QObject, Signal

from moa_chat.desktop.profile import Settings
from moa_chat.desktop.programs import BundleExport, LocalVerifier
from moa_chat.desktop.runtime_thread import Engine
from moa_runtime.errors import MoaError
from moa_runtime.transport import Endpoint


class Connector(QObject):
    """Connects the engine as the settings say.

    Attributes:
        export: of the bundle that is used where the settings name none.

    Signals:
        connecting: to whom, in words.
        starting: whether the verifier of this machine is being started; :meth:`cancel` gives that up.
        connected: the same, once there is a chat; the verifier itself may still be away.
        failed: a MoaError; mostly a :class:`moa_chat.desktop.connection_errors.ConnectionFailedError`.
    """

    connecting = Signal(str)
    starting = Signal(bool)
    connected = Signal(str)
    failed = Signal(object)

    def __init__(self, engine: Engine, options: argparse.Namespace, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._engine, self._options = engine, options
        self._settings = Settings()
        self._verifier = LocalVerifier(options.drafter, self)
        self._verifier.ready.connect(self._started)
        self._verifier.failed.connect(self.failed)
        self.export = BundleExport(options.drafter, self)

    def connect_as(self, settings: Settings) -> None:
        """Begin; one of the signals says how it went."""
        self._settings = settings
        if settings.local:
            self.connecting.emit("a verifier on this machine")
            try:
                self._verifier.start()
            except MoaError as error:
                self.failed.emit(error)
            else:
                self.starting.emit(True)
            return
        self._verifier.stop()
        self.connecting.emit(settings.server)
        self._engine.run(_endpoint(settings, self._options), self._connect_to, self.failed.emit)

    def cancel(self) -> None:
        """Start no verifier after all."""
        self._verifier.stop()
        self.failed.emit(MoaError("The verifier on this machine was not started"))

    def test(self, settings: Settings, works: Callable[[str], None], does_not: Callable[[MoaError], None]) -> None:
        """Connect with these settings beside the chat that runs; ``works`` gets the target's name."""
        self._engine.try_connection(settings, self._options, works, does_not)

    def close(self) -> None:
        """End what was started."""
        self._verifier.stop()
        self.export.stop()

    def _started(self, endpoint: Endpoint) -> None:
        self.starting.emit(False)
        self._connect_to(endpoint)

    def _connect_to(self, endpoint: Endpoint) -> None:
        settings = self._settings
        where = "a verifier on this machine" if settings.local else endpoint.address
        self._engine.connect_chat(
            settings, endpoint, self._options, lambda: self.connected.emit(where), self.failed.emit
        )


async def _endpoint(settings: Settings, options: argparse.Namespace) -> Endpoint:
    # Imported here, in the runtime's thread: the window is there first.
    from moa_chat.desktop.connection import endpoint_of

    return endpoint_of(settings, options)
