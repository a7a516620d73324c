"""The files that browsers load, and Starlette's responses with them."""

from __future__ import annotations

import gzip
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.staticfiles import NotModifiedResponse, StaticFiles

from moa_runtime.errors import MoaError

PIECE_BYTES = FileResponse.chunk_size

_WORTH_BYTES, _WORTH_PART = 1024, 0.9  # below that size, and above that part of it, gzip saves nothing
_STATIC = StaticFiles()  # for its conditions: a table says which files there are


class ChangedError(MoaError):
    """A file is no longer what it was when the verifier started."""


@dataclass(frozen=True)
class WebFile:
    """A file that is served.

    Attributes:
        content: where it is on the disk, or its bytes.
        digest: names its bytes, in letters, digits and dashes; its ETag is made of it.
        headers: of every response, such as ``cache-control``; names in lower case.
        zipped: the same in gzip; None if that does not pay.

    Raises:
        OSError: it cannot be read.
    """

    content: Path | bytes
    media_type: str
    digest: str
    headers: Mapping[str, str] = field(default_factory=dict)
    zipped: bytes | None = None
    _stat: os.stat_result | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if isinstance(self.content, Path):
            object.__setattr__(self, "_stat", self.content.stat())

    def response(self, request: Headers) -> Response:
        """Make the response to a GET with these headers. Ranges are of the file on the disk, never of its gzip.

        Raises:
            ChangedError: see :meth:`check`.
        """
        headers, sent = {**self.headers, "etag": f'"{self.digest}"'}, self.content
        if self.zipped is not None:
            headers["vary"] = "accept-encoding"
            if "range" not in request and "gzip" in request.get("accept-encoding", ""):
                headers |= {"etag": f'"{self.digest}-gzip"', "content-encoding": "gzip"}
                sent = self.zipped
        response: Response
        if isinstance(sent, bytes):
            headers["content-length"] = str(len(sent))
            response = StreamingResponse(_pieces(sent), headers=headers, media_type=self.media_type)
        else:
            self.check()
            response = FileResponse(sent, headers=headers, media_type=self.media_type, stat_result=self._stat)
        return NotModifiedResponse(response.headers) if _STATIC.is_not_modified(response.headers, request) else response

    def check(self) -> None:
        """Raise a ChangedError if the file on the disk is no longer that of the start."""
        if self._stat is None or not isinstance(self.content, Path):
            return
        try:
            found = self.content.stat()
        except OSError as error:
            raise ChangedError(f"{self.content} cannot be read: {error.strerror}; start moa-serve again") from error
        if any(getattr(found, each) != getattr(self._stat, each) for each in ("st_size", "st_mtime_ns", "st_ino")):
            raise ChangedError(f"{self.content} has changed since moa-serve started: start it again")


def zipped(data: bytes) -> bytes | None:
    """The same in gzip, the same bytes each time; None where that saves less than a tenth."""
    if len(data) < _WORTH_BYTES:
        return None
    small = gzip.compress(data, 6, mtime=0)
    return small if len(small) < _WORTH_PART * len(data) else None


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]
