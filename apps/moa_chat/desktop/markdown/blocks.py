"""Markdown cut into top-level blocks, of which a growing text changes only the last ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.token import Token

from moa_runtime.tokens import common_length

_LINE_BREAK = re.compile("\\r\\n?|\\n")
# No raw HTML and no images, since an answer must not load anything. No reference definitions either: with them a
# later line would change blocks that are done.
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable(["reference", "image"])


@dataclass(frozen=True)
class Block:
    """One top-level block of a Markdown text.

    Attributes:
        start, end: offsets of its lines in the source, the line break after them included.
        html: the block as HTML, without anything that is loaded from elsewhere; empty for code.
        code: a code block's text; None for any other block.
        language: of a code block, as its author wrote it; perhaps empty.
    """

    start: int
    end: int
    html: str = ""
    code: str | None = None
    language: str = ""


def parse(source: str, offset: int = 0) -> list[Block]:
    """The blocks of ``source``; ``offset`` is added to their positions."""
    starts = _line_starts(source)
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
        """Take the text as it is now.

        Returns:
            the index of the first block that may differ from before.
        """
        same = len(self.source) if source.startswith(self.source) else common_length(self.source, source)
        # The block in which the change lies, and the one before it, with which that one may now be joined.
        changed = sum(block.start <= same for block in self.blocks)
        first = max(0, changed - 2)
        start = self.blocks[first].start if first else 0
        self.blocks[first:] = parse(source[start:], start)
        self.source = source
        return first


def _line_starts(source: str) -> list[int]:
    """Offset of each line, as markdown-it counts them, and of the text's end."""
    return [0, *(found.end() for found in _LINE_BREAK.finditer(source)), len(source)]


def _top_level(tokens: Sequence[Token]) -> list[list[Token]]:
    """Cut the flat list of tokens where a block of the document begins."""
    groups: list[list[Token]] = []
    for token in tokens:
        if token.level == 0 and token.nesting >= 0:
            groups.append([])
        groups[-1].append(token)
    return groups
