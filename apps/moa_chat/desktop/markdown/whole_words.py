"""Origins by words: tokens are pieces of words, and a word in two colours says nothing to its reader.

A word is shown with the weakest claim that is made for a part of it. What is not confirmed is weaker than what is; then
comes what was kept without asking the target, what was written offline, what the server wrote, what was drafted. Text
that was taken back in the middle of a word becomes the word that it would have made, before the one that is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from moa_chat.history.message import Dropped
from moa_runtime.events import Origin, TextSpan

_WEAKEST_LAST = (Origin.DRAFTED, Origin.CORRECTED, Origin.OFFLINE, Origin.KEPT)
#: Letters and digits, but not of scripts that write no spaces: a sentence of these would be one word.
_LETTER = re.compile("[^\\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff]")
_APOSTROPHES = ("'", "\N{RIGHT SINGLE QUOTATION MARK}")


def whole_words(spans: Sequence[TextSpan]) -> list[TextSpan]:
    """The same text, cut so that each word has one origin."""
    text = "".join(span.text for span in spans)
    words = iter(_divided_words(text, spans))
    word = next(words, None)
    made: list[TextSpan] = []
    at = end = 0
    for span in spans:
        end += len(span.text)
        while at < end:
            if word is not None and at == word[0]:
                made.append(TextSpan(text[at : word[1]], word[2].origin, word[2].committed))
                at, word = word[1], next(words, None)
            else:
                until = end if word is None else min(end, word[0])
                made.append(TextSpan(text[at:until], span.origin, span.committed))
                at = until
    return made


def _divided_words(text: str, spans: Sequence[TextSpan]) -> Iterator[tuple[int, int, TextSpan]]:
    """Start and end of each word that lies in several spans, and the weakest of these, in order."""
    found: tuple[int, int, TextSpan] | None = None
    at = 0
    for left, right in pairwise(spans):
        at += len(left.text)
        if found is not None and at < found[1]:
            found = (found[0], found[1], max(found[2], right, key=_weakness))
        elif word := _word_around(text, at):
            if found is not None:
                yield found
            found = (*word, max(left, right, key=_weakness))
    if found is not None:
        yield found


def whole_dropped(dropped: Sequence[Dropped], content: str) -> list[Dropped]:
    """What was taken back of ``content``, each from the beginning of its first word on, behind a space that stayed."""
    return [_from_word(one, content) for one in dropped]


def _from_word(one: Dropped, content: str) -> Dropped:
    if one.text[:1].isspace() and content[one.offset : one.offset + 1].isspace():
        return Dropped(one.offset + 1, one.text[1:])
    letters = one.text[1:] if one.text[:1] in _APOSTROPHES else one.text
    start = offset = min(one.offset, len(content))  # the text may have become shorter since
    if not _LETTER.match(letters) and _word_around(content, offset) is None:
        return one
    while start > 0 and _in_word(content, start - 1):
        start -= 1
    return Dropped(start, content[start:offset] + one.text)


def _word_around(text: str, at: int) -> tuple[int, int] | None:
    """The word that goes on over this offset."""
    if not 0 < at < len(text) or not (_in_word(text, at - 1) and _in_word(text, at)):
        return None
    start, end = at - 1, at + 1
    while start > 0 and _in_word(text, start - 1):
        start -= 1
    while end < len(text) and _in_word(text, end):
        end += 1
    return start, end


def _in_word(text: str, at: int) -> bool:
    if text[at] in _APOSTROPHES:
        return 0 < at < len(text) - 1 and all(_LETTER.match(text[beside]) for beside in (at - 1, at + 1))
    return _LETTER.match(text[at]) is not None


def _weakness(span: TextSpan) -> tuple[bool, int]:
    return not span.committed, _WEAKEST_LAST.index(span.origin)
