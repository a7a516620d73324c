"""The page with a conversation: scrolls along while its end is in sight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QScrollArea, QVBoxLayout, QWidget

from moa_chat import strings
from moa_chat.desktop.appearance import COLUMN_LETTERS, Appearance, letters, lines
from moa_chat.desktop.message_widgets import Answer, Question
from moa_chat.desktop.origin_text import OriginText
from moa_chat.desktop.widgets import IconButton, centered, label, pad, push_button
from moa_chat.history.message import Message

_NEAR_LINES = 3
_SHOWN = 40  # messages of a long chat, until the user asks for the earlier ones


class ConversationView(QScrollArea):
    """The messages of a chat in one column."""

    edited = Signal(int, str)  # position of a question, and its new text
    again = Signal()  # the user wants another answer to the last question
    continued = Signal()  # the user wants the last answer continued
    stopped = Signal()  # the user cancels the answer
    suggested = Signal(str)  # the user takes one of the example questions

    def __init__(self, appearance: Appearance) -> None:
        super().__init__()
        self._appearance = appearance
        self._messages: list[Message] = []
        self._first = 0  # position of the first message that has a widget
        self.widgets: list[Question | Answer] = []
        self._follows = True
        self.setObjectName("conversation")
        self.setAccessibleName(strings.CONVERSATION)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.earlier = push_button(strings.SHOW_EARLIER, self._show_earlier)
        self.model = label(style="muted")
        self._empty = QWidget()
        self._fill_empty()
        self._column = QVBoxLayout()
        self._column.addWidget(self.earlier, 0, Qt.AlignmentFlag.AlignHCenter)
        self._column.addWidget(self._empty, 1)
        self._column.addStretch()
        self._held = QWidget()
        self._held.setLayout(self._column)
        page = QWidget()
        page.setObjectName("column")
        self._centered = centered(self._held)
        pad(self._centered, 0)
        page.setLayout(self._centered)
        self.setWidget(page)
        jump = strings.COMMAND_JUMP
        self.jump_button = IconButton(appearance, "down", jump, self.jump, shortcut="Ctrl+End", parent=self)
        self.jump_button.setObjectName("jump")
        self.jump_button.hide()
        self.verticalScrollBar().rangeChanged.connect(self._range_changed)
        self.verticalScrollBar().valueChanged.connect(self._moved)
        appearance.changed.connect(self._refresh)
        self._settle()
        self._refresh()

    def _fill_empty(self) -> None:
        """Lay out what an empty chat shows: the model, and questions to begin with."""
        lead = label(strings.EMPTY_CHAT, "muted")
        column = QVBoxLayout(self._empty)
        column.addStretch()
        for text in (self.model, lead):
            text.setAlignment(Qt.AlignmentFlag.AlignCenter)
            column.addWidget(text)
        for question in strings.EXAMPLES:
            made = push_button(question, partial(self.suggested.emit, question))
            column.addWidget(made, 0, Qt.AlignmentFlag.AlignHCenter)
        column.addStretch()

    def show_model(self, name: str, parameters: int, where: str) -> None:
        """Say in an empty chat which model answers, and where it runs."""
        words = strings.MODEL_ANSWERS.format(strings.model_words(name, parameters), where)
        self.model.setText(f"{words}\n{strings.TRIAL_MODEL}" if name == strings.TRIAL_TARGET else words)

    def show_messages(self, messages: Sequence[Message]) -> None:
        """Show another conversation, scrolled to its end."""
        self._remove_widgets(0)
        self._messages = list(messages)
        self._first = max(0, len(messages) - _SHOWN)
        for message in messages[self._first :]:
            self._add_widget(message)
        self._settle()
        self.jump()

    def set_message(self, position: int, message: Message) -> None:
        """Show a message at a position, which may be the next one; later ones stay."""
        if position < len(self._messages):
            self._messages[position] = message
            if position >= self._first:
                self.widgets[position - self._first].show_message(message)
            return
        self._messages.append(message)
        self._add_widget(message)
        self._settle()
        self.jump()

    def truncate(self, length: int) -> None:
        """Remove the messages from position ``length`` on."""
        self._remove_widgets(max(0, length - self._first))
        del self._messages[length:]
        self._first = min(self._first, length)
        self._settle()

    def set_waiting(self, words: str) -> None:
        """Set what the last answer says while it has no text."""
        if self.widgets and isinstance(last := self.widgets[-1], Answer):
            last.set_waiting(words)

    def set_busy(self, busy: bool) -> None:
        """Disable the buttons that ask for an answer while one is written."""
        for widget in self.widgets:
            for button in widget.offers:
                button.setEnabled(not busy)

    def edit_last(self) -> None:
        """Open the last question as a field."""
        questions = [widget for widget in self.widgets if isinstance(widget, Question)]
        if questions and questions[-1].edit_button.isEnabled():
            questions[-1].begin_edit()
            self.ensureWidgetVisible(questions[-1])

    def copy_last(self) -> None:
        """Copy the last answer as Markdown."""
        answers = [widget for widget in self.widgets if isinstance(widget, Answer)]
        if answers:
            answers[-1].copy_button.copy()

    def texts(self) -> list[OriginText]:
        """Return the texts on the page, from the top."""
        return [text for widget in self.widgets for text in widget.texts]

    def reveal(self, text: str) -> None:
        """Show earlier messages back to the first that contains this text, ignoring case."""
        wanted = text.casefold()
        hidden = self._messages[: self._first]
        first = next((number for number, each in enumerate(hidden) if wanted in each.content.casefold()), self._first)
        while self._first > first:
            self._show_earlier()

    def jump(self) -> None:
        """Scroll to the end, and follow it."""
        self._follows = True
        bar = self.verticalScrollBar()
        bar.setValue(bar.maximum())
        self._place_jump()

    def page(self, direction: int) -> None:
        """Scroll one page up (-1) or down (1)."""
        bar = self.verticalScrollBar()
        bar.setValue(bar.value() + direction * bar.pageStep())

    def _add_widget(self, message: Message, at: int | None = None) -> None:
        number = len(self.widgets) if at is None else at
        widget = self._make_widget(message, self._first + number)
        self.widgets.insert(number, widget)
        self._column.insertWidget(2 + number, widget)

    def _make_widget(self, message: Message, position: int) -> Question | Answer:
        if message.role == "user":
            question = Question(self._appearance, message)
            question.edited.connect(lambda text: self.edited.emit(position, text))
            return question
        answer = Answer(self._appearance, message)
        answer.again.connect(self.again)
        answer.continued.connect(self.continued)
        answer.stopped.connect(self.stopped)
        return answer

    def _remove_widgets(self, first: int) -> None:
        for widget in self.widgets[first:]:
            self._column.removeWidget(widget)
            widget.hide()
            widget.deleteLater()
        del self.widgets[first:]

    def _show_earlier(self) -> None:
        """Add widgets of earlier messages above; the visible ones keep their place."""
        bar = self.verticalScrollBar()
        below = bar.maximum() - bar.value()
        first, self._first = self._first, max(0, self._first - _SHOWN)
        for number, message in enumerate(self._messages[self._first : first]):
            self._add_widget(message, number)
        self._settle()
        self._centered.activate()
        bar.setValue(bar.maximum() - below)

    def _settle(self) -> None:
        """Show and hide what depends on the list of messages."""
        self.earlier.setVisible(self._first > 0)
        self._empty.setVisible(not self._messages)
        answers = [widget for widget in self.widgets if isinstance(widget, Answer)]
        for answer in answers:
            answer.set_last(answer is answers[-1])

    def _refresh(self) -> None:
        pad(self._column, 1.2, 1.4, 1.2, 1.4, spacing=1.1)
        self._held.setMaximumWidth(letters(COLUMN_LETTERS))
        for widget in self.widgets:
            widget.refresh()
        self._place_jump()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._place_jump()

    def _range_changed(self, _: int, maximum: int) -> None:
        if self._follows:
            self.verticalScrollBar().setValue(maximum)
        self._place_jump()

    def _moved(self, value: int) -> None:
        self._follows = value >= self.verticalScrollBar().maximum() - lines(_NEAR_LINES)
        self._place_jump()

    def _place_jump(self) -> None:
        self.jump_button.setVisible(not self._follows)
        width, height = self.jump_button.sizeHint().toTuple()
        self.jump_button.setGeometry((self.width() - width) // 2, self.height() - height - lines(0.6), width, height)
        self.jump_button.raise_()
