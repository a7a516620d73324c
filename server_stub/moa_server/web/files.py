"""Files as HTTP serves them (RFC 9110): conditions, one range, gzip. Nothing here sends."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from moa_runtime.errors import MoaError

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.IGNORECASE)
_ETAG = re.compile(r'(?:W/)?("[\x21\x23-\x7e\x80-\xff]*")')
_CODING = re.compile(r"(gzip|x-gzip|\*)\s*(?:;\s*q\s*=\s*([0-9.]{1,5}))?", re.IGNORECASE)

_WORTH_BYTES, _WORTH_PART = 1024, 0.9  # below that size, and above that part of it, gzip saves nothing


class ChangedError(MoaError):
    """A file is no longer what it was when the verifier started."""


class Content(Protocol):
    """Bytes of a known number."""

    size: int

    def read(self, start: int, count: int) -> bytes:
        """So many bytes from ``start`` on, at most those there are. Blocks.

        Raises:
            ChangedError: they are no longer there.
        """


class InMemory:
    """See :class:`Content`."""

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, start: int, count: int) -> bytes:
        return self._data[start : start + count]


class OnDisk:
    """See :class:`Content`. For what is too large to be held. It is opened for each piece, so none holds a descriptor.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._was = _state(file)
        self.size = self._was[0]

    def read(self, start: int, count: int) -> bytes:
        try:
            with self._path.open("rb", buffering=0) as file:
                # Another file in its place would go on where this one was left.
                if _state(file) == self._was and file.seek(start) == start:
                    return file.read(count)
        except OSError as error:
            raise ChangedError(f"{self._path} cannot be read: {error.strerror}; start moa-serve again") from error
        raise ChangedError(f"{self._path} has changed since moa-serve started: start it again")


def _state(file: IO[bytes]) -> tuple[int, int, int]:
    """What changes with the bytes: size, time of the last change, and which file it is."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ino


@dataclass(frozen=True)
class Reply:
    """What to answer.

    Attributes:
        content: what the body is a part of; None for none.
        start, stop: the part, in bytes.
    """

    status: int
    headers: Mapping[str, str]
    content: Content | None = None
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class WebFile:
    """A file that is served.

    Attributes:
        digest: names its bytes, in letters, digits and dashes; its ETag is made of it.
        headers: of every answer, such as ``cache-control``; names in lower case.
        zipped: the same in gzip; None where that does not pay.
    """

    content: Content
    media_type: str
    digest: str
    headers: Mapping[str, str] = field(default_factory=dict)
    zipped: Content | None = None

    def reply(self, asked: Mapping[str, str]) -> Reply:
        """The answer to a GET. That to a HEAD is the same for a request without a range, and has no body.

        Args:
            asked: the request's headers; names in lower case.
        """
        wanted = asked.get("range", "")
        zipped = self.zipped if not wanted and _takes_gzip(asked.get("accept-encoding", "")) else None
        own, other = f'"{self.digest}"', f'"{self.digest}-gzip"'
        # Of one that there is no gzip of, nobody can have the second one.
        tags = {own, other}
        headers = {**self.headers, "etag": own if zipped is None else other}
        if self.zipped is not None:
            headers["vary"] = "accept-encoding"
        if "if-match" in asked and not _lists(asked["if-match"], tags, strong=True):
            return Reply(412, headers)
        if _lists(asked.get("if-none-match", ""), tags):
            return Reply(304, headers)
        content = zipped or self.content
        part = None
        if "if-range" not in asked or asked["if-range"] == own:
            part = _part(wanted, content.size)
        if part == (0, 0):
            return Reply(416, {**headers, "content-range": f"bytes */{content.size}"})
        headers |= {"content-type": self.media_type, "accept-ranges": "bytes"}
        if zipped is not None:
            headers["content-encoding"] = "gzip"
        start, stop = part or (0, content.size)
        if part is not None:
            headers["content-range"] = f"bytes {start}-{stop - 1}/{content.size}"
        headers["content-length"] = str(stop - start)
        return Reply(200 if part is None else 206, headers, content, start, stop)


def zipped(data: bytes) -> InMemory | None:
    """The same in gzip, the same bytes each time; None where that saves less than a tenth."""
    if len(data) < _WORTH_BYTES:
        return None
    small = gzip.compress(data, 6, mtime=0)
    return InMemory(small) if len(small) < _WORTH_PART * len(data) else None


def _part(wanted: str, size: int) -> tuple[int, int] | None:
    """The part that a ``Range`` header asks for: where it begins, and where it ends, exclusive.

    Returns:
        ``(0, 0)`` where none of it exists. None for everything: no such header, or one that is ignored, as a server
        may: several parts, a unit other than bytes, what cannot be read.
    """
    matched = _RANGE.fullmatch(wanted.strip())
    if matched is None or matched[1] == matched[2] == "":
        return None
    if not matched[1]:
        last = int(matched[2])
        return (max(0, size - last), size) if last and size else (0, 0)
    start, stop = int(matched[1]), int(matched[2] or size) + 1
    if matched[2] and stop <= start:
        return None
    return (start, min(stop, size)) if start < size else (0, 0)


def _lists(header: str, tags: set[str], *, strong: bool = False) -> bool:
    """Whether a list of ETags names one of ``tags``, or is ``*``."""
    if header.strip() == "*":
        return True
    return any(found[1] in tags and not (strong and found[0].startswith("W/")) for found in _ETAG.finditer(header))


def _takes_gzip(header: str) -> bool:
    named = {}
    for coding in header.split(","):
        if matched := _CODING.fullmatch(coding.strip()):
            named[matched[1].lower().removeprefix("x-")] = matched[2] or "1"
    weight = named.get("gzip", named.get("*", "0"))
    return weight.strip("0.") != ""
