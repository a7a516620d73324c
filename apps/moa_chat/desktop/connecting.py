"""What the window shows of its connection: first page, progress, pill, notices."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject

from moa_chat.desktop.connection_errors import ConnectionFailedError
from moa_chat.desktop.profile import Settings
from moa_chat.strings import as_sentence
from moa_runtime.errors import MoaError
from moa_runtime.events import LinkChanged, LinkStatus

if TYPE_CHECKING:
    from moa_chat.desktop.window import Window


class Connecting(QObject):
    """Follows connector and engine for the window."""

    def __init__(self, window: Window) -> None:
        super().__init__(window)
        self._window, self._page = window, window.page
        connector = window.connector
        window.engine.link.connect(self._link_changed)
        connector.connecting.connect(self._connecting)
        connector.starting.connect(self._starting)
        connector.connected.connect(self._connected)
        connector.failed.connect(self._failed)
        window.first_run.wanted.connect(self._first_connection)
        window.first_run.cancelled.connect(connector.cancel)
        self._page.offline.toggled.connect(self._work_offline)

    def begin(self) -> None:
        """Connect, or let a newcomer choose to what."""
        ready = self._window.settings.ready
        self._window.show_first_run(not ready)
        if ready:
            self.again()

    def again(self) -> None:
        """Connect as the settings say now."""
        self._window.connector.connect_as(self._window.settings)

    def _first_connection(self, settings: Settings) -> None:
        self._window.settings = settings
        self.again()

    def _connecting(self, where: str) -> None:
        self._page.composer.set_ready(False)
        self._page.pill.set_server(where)
        self._window.first_run.show_progress("Connecting…")

    def _starting(self, starts: bool) -> None:
        """Whether the verifier of this machine is being started."""
        if not starts:
            self._page.progress.end()
            self._window.first_run.show_progress("Connecting…")
            return
        words = "A verifier is being started on this machine. The first start fetches its model and takes minutes."
        self._page.progress.begin(words, self._window.connector.cancel)
        self._window.first_run.show_progress(words, can_cancel=True)

    def _connected(self, where: str) -> None:
        window, page = self._window, self._page
        page.pill.set_server(where)
        page.composer.set_ready(True)
        if page.offline.isChecked():
            window.engine.work_offline(True)
        if window.shows_first_run:
            window.change(**dataclasses.asdict(window.settings))
            window.show_first_run(False)
        window.chats.measure_context()
        page.composer.field.setFocus()

    def _failed(self, error: MoaError) -> None:
        window, page = self._window, self._page
        page.pill.set_server("")
        page.progress.end()
        if window.shows_first_run:
            window.first_run.show_problem(error)
        elif isinstance(error, ConnectionFailedError):
            page.notice.say(as_sentence(str(error)), "Settings", window.open_settings, stays=True)
        else:
            # Nothing that the settings could mend: a program of ours that ended, perhaps.
            page.notice.say(as_sentence(str(error)), "Try again", self.again, stays=True)

    def _link_changed(self, link: LinkChanged) -> None:
        self._page.pill.set_link(link)
        if link.status is LinkStatus.ONLINE:
            self._window.chats.check()
        if link.status is LinkStatus.OFFLINE and not self._page.offline.isChecked():
            self._page.conversation.set_waiting("The verifier is away; this device goes on as far as it can…")

    def _work_offline(self, offline: bool) -> None:
        self._page.pill.set_wanted_offline(offline)
        self._window.engine.work_offline(offline)
