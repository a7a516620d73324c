"""Draw an answer in a terminal: committed text for good, the tentative tail and a status line in place."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TextIO

from moa_runtime.reasoning import reasoning_end

TAB = "    "
REPLACEMENT = "\ufffd"

# An answer must not move the cursor or talk to the terminal: control characters become visible ones
# (U+241B shows ESC), C1 controls and bidirectional overrides replacement characters.
_VISIBLE: dict[int, str | None] = {code: chr(0x2400 + code) for code in range(32)}
_VISIBLE |= {code: REPLACEMENT for code in (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_VISIBLE |= {ord("\n"): "\n", ord("\t"): TAB, ord("\r"): None, 0x7F: "\u2421", 0x2028: "\n", 0x2029: "\n"}
_CLEAR_ROW, _CLEAR_BELOW = "\x1b[K", "\x1b[J"
# Terminals that know "synchronised update" show the frame at once; the others ignore it. Without
# automatic wrapping a character whose width we misjudge is cut off, but the count of rows stays right.
_BEGIN_FRAME, _END_FRAME = "\x1b[?2026h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?2026l"
_SHOW_CURSOR = "\x1b[?25h"
_FALLBACK_SIZE = (80, 24)


@dataclass(frozen=True)
class Span:
    """Text in one style: the numbers of an ANSI "select graphic rendition" sequence, empty for normal."""

    text: str
    style: str = ""


def clean(text: str) -> str:
    """Return ``text`` without anything that a terminal would obey, character by character."""
    return text.translate(_VISIBLE)


@lru_cache(maxsize=4096)
def char_width(char: str) -> int:
    """Return the columns of a character: 0 (combining), 1, or 2 (East Asian wide, emoji)."""
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def text_width(text: str) -> int:
    return sum(map(char_width, text))


def wrap(text: str, columns: int) -> list[tuple[int, int]]:
    """Cut text into rows at most ``columns`` wide, at spaces where there are any.

    Adding text at the end only changes the last row, so all rows before it may be drawn for good.

    >>> [text[a:b] for text in ["the quick fox"] for a, b in wrap(text, 9)]
    ['the quick', 'fox']

    Returns:
        ``(start, end)`` of each row, at least one; a newline, or a space at a row's end, is in none.
    """
    rows: list[tuple[int, int]] = []
    start = column = 0
    break_at = 0  # where the row's last word begins; 0 while there is no word before it
    in_word = False
    for index, char in enumerate(text):
        width = char_width(char)
        if char == "\n" or (char == " " and column + width > columns):
            rows.append((start, index))
            start, column, break_at, in_word = index + 1, 0, 0, False
            continue
        # Twice if the word that moved down has no room for the character either.
        while column + width > columns and index > start:
            cut = break_at or index
            rows.append((start, cut))
            start, column, break_at = cut, text_width(text[cut:index]), 0
        column += width
        if char != " ":
            in_word = True
        elif in_word:
            break_at = index + 1
    rows.append((start, len(text)))
    return rows


def cut_spans(spans: Iterable[Span], start: int, end: int) -> list[Span]:
    """Return the part ``[start:end]`` of the spans' joined text."""
    parts, offset = [], 0
    for span in spans:
        piece = span.text[max(start - offset, 0) : max(end - offset, 0)]
        if piece:
            parts.append(Span(piece, span.style))
        offset += len(span.text)
    return parts


def clip(spans: Sequence[Span], columns: int) -> list[Span]:
    """Return as much of the spans as fits into one row; an ellipsis says that there is more."""
    text = "".join(span.text for span in spans)
    if text_width(text) <= columns:
        return list(spans)
    used = length = 0
    for char in text:
        used += char_width(char)
        if used > columns - 1:
            break
        length += 1
    return [*cut_spans(spans, 0, length), Span("…")]


class PlainView:
    """A file, a pipe, or a terminal without cursor movements: committed text only, as it comes.

    Attributes:
        begins_reasoning: whether answers begin inside their reasoning, see :mod:`moa_runtime.reasoning`.
        reasoning_style: of that part on a live screen, see :class:`Span`.
    """

    begins_reasoning = False
    reasoning_style = ""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._written = 0

    def draw(self, committed: str, tentative: Sequence[Span] = (), status: Sequence[Span] = ()) -> None:
        """Show the answer as it stands: all of its committed text, what follows it, the status line."""
        self._append(committed)

    def finish(self, committed: str, alone: Sequence[Span] = ()) -> None:
        """Show the committed text and, on a live screen, what was written without the verifier; end the line."""
        self._append(committed)
        if self._written:
            self._out.write("\n")
            self._out.flush()
        self._written = 0

    def write(self, *spans: Span) -> None:
        """Show a line that belongs to no answer; not while one is drawn."""
        self._out.write("".join(span.text for span in spans) + "\n")
        self._out.flush()

    def _append(self, text: str) -> None:
        if len(text) > self._written:
            piece = text[self._written :]
            self._out.write(clean(piece) if self._out.isatty() else piece)
            self._out.flush()
            self._written = len(text)


