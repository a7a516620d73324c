"""The field in which the user writes."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QMimeData, QObject, Qt, Signal
from PySide6.QtGui import QFocusEvent, QKeyEvent, QTextOption
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPlainTextEdit

from moa_chat import strings
from moa_chat.desktop.appearance import Appearance, lines
from moa_chat.desktop.widgets import IconButton, pad

_MOST_LINES = 8
_LONGEST_WORD = 2000  # characters


class _Field(QPlainTextEdit):
    """A field that also takes a pasted book, or a file in Base64, at once."""

    def insertFromMimeData(self, source: QMimeData) -> None:
        self.wrap_for(source.text())
        super().insertFromMimeData(source)

    def wrap_for(self, text: str) -> None:
        """Break lines between words, unless one is very long: then Qt would search for seconds at every key."""
        if max(map(len, text.split()), default=0) > _LONGEST_WORD:
            self.setWordWrapMode(QTextOption.WrapMode.WrapAnywhere)
        elif self.document().isEmpty():
            self.setWordWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)


class Composer(QFrame):
    """Enter sends, Shift+Enter breaks the line; the button sends, and stops while an answer is written."""

    sent = Signal(str)  # the question to ask
    stopped = Signal()  # the user stops the answer
    scrolled = Signal(int)  # a page up (-1) or down (1), for the conversation

    def __init__(self, appearance: Appearance) -> None:
        super().__init__()
        self._ready, self._answering = False, False
        self.setObjectName("composer")
        self.field = _Field()
        self.field.setAccessibleName(strings.MESSAGE)
        self.field.setPlaceholderText(strings.ASK_ANYTHING)
        self.field.setTabChangesFocus(True)
        self.field.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAsNeeded)
        self.field.installEventFilter(self)
        self.field.textChanged.connect(self._changed)
        self.button = IconButton(appearance, "send", strings.SEND, self._pressed, color="on_accent")
        self.button.setObjectName("send")
        layout = self._layout = QHBoxLayout(self)
        layout.addWidget(self.field, 1)
        layout.addWidget(self.button, 0, Qt.AlignmentFlag.AlignBottom)
        appearance.changed.connect(self._fit)
        self._fit()
        self._changed()

    @property
    def text(self) -> str:
        return self.field.toPlainText()

    def put_back(self, text: str) -> None:
        """Return a text that could not be sent, before the text written since."""
        written = self.text
        self.field.clear()
        self.field.wrap_for(f"{text} {written}")
        self.field.setPlainText(f"{text}\n{written}" if written.strip() else text)
        self.field.moveCursor(self.field.textCursor().MoveOperation.End)

    def set_ready(self, ready: bool) -> None:
        """Set whether a question can be asked now."""
        self._ready = ready
        self._changed()

    def is_ready(self) -> bool:
        return self._ready

    def set_answering(self, answering: bool) -> None:
        self._answering = answering
        self.button.set_icon(*(("stop", strings.STOP_KEY) if answering else ("send", strings.SEND_KEY)))
        self._changed()

    def send(self) -> None:
        """Send the text, if a question can be asked now."""
        text = self.text.strip()
        if text and self._ready and not self._answering:
            self.field.clear()
            self.sent.emit(text)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QKeyEvent) and event.type() is QEvent.Type.KeyPress:
            key, shift = event.key(), event.modifiers() & Qt.KeyboardModifier.ShiftModifier
            if key in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and not shift:
                self.send()
                return True
            if key in (Qt.Key.Key_PageUp, Qt.Key.Key_PageDown):
                self.scrolled.emit(-1 if key == Qt.Key.Key_PageUp else 1)
                return True
        if isinstance(event, QFocusEvent):
            self.setProperty("active", event.gotFocus())
            self.style().polish(self)
        return super().eventFilter(watched, event)

    def _pressed(self) -> None:
        self.stopped.emit() if self._answering else self.send()

    def _changed(self) -> None:
        # Not the text itself: of a pasted book it would be copied at every key.
        written = self.field.document().characterCount() > 1
        self.button.setEnabled(self._answering or (self._ready and written))
        self._fit()

    def _fit(self) -> None:
        """Set the height to that of the text, up to a few lines."""
        rows = round(self.field.document().size().height())
        pad(self._layout, 0.6, 0.35, 0.35, 0.35)
        margin = 2 * round(self.field.document().documentMargin())
        self.field.setFixedHeight(round(lines(1.02) * min(max(rows, 1), _MOST_LINES)) + margin + lines(0.2))
