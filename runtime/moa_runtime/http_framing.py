"""HTTP/1.1 requests that end at the same byte for every reader."""

from __future__ import annotations

import re

import h11

_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_FOLD = re.compile(rb"\r\n[ \t]")
_TRANSFER_ENCODING = re.compile(rb"\r\nTransfer-Encoding:", re.IGNORECASE)
_CONTENT_LENGTH = re.compile(rb"\r\nContent-Length:", re.IGNORECASE)
_BLANK_LINE = b"\r\n\r\n"

_BAD_LINE = "a line ends in a carriage return and a line feed"


class FramingError(h11.RemoteProtocolError):
    """A request that another reader may end elsewhere; the message is for its sender."""


class StrictConnection(h11.Connection):
    """h11's connection of a server, which refuses requests whose end is ambiguous.

    If a proxy in front takes another byte for the end of a request, a client can smuggle a second request past it. h11
    accepts lines that end in a line feed alone, joins folded fields, and prefers ``Transfer-Encoding`` to a
    ``Content-Length`` beside it (RFC 9112, sections 2.2, 5.2 and 6.1). :meth:`next_event` raises a
    :class:`FramingError` instead.
    """

    _newest = b""  # what was received last, after the four bytes that precede it
    _chunked = False

    def receive_data(self, data: bytes) -> None:
        self._newest = self._newest[-len(_BLANK_LINE) :] + data
        super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            _check_head(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
        elif isinstance(event, h11.EndOfMessage) and self._chunked:
            unread = len(self.trailing_data[0])
            if not self._newest[: len(self._newest) - unread].endswith(_BLANK_LINE):
                raise FramingError(_BAD_LINE)
        return event


def _check_head(received: bytes) -> None:
    """Check the next request's head, as far as it was received."""
    head, blank_line, _ = received.partition(_BLANK_LINE)
    if _BARE_LINE_FEED.search(head):
        raise FramingError(_BAD_LINE)
    if _FOLD.search(head):
        raise FramingError("a header field stands in one line")
    if blank_line and _TRANSFER_ENCODING.search(head):
        if _CONTENT_LENGTH.search(head):
            raise FramingError("a request has either Transfer-Encoding or Content-Length")
        if not head.partition(b"\r\n")[0].endswith(b"HTTP/1.1"):
            raise FramingError("Transfer-Encoding needs HTTP/1.1")