class LiveView(PlainView):
    """A terminal with ANSI escape sequences.

    Rows of committed text that are full are written once and never touched again. Below them lies the
    *live region*, drawn anew each time: the last committed row, the tentative text, the status line.
    It is never taller than the screen, so the way back to its first row is always known. ``size`` returns the columns
    and rows of the terminal before each frame.
    """

    def __init__(self, out: TextIO, size: Callable[[], tuple[int, int]]) -> None:
        super().__init__(out)
        self._size = size
        self._frozen = 0  # characters of the answer in rows that are not touched again
        self._live_widths: list[int] = []  # columns used in each row of the live region, as drawn
        self._last_frame: object = None

    def draw(self, committed: str, tentative: Sequence[Span], status: Sequence[Span]) -> None:
        size = columns, height = self._usable_size()
        if self._last_frame == (frame := (committed, tuple(tentative), tuple(status), size)):
            return
        self._last_frame = frame
        parts = [_BEGIN_FRAME, self._to_live_region(columns)]
        rest = self._freeze(clean(committed), columns, parts)
        spans = [*rest, *(Span(clean(span.text), span.style) for span in tentative)]
        rows = [*_last_rows(_wrapped(spans, columns), height - 1), clip(status, columns)]
        parts.append("\n".join(_styled(row) + _CLEAR_ROW for row in rows))
        parts += [_CLEAR_BELOW, _END_FRAME]
        self._live_widths = [text_width("".join(span.text for span in row)) for row in rows]
        self._emit(parts)

    def finish(self, committed: str, alone: Sequence[Span] = ()) -> None:
        columns, _ = self._usable_size()
        parts = [_BEGIN_FRAME, self._to_live_region(columns)]
        rest = self._freeze(clean(committed), columns, parts)
        spans = [*rest, *(Span(clean(span.text), span.style) for span in alone)]
        if self._frozen or any(span.text for span in spans):
            parts += [f"{_styled(row)}{_CLEAR_ROW}\n" for row in _wrapped(spans, columns)]
        parts += [_CLEAR_BELOW, _END_FRAME, _SHOW_CURSOR]
        self._frozen, self._live_widths, self._last_frame = 0, [], None
        self._emit(parts)

    def write(self, *spans: Span) -> None:
        self._emit([_styled(spans), "\n"])

    def _usable_size(self) -> tuple[int, int]:
        columns, height = self._size()
        # The last column stays free: terminals differ in what a cursor after it does.
        return max(columns - 1, 2), max(height, 3)

    def _to_live_region(self, columns: int) -> str:
        """Return the escape sequence to the start of the live region, whose rows a narrower window may have broken."""
        rows = sum(max(1, -(-width // (columns + 1))) for width in self._live_widths)
        return f"\x1b[{rows - 1}A\r" if rows > 1 else "\r"

    def _freeze(self, committed: str, columns: int, parts: list[str]) -> list[Span]:
        """Write the committed rows that are full; return the spans of the one that is not."""
        end = reasoning_end(committed, begun=self.begins_reasoning)
        spans, begin = [Span(committed[:end], self.reasoning_style), Span(committed[end:])], self._frozen
        rows = [(begin + start, begin + stop) for start, stop in wrap(committed[begin:], columns)]
        parts += [f"{_styled(cut_spans(spans, start, stop))}{_CLEAR_ROW}\n" for start, stop in rows[:-1]]
        self._frozen = rows[-1][0]
        return cut_spans(spans, self._frozen, len(committed))

    def _emit(self, parts: Sequence[str]) -> None:
        self._out.write("".join(parts))
        self._out.flush()


def view_for(out: TextIO) -> PlainView:
    """Return the view that suits the stream."""
    if not out.isatty() or os.environ.get("TERM") == "dumb":
        return PlainView(out)
    if sys.platform == "win32":
        os.system("")  # switches a console's escape sequences on
    return LiveView(out, lambda: _terminal_size(out))


def _terminal_size(out: TextIO) -> tuple[int, int]:
    # Not shutil's: that one prefers $COLUMNS, which does not follow the window.
    try:
        columns, rows = os.get_terminal_size(out.fileno())
    except OSError:
        return _FALLBACK_SIZE
    return columns or _FALLBACK_SIZE[0], rows or _FALLBACK_SIZE[1]


def _wrapped(spans: Sequence[Span], columns: int) -> list[list[Span]]:
    text = "".join(span.text for span in spans)
    return [cut_spans(spans, start, end) for start, end in wrap(text, columns)]


def _last_rows(rows: list[list[Span]], most: int) -> list[list[Span]]:
    """The end of what does not fit, under a row that says so."""
    if len(rows) <= most:
        return rows
    hidden = len(rows) - most + 1
    return [[Span(f"... {hidden} rows")], *rows[hidden:]]


def _styled(spans: Sequence[Span]) -> str:
    return "".join(f"\x1b[{span.style}m{span.text}\x1b[0m" if span.style else span.text for span in spans)
