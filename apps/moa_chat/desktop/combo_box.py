"""One of some values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QComboBox

from moa_chat.desktop.style import lines


class Choice(QComboBox):
    """A list to choose from.

    Args:
        says: its name for screen readers.
        choices: each value and its name.
    """

    def __init__(self, says: str, choices: Mapping[Any, str], current: object) -> None:
        super().__init__()
        self.setAccessibleName(says)
        for value, name in choices.items():
            self.addItem(name, value)
        self.setCurrentIndex(max(0, self.findData(current)))

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        # A style sheet takes the arrow away, and would take another one only from a file.
        painter = QPainter(self)
        place = self.rect().adjusted(0, 0, -lines(0.6), 0)
        painter.drawText(place, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, "▾")
        painter.end()
