"""A question on the page."""

from __future__ import annotations

import math

from PySide6.QtCore import Signal
from PySide6.QtGui import QFontMetricsF
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLabel,
    QPlainTextEdit,
    QPushButton,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from moa_chat.desktop.appearance import Look
from moa_chat.desktop.buttons import CopyButton, IconButton
from moa_chat.desktop.origin_text import OriginText
from moa_chat.desktop.style import COLUMN_LETTERS, letters, lines
from moa_chat.history.message import Message

_SHOWN_CHARACTERS = 6000  # of a question; a pasted book would slow down every resize
_EDITOR_LINES = 6
_MEASURED_LINES = 100


class Question(QWidget):
    """What the user said, at the right, to be copied or edited.

    Signals:
        edited: the user wants to ask this text in its place.
    """

    edited = Signal(str)

    def __init__(self, look: Look, message: Message, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.message = message
        text = message.content
        self._text = OriginText(look)
        self._text.setPlainText(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…")
        self._text.setAccessibleName("Your message")
        self._bubble = QFrame()
        self._bubble.setObjectName("bubble")
        inside = QVBoxLayout(self._bubble)
        inside.setContentsMargins(lines(0.7), lines(0.45), lines(0.7), lines(0.45))
        inside.addWidget(self._text)
        self.editor = QPlainTextEdit()
        self.editor.setAccessibleName("Edit your message")
        self.editor.hide()
        inside.addWidget(self.editor)
        self._choices = self._make_choices()
        inside.addWidget(self._choices)

        self._actions = QHBoxLayout()
        self._actions.setSpacing(0)
        self._actions.addStretch()
        self.edit_button = IconButton(look, "edit", "Edit and send again", self.begin_edit, label="Edit")
        copy = CopyButton(look, "Copy your message", lambda: self.message.content, label="Copy")
        self._actions.addWidget(copy)
        self._actions.addWidget(self.edit_button)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(lines(0.1))
        row = QHBoxLayout()
        row.addStretch(1)
        row.addWidget(self._bubble, 6)
        layout.addLayout(row)
        layout.addLayout(self._actions)
        self._bubble.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)
        self._fit_bubble()

    @property
    def texts(self) -> list[OriginText]:
        return [self._text]

    def show_message(self, message: Message) -> None:
        """A question does not change once it is asked."""

    def refresh(self) -> None:
        """After a change of theme or size."""
        self._fit_bubble()

    def begin_edit(self) -> None:
        """Turn the message into a field."""
        self.editor.setPlainText(self.message.content)
        self.editor.setFixedHeight(lines(_EDITOR_LINES))
        self._bubble.setMaximumWidth(letters(200))
        self._show_editor(True)
        self.editor.setFocus()

    def _make_choices(self) -> QWidget:
        choices = QWidget()
        row = QHBoxLayout(choices)
        row.setContentsMargins(0, 0, 0, 0)
        note = QLabel("Everything below this message is replaced.")
        note.setObjectName("muted")
        note.setWordWrap(True)
        cancel = QPushButton("Cancel")
        self.send_button = QPushButton("Send")
        self.send_button.setObjectName("primary")
        cancel.clicked.connect(lambda: self._show_editor(False))
        self.send_button.clicked.connect(self._send)
        row.addWidget(note, 1)
        row.addWidget(cancel)
        row.addWidget(self.send_button)
        choices.hide()
        return choices

    def _send(self) -> None:
        text = self.editor.toPlainText().strip()
        if text:
            self._show_editor(False)
            self.edited.emit(text)

    def _show_editor(self, shown: bool) -> None:
        self.editor.setVisible(shown)
        self._choices.setVisible(shown)
        self._text.setVisible(not shown)
        if not shown:
            self._fit_bubble()

    def _fit_bubble(self) -> None:
        """A short message gets a short bubble."""
        metrics = QFontMetricsF(self._text.font())
        shown = self._text.toPlainText().splitlines()[:_MEASURED_LINES]
        widest = max((metrics.horizontalAdvance(line[: COLUMN_LETTERS * 2]) for line in shown), default=0.0)
        self._bubble.setMaximumWidth(math.ceil(widest) + 2 * lines(0.7) + 2)
