"""Markdown of an answer: its blocks, and the origin of each character of the rendered text.

Origins are shown by words: tokens are pieces of words, and a word in two colours tells its reader nothing. A word gets
the weakest origin of its parts: unconfirmed text is weaker than confirmed text; then follow text that was kept without
asking the target, text written offline, text of the server, drafted text. Text that was taken back in the middle of a
word is shown as the whole word that it would have made, before the word that is there.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token

from moa_chat.history.message import Dropped
from moa_runtime.events import Origin, TextSpan
from moa_runtime.tokens import common_length

_LINE_BREAK = re.compile("\\r\\n?|\\n")
# No raw HTML and no images, since an answer must not load anything. No reference definitions either: with them a
# later line would change blocks that are done.
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable(["reference", "image"])
_NEAR = 6  # such as the asterisks of bold text in a list
_FAR = 2048  # such as a link's address
_SURE = 3  # characters that must agree before a longer stretch is taken for markup
_WEAKEST_LAST = (Origin.DRAFTED, Origin.CORRECTED, Origin.OFFLINE, Origin.KEPT)
#: Letters and digits, but not of scripts that write no spaces: a sentence of these would be one word.
_LETTER = re.compile("[^\\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff]")
_APOSTROPHES = ("'", "\N{RIGHT SINGLE QUOTATION MARK}")


@dataclass(frozen=True)
class Block:
    """One top-level block of a Markdown text."""

    start: int  # offset of its first line in the source
    end: int  # offset after the line break of its last line
    html: str = ""  # the block as HTML, without anything that is loaded from elsewhere; empty for code
    code: str | None = None  # a code block's text; None for any other block
    language: str = ""  # of a code block, as its author wrote it; perhaps empty


def parse(source: str, offset: int = 0) -> list[Block]:
    """Parse ``source`` into blocks; ``offset`` is added to their positions."""
    starts = [0, *(found.end() for found in _LINE_BREAK.finditer(source)), len(source)]  # as markdown-it counts
    blocks = []
    for tokens in _top_level(_MARKDOWN.parse(source)):
        first, last = tokens[0].map or (0, 0)
        start, end = offset + starts[first], offset + starts[min(last, len(starts) - 1)]
        if tokens[0].type in ("fence", "code_block"):
            info = tokens[0].info.split()
            blocks.append(Block(start, end, code=tokens[0].content, language=info[0] if info else ""))
        else:
            blocks.append(Block(start, end, _MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {}).strip()))
    return blocks


class GrowingMarkdown:
    """The blocks of a text that mostly grows at its end; what has not changed is not parsed again."""

    def __init__(self) -> None:
        self.source = ""
        self.blocks: list[Block] = []

    def update(self, source: str) -> int:
        """Take the text as it is now. Returns the index of the first block that may differ from before."""
        same = len(self.source) if source.startswith(self.source) else common_length(self.source, source)
        # The block in which the change lies, and the one before it, with which that one may now be joined.
        changed = sum(block.start <= same for block in self.blocks)
        first = max(0, changed - 2)
        start = self.blocks[first].start if first else 0
        self.blocks[first:] = parse(source[start:], start)
        self.source = source
        return first


def _top_level(tokens: Sequence[Token]) -> list[list[Token]]:
    """Cut the flat list of tokens at the beginning of each top-level block."""
    groups: list[list[Token]] = []
    for token in tokens:
        if token.level == 0 and token.nesting >= 0:
            groups.append([])
        groups[-1].append(token)
    return groups


def align(rendered: str, source: str) -> list[int]:
    """Return for each character of ``rendered`` its offset in ``source``.

    Rendering only takes markup away, so the rendered text is, but for entities such as ``&amp;``, a subsequence
    of the source. It is found greedily; a character that is not there gets the offset of what follows it. The
    offsets never decrease.

    >>> align("a b", "**a** b")
    [2, 5, 6]
    """
    offsets = []
    at = 0
    for index, char in enumerate(rendered):
        found = at
        if not source.startswith(char, at):
            found = source.find(char, at, at + _NEAR)
            if found < 0 and char != "\n":
                found = source.find(rendered[index : index + _SURE], at, at + _FAR)
        if found < 0:
            offsets.append(min(at, max(len(source) - 1, 0)))
        else:
            offsets.append(found)
            at = found + 1
    return offsets


@dataclass(frozen=True)
class Run:
    """Characters ``[start, end)`` of a rendered block that share an origin."""

    start: int
    end: int
    origin: Origin
    committed: bool


class SpanIndex:
    """Finds the span of a text that holds an offset."""

    def __init__(self, spans: Sequence[TextSpan]) -> None:
        self._spans = [span for span in spans if span.text]
        self._ends = list(accumulate(len(span.text) for span in self._spans))

    def runs(self, offsets: Sequence[int]) -> list[Run]:
        """Cut a rendered text, whose characters have these offsets in the spans' text, at changes of origin."""
        spans = [bisect_right(self._ends, offset) for offset in offsets]
        runs = []
        for number, group in groupby(range(len(spans)), key=spans.__getitem__):
            places = list(group)
            if number < len(self._spans):  # text after the last span has no origin
                span = self._spans[number]
                runs.append(Run(places[0], places[-1] + 1, span.origin, span.committed))
        return runs


def whole_words(spans: Sequence[TextSpan]) -> list[TextSpan]:
    """Return the same text, cut so that each word has one origin."""
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
    """Yield start and end of each word that lies in several spans, with the weakest of these, in order."""
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
    """Extend each dropped text to the beginning of its first word; a space that stayed is left out."""
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
    """Return start and end of the word that this offset divides; None if it divides none."""
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
