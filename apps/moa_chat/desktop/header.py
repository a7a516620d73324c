"""The row above the conversation, with a word beside each icon where there is room."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QLabel, QSizePolicy, QWidget

from moa_chat.desktop.buttons import IconButton
from moa_chat.desktop.look import Look
from moa_chat.desktop.style import letters, lines

_TITLE_LETTERS = 14  # that are to be seen before words beside icons are


class Title(QLabel):
    """One line that gives way to the buttons when the window is narrow."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.setObjectName("title")
        self.setAccessibleName("Title of the chat")
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)

    def minimumSizeHint(self) -> QSize:
        return QSize(0, super().minimumSizeHint().height())


class Header(QWidget):
    """Args:
    buttons: at the right; their words go where there is no room for them.
    """

    def __init__(
        self,
        look: Look,
        sidebar: IconButton,
        title: Title,
        pill: QLabel,
        buttons: Sequence[IconButton],
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.setObjectName("header")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._pill, self._buttons = pill, buttons
        row = self._row = QHBoxLayout(self)
        row.addWidget(sidebar)
        row.addWidget(title, 1)
        row.addWidget(pill)
        for button in buttons:
            row.addWidget(button)
        look.changed.connect(self._fit)
        self._fit()

    def minimumSizeHint(self) -> QSize:
        """That of icons alone: a window that is as narrow shows no words."""
        hint = super().minimumSizeHint()
        words = sum(button.sizeHint().width() - button.width_without_label() for button in self._buttons)
        return QSize(hint.width() - words, hint.height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        self._row.setContentsMargins(lines(0.6), lines(0.4), lines(0.6), lines(0.4))
        for button in self._buttons:
            button.show_label(True)
        needed = self._row.minimumSize().width() + letters(_TITLE_LETTERS)
        for button in self._buttons:
            button.show_label(needed <= self.width())
