"""Generated text for people: every token with its origin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from moa_runtime.session.events import Origin
from moa_runtime.tokenizer import ChatTokenizer


class Mark(NamedTuple):
    """How tokens of one origin are shown: an ANSI colour, or a letter without a terminal; and the legend."""

    colour: str
    letter: str
    meaning: str


MARKS = {
    Origin.DRAFTED: Mark("32", "d", "drafted by the device and accepted"),
    Origin.OFFLINE: Mark("36", "o", "written offline and accepted"),
    Origin.CORRECTED: Mark("33", "t", "chosen by the target"),
    Origin.KEPT: Mark("35", "k", "written offline and kept by policy"),
}
ROLLED_BACK = Mark("31", "r", "written offline and rolled back")


def show_answer(
    question: str,
    tokens: Sequence[int],
    origins: Sequence[Origin],
    tokenizer: ChatTokenizer,
) -> None:
    """Print a question and its committed answer, one origin a token; see :func:`show_tokens`."""
    show_tokens(f"> {question}", tokens, [MARKS[origin] for origin in origins], tokenizer)


def show_tokens(title: str, tokens: Sequence[int], marks: Sequence[Mark], tokenizer: ChatTokenizer) -> None:
    """Print a title and a text with one mark a token, to stderr, so that stdout holds the result alone.

    Runs of tokens of one origin are coloured, or without a terminal marked like ``⟨d:Red and⟩⟨t: blue⟩``.
    """
    out, coloured = sys.stderr, sys.stderr.isatty()
    print(title, file=out)
    shown = ""
    written: list[int] = []
    for mark, run in groupby(zip(tokens, marks, strict=True), key=lambda pair: pair[1]):
        written += [token for token, _ in run]
        text = tokenizer.decode(written)
        part, shown = text[len(shown) :], text
        out.write(f"\x1b[{mark.colour}m{part}\x1b[0m" if coloured else f"⟨{mark.letter}:{part}⟩")
    used = dict.fromkeys(marks)
    print("\n" + "; ".join(f"{mark.letter} {mark.meaning}" for mark in used), file=out)
    print(file=out)
