"""The badge with the state of the link."""

from __future__ import annotations

import time

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QLabel, QWidget

from moa_chat.desktop.appearance import Appearance
from moa_chat.strings import is_late, link_words
from moa_runtime.events import LinkChanged, LinkStatus

_SLOW_SECONDS = 1.0
_TICK_MS = 500


class StatusBadge(QLabel):
    """A badge such as "online" or "reconnecting in 5 s"; the tooltip has the reason."""

    def __init__(self, appearance: Appearance, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._appearance = appearance
        self._link: LinkChanged | None = None
        self._retry_at: float | None = None
        self._round_trip_s = 0.0
        self._server = ""
        self._wanted_offline = False
        self.setObjectName("pill")
        self.setAccessibleName("Connection")
        self._clock = QTimer(self)
        self._clock.timeout.connect(self._show)
        appearance.changed.connect(self._show)
        self._show()

    def set_server(self, server: str) -> None:
        """Set the verifier's name for the tooltip; empty while there is no connection."""
        self._server = server
        self._link = None
        self._show()

    def set_link(self, link: LinkChanged) -> None:
        self._link = link
        self._retry_at = None if link.retry_in_s is None else time.monotonic() + link.retry_in_s
        self._clock.start(_TICK_MS) if self._retry_at is not None else self._clock.stop()
        self._show()

    def set_wanted_offline(self, offline: bool) -> None:
        """The user works without the server on purpose."""
        self._wanted_offline = offline
        self._show()

    def set_round_trip(self, seconds: float) -> None:
        """Set the duration of a round of drafting and verifying, seconds."""
        self._round_trip_s = seconds
        self._show()

    def _show(self) -> None:
        words, color = self._state()
        self.setText(f"●  {words}")
        self.setStyleSheet(f"color: {color}")
        self.setAccessibleDescription(words)
        why = self._link.detail if self._link else ""
        self.setToolTip("\n".join(part for part in (self._server, why) if part))

    def _state(self) -> tuple[str, str]:
        """Return words and colour of the state."""
        link, theme = self._link, self._appearance.theme
        if link is None:
            return ("connecting" if self._server else "not connected"), theme.warning
        left = None if self._retry_at is None else self._retry_at - time.monotonic()
        slow = self._round_trip_s > _SLOW_SECONDS
        words = link_words(link, left, wanted_offline=self._wanted_offline, slow=slow)
        if self._wanted_offline or is_late(link) or (slow and link.status is LinkStatus.ONLINE):
            return words, theme.warning
        return words, theme.of_link(link.status)
