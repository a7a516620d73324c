"""Find in the open chat: mark all places, and step from one to the next."""

from __future__ import annotations

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QColor, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QApplication, QFrame, QHBoxLayout, QLineEdit, QTextEdit

from moa_chat import strings
from moa_chat.desktop.appearance import Appearance, letters
from moa_chat.desktop.conversation_view import ConversationView
from moa_chat.desktop.origin_text import OriginText
from moa_chat.desktop.widgets import IconButton, add, label, pad

_PAUSE_MS = 150


class FindBar(QFrame):
    """A field above the conversation. Earlier messages are shown if the text is found in them."""

    def __init__(self, appearance: Appearance, view: ConversationView) -> None:
        super().__init__()
        self.setObjectName("header")
        self._appearance, self._view = appearance, view
        self._current = 0
        self._marked: list[OriginText] = []
        self.field = QLineEdit()
        self.field.returnPressed.connect(self._step_on)
        self.field.setPlaceholderText(strings.FIND)
        self.field.setAccessibleName(strings.FIND)
        self.field.setMaximumWidth(letters(40))
        self.state = label(style="muted", says=strings.FOUND, wraps=False)
        self.previous = IconButton(appearance, "up", strings.FIND_PREVIOUS, lambda: self.step(-1), shortcut="Shift+F3")
        self.next = IconButton(appearance, "down", strings.FIND_NEXT, lambda: self.step(1), shortcut="F3")
        row = QHBoxLayout(self)
        pad(row, 0.6, 0.3, 0.6, 0.3)
        row.addStretch()
        row.addWidget(self.field, 1)
        close = IconButton(appearance, "close", strings.FIND_CLOSE, self.leave, shortcut="Esc")
        add(row, self.state, self.previous, self.next, close)
        self._pause = QTimer(self, singleShot=True, interval=_PAUSE_MS, timeout=self._mark)
        self.field.textChanged.connect(lambda _: self._search())
        appearance.changed.connect(self.refresh)
        self.hide()

    def begin(self) -> None:
        """Show the field, with the text of the search before."""
        self.show()
        self.field.setFocus()
        self.field.selectAll()
        self._search()

    def leave(self) -> None:
        """Close the field and take the marks away."""
        self.hide()
        self._clear()
        self._view.setFocus()

    def refresh(self) -> None:
        """Mark the places again after the conversation has changed; the current place stays."""
        if self.isVisible():
            self._pause.start()

    def step(self, direction: int) -> None:
        """Go to the next place (1) or the previous one (-1), and around at the ends."""
        if self.isVisible():
            self._current += direction
            self._mark(go=True)

    def _step_on(self) -> None:
        """Step forward with Enter, back with Shift+Enter."""
        self.step(-1 if QApplication.keyboardModifiers() & Qt.KeyboardModifier.ShiftModifier else 1)

    def _search(self) -> None:
        """Search, and go to the first place that is visible or below."""
        text = self.field.text()
        if text:
            self._view.reveal(text)
        top = self._view.verticalScrollBar().value()
        below = [number for number, place in enumerate(self._places()) if self._height(*place) >= top]
        self._current = below[0] if below else 0
        self._mark(go=True)

    def _places(self) -> list[tuple[OriginText, QTextCursor]]:
        text = self.field.text()
        return [(shown, place) for shown in self._view.texts() for place in shown.find_all(text)] if text else []

    def _mark(self, *, go: bool = False) -> None:
        self._clear()
        places = self._places()
        self._current = self._current % len(places) if places else 0
        marks: dict[OriginText, list[QTextEdit.ExtraSelection]] = {}
        for number, (shown, place) in enumerate(places):
            marks.setdefault(shown, []).append(self._selection(place, now=number == self._current))
        for shown, selections in marks.items():
            shown.setExtraSelections(selections)
        self._marked = list(marks)
        found = strings.FOUND_PLACE.format(self._current + 1, len(places)) if places else strings.NOT_FOUND
        self.state.setText(found if self.field.text() else "")
        for button in (self.previous, self.next):
            button.setEnabled(bool(places))
        if go and places:
            height = self._height(*places[self._current])
            self._view.ensureVisible(0, height, 0, self._view.viewport().height() // 3)

    def _selection(self, place: QTextCursor, *, now: bool) -> QTextEdit.ExtraSelection:
        theme, form = self._appearance.theme, QTextCharFormat()
        form.setBackground(QColor(theme.accent if now else theme.found))
        form.setForeground(QColor(theme.on_accent if now else theme.text))
        made = QTextEdit.ExtraSelection()
        made.cursor, made.format = place, form
        return made

    def _height(self, shown: OriginText, place: QTextCursor) -> int:
        """Return the vertical position of a place on the page."""
        return shown.mapTo(self._view.widget(), shown.cursorRect(place).topLeft()).y()

    def _clear(self) -> None:
        still = set(self._view.texts())
        for shown in self._marked:
            if shown in still:
                shown.setExtraSelections([])
        self._marked = []
