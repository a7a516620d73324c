"""Where the characters of rendered Markdown stand in its source."""

from __future__ import annotations

_NEAR = 6  # such as the asterisks of bold text in a list
_FAR = 2048  # such as a link's address
_SURE = 3  # characters that must agree before so much is taken for markup


def align(rendered: str, source: str) -> list[int]:
    """For each character of ``rendered`` its offset in ``source``.

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
