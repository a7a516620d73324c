"""Colours of code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Name, Number, Operator, String
from pygments.util import ClassNotFound

from moa_chat.desktop.theme import Theme

_LONGEST = 50_000  # characters; more than that is shown plainly at once instead of coloured late


@dataclass(frozen=True)
class Piece:
    """Characters ``[start, end)`` of the code that are not in the usual colour."""

    start: int
    end: int
    color: str


def highlight(code: str, language: str, theme: Theme) -> Iterator[Piece]:
    """The coloured pieces in order; none for a language that is not known."""
    lexer = _lexer(language)
    if lexer is None or len(code) > _LONGEST:
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
            yield Piece(start, start + len(text), color)


@lru_cache(maxsize=64)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language.lower()) if language else None
    except ClassNotFound:
        return None
