"""What the HTTP and the WebSocket protocol of a connection both tell its place."""

from __future__ import annotations

import asyncio

from moa_server.edge.connection_limits import Place


class OnPlace(asyncio.Protocol):
    """Comes before uvicorn's protocol among the bases."""

    _place: Place

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._place.leave()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._place.write_paused(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._place.write_paused(False)
