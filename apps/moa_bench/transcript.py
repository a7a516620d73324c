"""An answer for people: every token with where it came from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TextIO

from moa_runtime.session.events import Origin
from moa_runtime.tokenizer import ChatTokenizer

_COLOURS = {Origin.DRAFTED: "32", Origin.OFFLINE: "36", Origin.CORRECTED: "33", Origin.KEPT: "35"}
_LETTERS = {Origin.DRAFTED: "d", Origin.OFFLINE: "o", Origin.CORRECTED: "t", Origin.KEPT: "k"}
_LEGEND = {
    Origin.DRAFTED: "drafted by the device and accepted",
    Origin.OFFLINE: "written offline and accepted",
    Origin.CORRECTED: "chosen by the target",
    Origin.KEPT: "written offline and kept by policy",
}


def show_answer(
    question: str,
    tokens: Sequence[int],
    origins: Sequence[Origin],
    tokenizer: ChatTokenizer,
    stream: TextIO | None = None,
) -> None:
    """Print a question and its answer; runs of tokens of one origin are coloured, or marked without a terminal.

    Without colours a run looks like ``⟨d:Red and⟩⟨t: blue⟩``.

    Args:
        tokens, origins: the committed answer, one origin a token.
        stream: stderr by default, so that ``--json`` stays one object.
    """
    out = stream or sys.stderr
    coloured = out.isatty()
    print(f"> {question}", file=out)
    shown = ""
    written: list[int] = []
    for origin, run in groupby(zip(tokens, origins, strict=True), key=lambda pair: pair[1]):
        written += [token for token, _ in run]
        text = tokenizer.decode(written)
        part, shown = text[len(shown) :], text
        out.write(f"\x1b[{_COLOURS[origin]}m{part}\x1b[0m" if coloured else f"⟨{_LETTERS[origin]}:{part}⟩")
    used = dict.fromkeys(origins)
    print("\n" + "; ".join(f"{_LETTERS[origin]} {_LEGEND[origin]}" for origin in used), file=out)
    print(file=out)
