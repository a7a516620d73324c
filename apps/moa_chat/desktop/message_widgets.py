"""The widgets of questions and answers, and of an answer's Markdown blocks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QColor, QFontMetricsF, QTextCharFormat, QTextCursor, QTextOption
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPlainTextEdit, QSizePolicy, QTextEdit, QVBoxLayout, QWidget

from moa_chat import strings
from moa_chat.desktop.appearance import COLUMN_LETTERS, Appearance, code_font, document_style, letters, lines
from moa_chat.desktop.markdown import Block, GrowingMarkdown, SpanIndex, align, whole_dropped, whole_words
from moa_chat.desktop.origin_text import OriginText, Struck, document_positions, highlight
from moa_chat.desktop.widgets import CopyButton, IconButton, add, label, pad, push_button
from moa_chat.history.message import Dropped, Message
from moa_runtime.reasoning import reasoning_end, seems_begun, split_reasoning
from moa_runtime.tokens import common_length

_SHOWN_CHARACTERS = 6000  # of a question; a pasted book would slow down every resize
_EDITOR_LINES = 6
_MEASURED_LINES = 100


class TextBlock(OriginText):
    """A paragraph, heading, list, quotation or table."""

    def __init__(self, appearance: Appearance) -> None:
        super().__init__(appearance)
        self.document().setDefaultStyleSheet(document_style(appearance.theme, appearance.zoom))

    def show_block(self, block: Block, source: str, index: SpanIndex, dropped: Sequence[Dropped]) -> None:
        """Show this block of ``source`` instead of the one before, with the dropped texts that belong to it."""
        with self.rendering():
            self.setHtml(block.html)
            rendered = self.document().toPlainText()
            offsets = [block.start + at for at in align(rendered, source[block.start : block.end])]
            self.mark(index.runs(offsets), strikes(offsets, dropped))
        links = "<a " in block.html
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus if links else Qt.FocusPolicy.ClickFocus)


class CodeBlock(QFrame):
    """Code with its language, highlighted, and a button that copies it."""

    def __init__(self, appearance: Appearance) -> None:
        super().__init__()
        self._appearance = appearance
        self.setObjectName("code")
        self._language = label(style="muted", wraps=False)
        self._code = ""
        self.copy_button = CopyButton(appearance, strings.COPY_CODE, lambda: self._code)
        self.text = OriginText(appearance)
        self.text.setAccessibleName(strings.CODE)
        self.text.setLineWrapMode(QTextEdit.LineWrapMode.NoWrap)
        self.text.setWordWrapMode(QTextOption.WrapMode.NoWrap)
        self.text.setFont(code_font(appearance.zoom))
        gap = lines(0.3)
        top = QHBoxLayout()
        top.setContentsMargins(2 * gap, 0, 0, 0)
        top.addWidget(self._language, 1)
        top.addWidget(self.copy_button)
        inside = QVBoxLayout()
        inside.setContentsMargins(2 * gap, 0, 2 * gap, 2 * gap)
        inside.addWidget(self.text)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(gap, gap // 2, gap, 0)
        layout.setSpacing(0)
        layout.addLayout(top)
        layout.addLayout(inside)

    def show_block(self, block: Block, source: str, index: SpanIndex, dropped: Sequence[Dropped]) -> None:
        """As :meth:`TextBlock.show_block`."""
        code = self._code = (block.code or "").removesuffix("\n")
        self._language.setText(block.language or strings.CODE_LANGUAGE)
        # Past the opening fence, or the alignment would find letters of the code in it.
        fenced = source[block.start : block.end].lstrip(" ").startswith(("```", "~~~"))
        start = source.find("\n", block.start) + 1 if fenced else block.start
        with self.text.rendering():
            self.text.setPlainText(code)
            self._highlight(code, block.language)
            offsets = [start + at for at in align(code, source[start : block.end])]
            self.text.mark(index.runs(offsets), strikes(offsets, dropped))

    def _highlight(self, code: str, language: str) -> None:
        cursor, places = QTextCursor(self.text.document()), document_positions(code)
        cursor.beginEditBlock()
        for start, end, color in highlight(code, language, self._appearance.theme):
            colored = QTextCharFormat()
            colored.setForeground(QColor(color))
            cursor.setPosition(places[start])
            cursor.setPosition(places[end], QTextCursor.MoveMode.KeepAnchor)
            cursor.mergeCharFormat(colored)
        cursor.endEditBlock()


def strikes(offsets: Sequence[int], dropped: Sequence[Dropped]) -> list[Struck]:
    """Return the places of dropped texts in a rendered text, whose characters have these offsets in the source."""
    return [Struck(bisect_left(offsets, one.offset), one.text) for one in dropped]


class Question(QWidget):
    """A message of the user, at the right, which can be copied or edited."""

    edited = Signal(str)  # the text that the user wants to ask instead

    def __init__(self, appearance: Appearance, message: Message) -> None:
        super().__init__()
        self.message = message
        text = message.content
        self._text = OriginText(appearance)
        self._text.setPlainText(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…")
        self._text.setAccessibleName(strings.YOUR_MESSAGE)
        self._bubble = QFrame()
        self._bubble.setObjectName("bubble")
        inside = QVBoxLayout(self._bubble)
        pad(inside, 0.7, 0.45, 0.7, 0.45)
        self.editor = QPlainTextEdit()
        self.editor.setAccessibleName(strings.EDIT_MESSAGE)
        self.editor.hide()
        self._choices = self._make_choices()
        add(inside, self._text, self.editor, self._choices)
        edit = strings.EDIT_AND_SEND
        self.edit_button = IconButton(appearance, "edit", edit, self.begin_edit, word=strings.EDIT)
        self.offers = (self.edit_button,)
        actions = QHBoxLayout()
        actions.setSpacing(0)
        actions.addStretch()
        add(actions, CopyButton(appearance, strings.COPY_MESSAGE, lambda: self.message.content), self.edit_button)
        layout = QVBoxLayout(self)
        pad(layout, 0, spacing=0.1)
        row = QHBoxLayout()
        row.addStretch(1)
        row.addWidget(self._bubble, 6)
        layout.addLayout(row)
        layout.addLayout(actions)
        self._bubble.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)
        self.refresh()

    @property
    def texts(self) -> list[OriginText]:
        return [self._text]

    def show_message(self, message: Message) -> None:
        """Do nothing: a question does not change."""

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
        pad(row, 0)
        self.send_button = push_button(strings.SEND, self._send, style="primary")
        row.addWidget(label(strings.EDIT_REPLACES, "muted"), 1)
        add(row, push_button(strings.CANCEL, lambda: self._show_editor(False)), self.send_button)
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
            self.refresh()

    def refresh(self) -> None:
        """Fit the bubble to the text, also after a change of theme or size: a short message gets a short bubble."""
        metrics = QFontMetricsF(self._text.font())
        shown = self._text.toPlainText().splitlines()[:_MEASURED_LINES]
        widest = max((metrics.horizontalAdvance(line[: COLUMN_LETTERS * 2]) for line in shown), default=0.0)
        self._bubble.setMaximumWidth(math.ceil(widest) + 2 * lines(0.7) + 2)


class Answer(QWidget):
    """A message of target and device, in Markdown."""

    again = Signal()  # the user wants another answer to the same question
    continued = Signal()  # the user wants more of this one
    stopped = Signal()  # the user cancels the answer

    def __init__(self, appearance: Appearance, message: Message) -> None:
        super().__init__()
        self._appearance = appearance
        self.message = Message("assistant", "")
        self._reasoned = 0  # characters that are reasoning
        self._markdown = GrowingMarkdown()
        self._dropped: list[Dropped] = []
        self._widgets: list[CodeBlock | TextBlock] = []
        self._blocks = QVBoxLayout()
        self._blocks.setSpacing(lines(0.7))
        self._waiting = label("…", "muted", says=strings.ANSWER_STATE, wraps=False)
        self.cancel_button = push_button(strings.CANCEL, self.stopped.emit)
        self.cancel_button.hide()
        self._wait = QWidget()
        waiting = QHBoxLayout(self._wait)
        pad(waiting, 0)
        add(waiting, self._waiting, self.cancel_button)
        waiting.addStretch()
        self._footer = QWidget()
        self._last = True
        again, cut_off = strings.ANSWER_AGAIN, strings.CONTINUE_ANSWER
        self.again_button = IconButton(appearance, "again", again, self.again.emit, word=strings.AGAIN)
        self.continue_button = IconButton(appearance, "continue", cut_off, self.continued.emit, word=strings.CONTINUE)
        self.offers = (self.again_button, self.continue_button)  # which ask for an answer
        self.copy_button = CopyButton(appearance, strings.COPY_ANSWER, self._answer)
        self._figures = label(style="figures", selectable=True)
        footer = QHBoxLayout(self._footer)
        pad(footer, 0, spacing=0.1)
        add(footer, self.copy_button, *self.offers)
        footer.addSpacing(lines(0.4))
        footer.addWidget(self._figures, 1)
        layout = QVBoxLayout(self)
        pad(layout, 0, spacing=0.4)
        layout.addLayout(self._blocks)
        add(layout, self._wait, self._footer)
        self.show_message(message)

    def _answer(self) -> str:
        """Return the answer without its reasoning."""
        content = self.message.content
        return split_reasoning(content, begun=seems_begun(content)).answer

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
        """Show the buttons that ask again or continue, which only the last answer has."""
        self._last = last
        self.again_button.setVisible(last)
        self.continue_button.setVisible(last and self.message.can_go_on)

    @property
    def texts(self) -> list[OriginText]:
        """Texts of the blocks, in order."""
        return [widget.text if isinstance(widget, CodeBlock) else widget for widget in self._widgets]

    @property
    def waiting(self) -> str:
        """The words in place of an answer without text."""
        return self._waiting.text()

    def set_waiting(self, words: str) -> None:
        """Show these words while the answer has no text, with a button that cancels it."""
        self._waiting.setText(words)
        self.cancel_button.show()

    def refresh(self) -> None:
        """Render everything again, after a change of theme, size or colouring."""
        self._remove_from(0)
        self._render(0)

    def _render(self, first: int) -> None:
        blocks, index = self._markdown.blocks, SpanIndex(whole_words(self.message.spans))
        self._dropped = whole_dropped(self.message.dropped, self.message.content)
        self._remove_from(len(blocks))
        content = self.message.content
        end = reasoning_end(content, begun=seems_begun(content))
        if end and not self._reasoned:  # only now is it known that the text begins with reasoning
            first = 0
        self._reasoned = end
        for number in range(first, len(blocks)):
            block = blocks[number]
            if block.start < end and block.code is None:
                block = replace(block, html=f"<blockquote>{block.html}</blockquote>")
            widget = self._widget(number, CodeBlock if block.code is not None else TextBlock)
            widget.show_block(block, self.message.content, index, self._dropped_in(number))

    def _widget(self, number: int, kind: type[CodeBlock] | type[TextBlock]) -> CodeBlock | TextBlock:
        """The block's widget, made if there is none or one of another kind."""
        if number < len(self._widgets) and not isinstance(self._widgets[number], kind):
            self._remove_from(number)
        if number == len(self._widgets):
            made = kind(self._appearance)
            self._widgets.append(made)
            self._blocks.addWidget(made)
        return self._widgets[number]

    def _remove_from(self, number: int) -> None:
        for widget in self._widgets[number:]:
            self._blocks.removeWidget(widget)
            widget.hide()
            widget.deleteLater()
        del self._widgets[number:]

    def _block_at(self, offset: int) -> int:
        """Return the index of the block that holds an offset of the source."""
        return max(0, sum(block.start <= offset for block in self._markdown.blocks) - 1)

    def _dropped_in(self, number: int) -> list[Dropped]:
        """Return the dropped texts in a block, or between it and the next one."""
        blocks = self._markdown.blocks
        start = blocks[number].start if number else 0
        end = blocks[number + 1].start if number + 1 < len(blocks) else len(self.message.content) + 1
        return [one for one in self._dropped if start <= one.offset < end]


def _agreed(before: Message, after: Message) -> int:
    """Return the number of characters, from the start, with the same origin in both; all if nothing has changed."""
    if before.spans == after.spans:
        return max(len(before.content), len(after.content))
    same = common_length(before.spans, after.spans)
    length = sum(len(span.text) for span in after.spans[:same])
    if same < min(len(before.spans), len(after.spans)):
        was, now = before.spans[same], after.spans[same]
        if (was.origin, was.committed) == (now.origin, now.committed):
            length += common_length(was.text, now.text)
    return length
