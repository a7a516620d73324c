"""Something that takes a while, and can be given up."""

from __future__ import annotations

import time
from collections.abc import Callable

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QProgressBar, QPushButton, QVBoxLayout, QWidget

from moa_chat.desktop.style import lines

_TICK_MS = 1000


class ProgressStrip(QFrame):
    """A sentence with the seconds so far, a bar of unknown length, and Cancel."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("banner")
        self._words, self._begun = "", 0.0
        self._cancel: Callable[[], None] = lambda: None
        self._text = QLabel()
        self._text.setWordWrap(True)
        self._text.setAccessibleName("Progress")
        bar = QProgressBar()
        bar.setRange(0, 0)
        bar.setTextVisible(False)
        bar.setAccessibleName("In progress")
        self.button = QPushButton("Cancel")
        self.button.clicked.connect(lambda: self._cancel())
        inside = QVBoxLayout()
        inside.addWidget(self._text)
        inside.addWidget(bar)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(lines(0.8), lines(0.5), lines(0.6), lines(0.5))
        layout.setSpacing(lines(0.8))
        layout.addLayout(inside, 1)
        layout.addWidget(self.button)
        self._clock = QTimer(self)
        self._clock.timeout.connect(self._show)
        self.hide()

    @property
    def text(self) -> str:
        return self._text.text()

    def begin(self, words: str, cancel: Callable[[], None]) -> None:
        """Show that something is under way, until :meth:`end`."""
        self._words, self._cancel, self._begun = words, cancel, time.monotonic()
        self._clock.start(_TICK_MS)
        self._show()
        self.show()

    def end(self) -> None:
        self._clock.stop()
        self.hide()

    def _show(self) -> None:
        self._text.setText(f"{self._words} ({time.monotonic() - self._begun:.0f} s)")
