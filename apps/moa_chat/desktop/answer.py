"""An answer on the page."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from moa_chat.desktop.appearance import Look
from moa_chat.desktop.buttons import CopyButton, IconButton
from moa_chat.desktop.markdown.blocks import GrowingMarkdown
from moa_chat.desktop.markdown.origins import SpanIndex
from moa_chat.desktop.markdown.whole_words import whole_dropped, whole_words
from moa_chat.desktop.message_widgets import BlockWidget, CodeBlock, TextBlock
from moa_chat.desktop.origin_text import OriginText
from moa_chat.desktop.style import lines
from moa_chat.history.message import Dropped, Message
from moa_runtime.tokens import common_length


class Answer(QWidget):
    """What target and device wrote, in Markdown.

    Signals:
        again: the user wants another answer to the same question.
        continued: the user wants more of this one.
        stopped: the user waits no longer.

    Attributes:
        offers: buttons that ask for an answer.
    """

    again = Signal()
    continued = Signal()
    stopped = Signal()

    def __init__(self, look: Look, message: Message, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._look = look
        self.message = Message("assistant", "")
        self._markdown = GrowingMarkdown()
        self._dropped: list[Dropped] = []
        self._widgets: list[CodeBlock | TextBlock] = []
        self._blocks = QVBoxLayout()
        self._blocks.setSpacing(lines(0.7))
        self._waiting = QLabel("…")
        self._waiting.setObjectName("muted")
        self._waiting.setAccessibleName("State of the answer")
        self.cancel_button = QPushButton("Cancel")
        self.cancel_button.clicked.connect(lambda: self.stopped.emit())
        self.cancel_button.hide()
        self._wait = QWidget()
        waiting = QHBoxLayout(self._wait)
        waiting.setContentsMargins(0, 0, 0, 0)
        waiting.addWidget(self._waiting)
        waiting.addWidget(self.cancel_button)
        waiting.addStretch()
        self._footer = QWidget()
        self._last = True
        self.again_button = IconButton(look, "again", "Answer again", self.again.emit, label="Again")
        self.continue_button = IconButton(
            look, "continue", "Go on with this answer, which was cut off", self.continued.emit, label="Continue"
        )
        self.offers = (self.again_button, self.continue_button)
        says = "Copy the answer as Markdown"
        self.copy_button = CopyButton(look, says, lambda: self.message.content, label="Copy")
        self._figures = QLabel()
        self._figures.setObjectName("figures")
        self._figures.setWordWrap(True)
        self._figures.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        footer = QHBoxLayout(self._footer)
        footer.setContentsMargins(0, 0, 0, 0)
        footer.setSpacing(lines(0.1))
        footer.addWidget(self.copy_button)
        footer.addWidget(self.again_button)
        footer.addWidget(self.continue_button)
        footer.addSpacing(lines(0.4))
        footer.addWidget(self._figures, 1)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(lines(0.4))
        layout.addLayout(self._blocks)
        layout.addWidget(self._wait)
        layout.addWidget(self._footer)
        self.show_message(message)

    def show_message(self, message: Message) -> None:
        """Show the answer as it is now; only what has changed is rendered."""
        before, self.message = self.message, message
        first = self._markdown.update(message.content)
        # Confirmed text looks different without having changed, and so do other drops.
        seen = min([_agreed(before, message), *(one.offset for one in set(message.dropped) ^ set(before.dropped))])
        self._render(min(first, self._block_at(seen)))
        self._wait.setVisible(not message.content and not message.finished)
        self._footer.setVisible((bool(message.content) and message.finished) or bool(message.figures))
        self._figures.setText(message.figures)
        self.set_last(self._last)

    def set_last(self, last: bool) -> None:
        """Only of the last answer one can have another, or more."""
        self._last = last
        self.again_button.setVisible(last)
        self.continue_button.setVisible(last and self.message.can_go_on)

    @property
    def texts(self) -> list[OriginText]:
        """Of its blocks, in order."""
        return [widget.text if isinstance(widget, CodeBlock) else widget for widget in self._widgets]

    @property
    def waiting(self) -> str:
        """What stands there now."""
        return self._waiting.text()

    def set_waiting(self, words: str) -> None:
        """What stands in the place of an answer that has no text yet, with a button for those who wait no longer."""
        self._waiting.setText(words)
        self.cancel_button.show()

    def refresh(self) -> None:
        """Render everything again, after a change of theme, size or colouring."""
        self._remove_from(0)
        self._render(0)

    # -- helpers -------------------------------------------------------------------------------

    def _render(self, first: int) -> None:
        blocks, index = self._markdown.blocks, SpanIndex(whole_words(self.message.spans))
        self._dropped = whole_dropped(self.message.dropped, self.message.content)
        self._remove_from(len(blocks))
        for number in range(first, len(blocks)):
            block = blocks[number]
            widget = self._widget(number, CodeBlock if block.code is not None else TextBlock)
            widget.show_block(block, self.message.content, index, self._dropped_in(number))

    def _widget(self, number: int, kind: type[CodeBlock] | type[TextBlock]) -> BlockWidget:
        """The block's widget, made if there is none or one of another kind."""
        if number < len(self._widgets) and not isinstance(self._widgets[number], kind):
            self._remove_from(number)
        if number == len(self._widgets):
            made = kind(self._look)
            self._widgets.append(made)
            self._blocks.addWidget(made)
        return self._widgets[number]

    def _remove_from(self, number: int) -> None:
        for widget in self._widgets[number:]:
            assert isinstance(widget, QWidget)
            self._blocks.removeWidget(widget)
            widget.hide()
            widget.deleteLater()
        del self._widgets[number:]

    def _block_at(self, offset: int) -> int:
        """Index of the block that holds an offset of the source."""
        return max(0, sum(block.start <= offset for block in self._markdown.blocks) - 1)

    def _dropped_in(self, number: int) -> list[Dropped]:
        """What stood in a block, or between it and the next one."""
        blocks = self._markdown.blocks
        start = blocks[number].start if number else 0
        end = blocks[number + 1].start if number + 1 < len(blocks) else len(self.message.content) + 1
        return [one for one in self._dropped if start <= one.offset < end]


def _agreed(before: Message, after: Message) -> int:
    """How many characters, from the start, are of the same origin in both; all where nothing has changed."""
    if before.spans == after.spans:
        return max(len(before.content), len(after.content))
    same = common_length(before.spans, after.spans)
    length = sum(len(span.text) for span in after.spans[:same])
    if same < min(len(before.spans), len(after.spans)):
        was, now = before.spans[same], after.spans[same]
        if (was.origin, was.committed) == (now.origin, now.committed):
            length += common_length(was.text, now.text)
    return length
