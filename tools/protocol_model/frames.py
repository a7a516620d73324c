"""What travels, and what the target says. Tokens are small whole numbers, a digest is the tokens themselves."""

from __future__ import annotations

import zlib
from typing import NamedTuple

Tokens = tuple[int, ...]


class Hello(NamedTuple):
    token: int  # of a Welcome; 0 for none
    connection: int
    epoch: int
    marks: tuple[Tokens, ...]  # committed; committed and supplied
    answering: bool
    credit: int
    rows: int


class Prompt(NamedTuple):
    epoch: int
    base: int
    tokens: Tokens
    limit: int
    rows_from: int
    while_away: bool


class Draft(NamedTuple):
    epoch: int
    base: int
    tokens: Tokens


class Unsolicited(NamedTuple):
    """A Draft that asks for nothing."""

    epoch: int
    base: int
    tokens: Tokens


class Credit(NamedTuple):
    epoch: int
    position: int
    serial: int  # of this connection


class Cancel(NamedTuple):
    epoch: int
    base: int


class Welcome(NamedTuple):
    token: int
    connection: int
    epoch: int
    agreed: int
    news: bool  # a verdict follows, on what was written meanwhile


class Verdict(NamedTuple):
    epoch: int
    base: int
    tokens: Tokens
    finished: bool


class CreditRevoked(NamedTuple):
    epoch: int
    serial: int  # of the Credit that it answers


class Rows(NamedTuple):
    epoch: int
    start: int
    rows: Tokens


class Fault(NamedTuple):
    code: str


Up = Hello | Prompt | Draft | Unsolicited | Credit | Cancel
Down = Welcome | Verdict | CreditRevoked | Rows | Fault


def choice(prefix: Tokens) -> int:
    """The target's token behind ``prefix``: 0 or 1."""
    return zlib.crc32(bytes(prefix)) >> 7 & 1


def plain(prompt: Tokens, limit: int) -> Tokens:
    """Plain decoding until there are ``limit`` tokens."""
    while len(prompt) < limit:
        prompt += (choice(prompt),)
    return prompt


def row(tokens: Tokens, position: int) -> int:
    """A memory row: it depends on everything up to its token."""
    return zlib.crc32(bytes(tokens[: position + 1]))
