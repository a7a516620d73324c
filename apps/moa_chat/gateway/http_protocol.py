"""uvicorn's HTTP protocol for the endpoint."""

from __future__ import annotations

import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moa_runtime.http_framing import FramingError, StrictConnection


class StrictHttp(H11Protocol):
    """HTTP/1.1 on one connection, which a request of ambiguous length ends."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = StrictConnection(h11.SERVER)

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 could not parse, and close."""
        if self.cycle is not None and not self.cycle.response_complete:  # the app must not answer after this
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun, and the base would raise
            self.transport.close()
            return
        error = sys.exc_info()[1]
        super().send_400_response(str(error) if isinstance(error, FramingError) else msg)
