"""A read-only text whose characters are coloured by their origin, and code by its syntax."""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Name, Number, Operator, String
from pygments.util import ClassNotFound
from PySide6.QtCore import QEvent, QSizeF, Qt, QUrl
from PySide6.QtGui import QColor, QDesktopServices, QHelpEvent, QResizeEvent, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QFrame, QSizePolicy, QTextBrowser, QTextEdit, QToolTip

from moa_chat import strings
from moa_chat.desktop.appearance import Appearance, Theme
from moa_chat.desktop.markdown import Run
from moa_runtime.events import Origin

_LONGEST_CODE = 50_000  # characters; longer code is shown at once without colours, as colouring takes long
_STRUCK_LENGTH = 14
_STRUCK_SIZE = 0.82  # relative to other letters, so that an answer with many corrections stays readable


def highlight(code: str, language: str, theme: Theme) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and colour of each coloured piece in order; none for an unknown language."""
    lexer = _lexer(language)
    if lexer is None or len(code) > _LONGEST_CODE:
        return
    colors = (
        (Comment, theme.comment),
        (Keyword, theme.keyword),
        (Operator.Word, theme.keyword),
        (String, theme.string),
        (Number, theme.number),
        (Name.Function, theme.number),
        (Name.Class, theme.number),
        (Name.Tag, theme.keyword),
        (Name.Builtin, theme.name),
        (Name.Decorator, theme.name),
        (Name.Attribute, theme.name),
    )
    for start, kind, text in lexer.get_tokens_unprocessed(code):
        color = next((color for group, color in colors if kind in group), None)
        if color is not None:
            yield start, start + len(text), color


@lru_cache(maxsize=64)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language.lower()) if language else None
    except ClassNotFound:
        return None


@dataclass(frozen=True)
class Struck:
    """Text that was taken back, and the character of the rendered text before which it stood."""

    before: int
    text: str


class OriginText(QTextBrowser):
    """Read-only text exactly as high as it has to be; the page around it does the scrolling."""

    def __init__(self, appearance: Appearance) -> None:
        super().__init__()
        self._appearance = appearance
        self._tips: list[tuple[int, int, str]] = []  # start, end, sentence; in positions of the document
        self._rendering = False
        self.setAccessibleName(strings.MESSAGE_TEXT)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setOpenLinks(False)
        self.anchorClicked.connect(_open_link)
        self.document().setDocumentMargin(0)
        self.document().documentLayout().documentSizeChanged.connect(self._fit)

    def loadResource(self, kind: int, name: QUrl | str) -> Any:
        """Load nothing, neither from disk nor from the network."""
        return None

    def mark(self, runs: Sequence[Run], struck: Sequence[Struck] = ()) -> None:
        """Colour the text by origin, or only what is not confirmed, and insert what was taken back.

        Must follow on new content: colours and text inserted before stay.
        """
        places = document_positions(self.document().toPlainText())
        cursor = QTextCursor(self.document())
        cursor.beginEditBlock()
        for run in runs:
            if color := self._color(run.origin, run.committed):
                cursor.setPosition(places[run.start])
                cursor.setPosition(places[run.end], QTextCursor.MoveMode.KeepAnchor)
                form = QTextCharFormat()
                form.setForeground(QColor(color))
                if self._appearance.origins and not run.committed:  # not by colour alone
                    form.setUnderlineStyle(QTextCharFormat.UnderlineStyle.DotLine)
                cursor.mergeCharFormat(form)
        self._tips = [
            (places[run.start], places[run.end], strings.origin_sentence(run.origin, run.committed)) for run in runs
        ]
        # From the end on, so that the places before are still right.
        for one in sorted(struck, key=lambda one: one.before, reverse=True) if self._appearance.origins else ():
            if one.text.strip():
                self._strike(cursor, places[one.before], one.text)
        cursor.endEditBlock()

    def _strike(self, cursor: QTextCursor, position: int, text: str) -> None:
        """Insert the beginning of a text that no longer counts."""
        words = " ".join(text.split())
        shown = textwrap.shorten(words, _STRUCK_LENGTH, placeholder="…") if " " in words else words[:_STRUCK_LENGTH]
        struck = QTextCharFormat()
        struck.setFontStrikeOut(True)
        struck.setFontPointSize(_STRUCK_SIZE * self.font().pointSizeF())
        struck.setForeground(QColor(self._appearance.theme.dropped))
        cursor.setPosition(position)
        if text[:1].isspace():
            cursor.insertText("\N{THIN SPACE}", QTextCharFormat())
        cursor.insertText(shown, struck)
        cursor.insertText("\N{THIN SPACE}", QTextCharFormat())
        length = cursor.position() - position
        moved = [
            (start + length * (start >= position), end + length * (end > position), tip)
            for start, end, tip in self._tips
        ]
        self._tips = [*moved, (position, position + length, strings.DROPPED_TEXT.format(words))]

    def find_all(self, text: str) -> list[QTextCursor]:
        """Return the places of a text, ignoring case; text that was taken back is not searched."""
        found, cursor = [], QTextCursor(self.document())
        while not (cursor := self.document().find(text, cursor)).isNull():
            if not cursor.charFormat().fontStrikeOut():
                found.append(cursor)
        return found

    def _color(self, origin: Origin, committed: bool) -> str | None:
        """Return the colour of text; None for the usual one."""
        theme = self._appearance.theme
        if self._appearance.origins or (not committed and origin in (Origin.OFFLINE, Origin.KEPT)):
            return theme.of_origin(origin)
        return None if committed else theme.tentative

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QHelpEvent) and event.type() is QEvent.Type.ToolTip:
            position = self.cursorForPosition(event.pos()).position()
            tips = [tip for start, end, tip in self._tips if start <= position < end]
            QToolTip.showText(event.globalPos(), tips[-1] if tips else "", self)
            return True
        return super().event(event)

    @contextlib.contextmanager
    def rendering(self) -> Iterator[None]:
        """Change the content in steps, and fit the height once at the end, so that the page does not jump."""
        self._rendering = True
        try:
            yield
        finally:
            self._rendering = False
            self._fit(self.document().size())

    def _fit(self, size: QSizeF) -> None:
        if self._rendering:
            return
        height = math.ceil(size.height())
        wraps = self.lineWrapMode() is not QTextEdit.LineWrapMode.NoWrap
        if not wraps and self.document().idealWidth() > self.viewport().width():
            height += self.horizontalScrollBar().sizeHint().height()
        if height != self.height():
            self.setFixedHeight(height)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit(self.document().size())


def document_positions(text: str) -> list[int]:
    """Return the position in a Qt document of each character of ``text``, and of its end: Qt counts UTF-16 units."""
    return [0, *accumulate(2 if ord(char) > 0xFFFF else 1 for char in text)]


def _open_link(url: QUrl) -> None:
    """Open a link in the browser, if its scheme is one of the web or mail."""
    if url.scheme() in ("http", "https", "mailto"):
        QDesktopServices.openUrl(url)
