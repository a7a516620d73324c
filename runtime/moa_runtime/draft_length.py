"""The draft length that a user asks for. Light, so that a command line can say it at once."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Literal, get_args

#: ``auto`` is the shape that pays, the others Thompson sampling as in EESD, see :mod:`moa_runtime.drafting.thompson`.
Adaptive = Literal["auto", "thompson", "thompson-calibrated"]
ADAPTIVE: tuple[Adaptive, ...] = get_args(Adaptive)
#: Tokens of each draft, a chain; or how their shape is chosen.
DraftLength = int | Adaptive


def draft_length_of(text: str) -> DraftLength:
    """As written on a command line. Raises ArgumentTypeError: neither a whole number nor one of :data:`ADAPTIVE`."""
    for word in ADAPTIVE:
        if text == word:
            return word
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number or {', '.join(ADAPTIVE)}, not {text!r}") from None
