"""Text of a model made fit for a terminal: no control characters, known widths, rows."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

TAB = "    "
REPLACEMENT = "\ufffd"

# An answer must not move the cursor or talk to the terminal: control characters become visible ones
# (U+241B shows ESC), C1 controls and bidirectional overrides replacement characters.
_VISIBLE: dict[int, str | None] = {code: chr(0x2400 + code) for code in range(32)}
_VISIBLE |= {code: REPLACEMENT for code in (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_VISIBLE |= {ord("\n"): "\n", ord("\t"): TAB, ord("\r"): None, 0x7F: "\u2421", 0x2028: "\n", 0x2029: "\n"}


@dataclass(frozen=True)
class Span:
    """Text in one style: the numbers of an ANSI "select graphic rendition" sequence, empty for normal."""

    text: str
    style: str = ""


def clean(text: str) -> str:
    """``text`` without anything that a terminal would obey. Works character by character."""
    return text.translate(_VISIBLE)


@lru_cache(maxsize=4096)
def char_width(char: str) -> int:
    """Columns that a character takes: 0 (combining), 1, or 2 (East Asian wide, emoji)."""
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
        # Twice where the word that moved down has no room for the character either.
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
    """The part ``[start:end]`` of the spans' joined text."""
    parts, offset = [], 0
    for span in spans:
        piece = span.text[max(start - offset, 0) : max(end - offset, 0)]
        if piece:
            parts.append(Span(piece, span.style))
        offset += len(span.text)
    return parts


def clip(spans: Sequence[Span], columns: int) -> list[Span]:
    """As much of the spans as fits into one row."""
    used = length = 0
    for char in "".join(span.text for span in spans):
        used += char_width(char)
        if used > columns:
            break
        length += 1
    return cut_spans(spans, 0, length)
