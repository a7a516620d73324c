"""The draft length that a user asks for. Light, so that a command line can say it at once."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Literal

#: Tokens of each draft, a chain; or the shape that pays.
DraftLength = int | Literal["auto"]


def draft_length_of(text: str) -> DraftLength:
    """As written on a command line. Raises ArgumentTypeError: neither a whole number nor ``auto``."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number or auto, not {text!r}") from None
