"""What the operator of a verifier may choose."""

from __future__ import annotations

from dataclasses import dataclass

from moa_runtime.session.handshake import Limits


@dataclass(frozen=True)
class Settings:
    """Settings of the ASGI app.

    Attributes:
        token: bearer token every request but ``/healthz`` must carry; empty for none.
        origins: of web pages that may send requests, such as ``http://localhost:3000``; ``*`` for all.
        max_sessions: conversations held at once, and plain decodings run at once.
        keep_seconds: how long a conversation outlives its connection.
        cache_seconds: how long its key-value cache does; the tokens stay and are prefilled again.
        max_cached_tokens: tokens in all key-value caches together; beyond, the least recently used are freed.
        idle_seconds: silence after which a connection is closed.
        hello_seconds: how long a new connection may take for its Hello.
        max_draft_tokens: tokens of one draft.
        max_frame_bytes: size of one WebSocket message, and of one HTTP body.
        retry_after_ms: what a client that finds the verifier full is told to wait.
    """

    token: str = ""
    origins: tuple[str, ...] = ()
    max_sessions: int = 64
    keep_seconds: float = 3600
    cache_seconds: float = 300
    max_cached_tokens: int = 32768
    idle_seconds: float = 900
    hello_seconds: float = 10
    max_draft_tokens: int = 1024
    max_frame_bytes: int = 1 << 20
    retry_after_ms: int = 5000

    def limits(self, max_context: int) -> Limits:
        """What a Welcome tells."""
        return Limits(max_context, self.max_draft_tokens, self.max_frame_bytes, max(1, int(self.idle_seconds)))
