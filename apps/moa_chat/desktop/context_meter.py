"""How full the target's context is."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QLabel, QWidget

from moa_chat.desktop.appearance import Look

_QUIET_BELOW, _FULL_FROM = 0.5, 0.85


class ContextMeter(QLabel):
    """Quiet until it matters: nothing while half of the context is free, and a warning before it is full."""

    def __init__(self, look: Look, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._look = look
        self._used = self._limit = 0
        self.setObjectName("figures")
        self.setAccessibleName("Context of the model")
        self.setAlignment(Qt.AlignmentFlag.AlignRight)
        self.setWordWrap(True)
        look.changed.connect(self._show)
        self._show()

    def show_use(self, used: int, limit: int) -> None:
        """So many of ``limit`` tokens are taken; ``limit`` is 0 where it is not known."""
        self._used, self._limit = used, limit
        self._show()

    def _show(self) -> None:
        full = min(self._used / self._limit, 1.0) if self._limit else 0.0
        percent = int(100 * full)
        words = f"Context {percent} % full"
        if full >= _FULL_FROM:
            words = f"The conversation fills {percent} % of what the model can read: begin a new chat soon"
        self.setText(words)
        self.setStyleSheet(f"color: {self._look.theme.warning}" if full >= _FULL_FROM else "")
        says = f"{self._used:,} of {self._limit:,} tokens (pieces of words) that the model can read are taken."
        self.setToolTip(says)
        self.setAccessibleDescription(says)
        self.setVisible(full >= _QUIET_BELOW)
