"""Why a session ends: what its client is told, and the WebSocket's close code."""

from __future__ import annotations

from moa_runtime.session.handshake import fault
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.edge.frame_reader import End
from moa_server.settings import Settings

# WebSocket close codes (RFC 6455 and the IANA registry).
NORMAL, GOING_AWAY, REFUSED, FAILED, TRY_AGAIN_LATER = 1000, 1001, 1008, 1011, 1013


def busy(text: str, settings: Settings) -> wire.ServerMessage:
    """The fault of a verifier that has no time or place for more."""
    return fault(wire.FAULT_CODE_BUSY, text, retry_after_ms=settings.retry_after_ms)


def refusal_of(end: End, seconds: float, settings: Settings) -> tuple[wire.ServerMessage, int] | None:
    """The last message of a connection that takes no more frames, and its close code; None where nobody is told.

    Args:
        seconds: of silence, where that is the reason.
    """
    if end is End.REPLACED:
        return fault(wire.FAULT_CODE_REPLACED, end.value), REFUSED
    if end is End.FLOODED:
        most, size = settings.max_waiting_frames, 2 * settings.max_frame_bytes
        text = f"more than {most} frames or {size} bytes wait: a client awaits its verdicts"
        return fault(wire.FAULT_CODE_PROTOCOL, text), REFUSED
    if end is End.WITHDRAWN:
        return fault(wire.FAULT_CODE_PROTOCOL, end.value), REFUSED
    if end is End.FULL:
        return busy(end.value, settings), TRY_AGAIN_LATER
    if end is End.SILENT:
        return fault(wire.FAULT_CODE_IDLE, f"nothing was received for {seconds:g} seconds"), GOING_AWAY
    return None
