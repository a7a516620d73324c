"""Settings of a verifier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moa_runtime.session.handshake import Limits
from moa_server.engine.base import Capabilities


@dataclass(frozen=True)
class Settings:
    """Settings of the ASGI app. Times are in seconds, sizes in bytes.

    Attributes:
        token: bearer token that requests must carry; empty for none.
        token_file: more bearer tokens, with names and budgets, see :mod:`moa_server.auth`; None for none.
        loopback: whether only this machine is listened to: requests for other hosts are then refused.
        hosts: further names that requests may be for where only this machine is listened to.
        origins: of web pages that may send requests, such as ``http://localhost:3000``; ``*`` for all.
        max_sessions: conversations held at once, and plain decodings run at once.
        keep_seconds: how long a conversation outlives its connection.
        ask_from: answers that are written at once before clients are asked to draft themselves.
        away_seconds: how long an answer is written on while its client is away; 0 for not at all.
        away_tokens: and how many tokens of it.
        idle_seconds: silence after which a connection is closed.
        hello_seconds: how long a new connection may take for its Hello.
        answer_seconds: how long a frame may wait for its verdict before it is refused.
        step_tokens: most tokens of a step while others are served; None for as many as the cost of steps allows.
        max_draft_tokens: tokens of one draft.
        max_waiting_frames: frames of one connection that wait for the verdict of the one before.
        max_frame_bytes: size of one WebSocket message, and of one HTTP body.
        retry_after_ms: delay before a retry, for clients that are refused because the verifier is full.
    """

    token: str = ""
    token_file: Path | None = None
    loopback: bool = True
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_sessions: int = 64
    keep_seconds: float = 3600.0
    ask_from: int = 4
    away_seconds: float = 600.0
    away_tokens: int = 4096
    idle_seconds: float = 900.0
    hello_seconds: float = 10.0
    answer_seconds: float = 120.0
    step_tokens: int | None = None
    max_draft_tokens: int = 1024
    max_waiting_frames: int = 16
    max_frame_bytes: int = 1 << 20
    retry_after_ms: int = 5000

    def limits(self, max_context: int, engine: Capabilities) -> Limits:
        """Return the limits for a Welcome."""
        return Limits(
            max_context,
            min(self.max_draft_tokens, engine.max_draft_tokens),
            self.max_frame_bytes,
            max(1, int(self.idle_seconds)),
            engine.trees,
            int(self.away_seconds),
            int(self.keep_seconds),
        )
