"""The widgets of a message's Markdown blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QTextCharFormat, QTextCursor, QTextOption
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QTextEdit, QVBoxLayout, QWidget

from moa_chat.desktop.appearance import Look
from moa_chat.desktop.buttons import CopyButton
from moa_chat.desktop.highlight import highlight
from moa_chat.desktop.markdown.align import align
from moa_chat.desktop.markdown.blocks import Block
from moa_chat.desktop.markdown.origins import SpanIndex
from moa_chat.desktop.origin_text import OriginText, Struck, document_positions
from moa_chat.desktop.style import code_font, document_style, lines
from moa_chat.history.message import Dropped


class BlockWidget(Protocol):
    """What a message does with each of its blocks."""

    def show_block(self, block: Block, source: str, index: SpanIndex, dropped: Sequence[Dropped]) -> None:
        """Show this block of ``source``, with the dropped texts that stood in it, in the place of what was there."""


class TextBlock(OriginText):
    """A paragraph, heading, list, quotation or table."""

    def __init__(self, look: Look, parent: QWidget | None = None) -> None:
        super().__init__(look, parent)
        self.document().setDefaultStyleSheet(document_style(look.theme, look.zoom))

    def show_block(self, block: Block, source: str, index: SpanIndex, dropped: Sequence[Dropped]) -> None:
        with self.rendering():
            self.setHtml(block.html)
            rendered = self.document().toPlainText()
            offsets = [block.start + at for at in align(rendered, source[block.start : block.end])]
            self.mark(index.runs(offsets), strikes(offsets, dropped))
        links = "<a " in block.html
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus if links else Qt.FocusPolicy.ClickFocus)


class CodeBlock(QFrame):
    """Code with its language, highlighted, and a button that copies it."""

    def __init__(self, look: Look, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._look = look
        self.setObjectName("code")
        self._language = QLabel()
        self._language.setObjectName("muted")
        self._code = ""
        self.copy_button = CopyButton(look, "Copy this code", lambda: self._code, label="Copy")
        self.text = OriginText(look)
        self.text.setAccessibleName("Code")
        self.text.setLineWrapMode(QTextEdit.LineWrapMode.NoWrap)
        self.text.setWordWrapMode(QTextOption.WrapMode.NoWrap)
        self.text.setFont(code_font(look.zoom))
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
        code = self._code = (block.code or "").removesuffix("\n")
        self._language.setText(block.language or "code")
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
        for piece in highlight(code, language, self._look.theme):
            colored = QTextCharFormat()
            colored.setForeground(QColor(piece.color))
            cursor.setPosition(places[piece.start])
            cursor.setPosition(places[piece.end], QTextCursor.MoveMode.KeepAnchor)
            cursor.mergeCharFormat(colored)
        cursor.endEditBlock()


def strikes(offsets: Sequence[int], dropped: Sequence[Dropped]) -> list[Struck]:
    """The dropped texts that stood in a rendered text whose characters have these offsets in the source."""
    return [Struck(bisect_left(offsets, one.offset), one.text) for one in dropped]
