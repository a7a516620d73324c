"""The row above the conversation, with a word beside each icon where there is room."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QLabel, QSizePolicy, QWidget

from moa_chat.desktop.appearance import Look
from moa_chat.desktop.buttons import IconButton
from moa_chat.desktop.style import letters, lines

_TITLE_LETTERS = 14  # that are to be seen before words beside icons are


class Title(QLabel):
    """One line that gives way to the buttons when the window is narrow. What has no room is an ellipsis; the tooltip
    and the name for screen readers have all of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.setObjectName("title")
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.setText(text)

    @property
    def shown(self) -> str:
        """As much of the text as there is room for."""
        mode = Qt.TextElideMode.ElideRight
        return self.fontMetrics().elidedText(self.text(), mode, self.contentsRect().width())

    def setText(self, text: str) -> None:
        super().setText(text)
        self.setToolTip(f"<p>{escape(text)}</p>")  # or what looks like HTML in it would be shown as such
        self.setAccessibleName(f"Title of the chat: {text}")

    def minimumSizeHint(self) -> QSize:
        return QSize(0, super().minimumSizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        place, aligned = self.contentsRect(), self.alignment()
        role, enabled = self.foregroundRole(), self.isEnabled()
        self.style().drawItemText(QPainter(self), place, aligned, self.palette(), enabled, self.shown, role)


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
