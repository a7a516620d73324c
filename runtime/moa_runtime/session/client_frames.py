"""Frames from the server to the device: what they say, and what is wrong with them."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from moa_runtime.session.client_table import Event
from moa_runtime.session.events import Echoed, Faulted, FinishReason, RowsReceived, SessionEvent
from moa_runtime.session.handshake import PROTOCOL_VERSION, Limits
from moa_runtime.session.memory_rows import RowsError, decode_rows
from moa_runtime.wire.moa.v1 import session_pb2 as wire

#: Why an answer ended; what is missing here goes on.
FINISH = {
    wire.FINISH_STOP: FinishReason.STOP,
    wire.FINISH_LENGTH: FinishReason.LENGTH,
    wire.FINISH_CONTEXT: FinishReason.CONTEXT,
}

_EVENTS = {
    "welcome": Event.WELCOME,
    "verdict": Event.VERDICT,
    "standing": Event.CREDIT_REVOKED,
    "rows": Event.ROWS,
    "pong": Event.PONG,
    "fault": Event.FAULT,
}

#: A verifier that counts further lies: the counts of a conversation go on from its own, in 64 bits.
_MOST_COUNTED = 1 << 62
#: Nor has any target a longer context.
_LONGEST_CONTEXT = 1 << 24
#: Characters of a fault's text that are shown.
_MOST_SAID = 400


class BrokenFrameError(Exception):
    """A frame that no verifier of this protocol sends."""

    def __init__(self, text: str, code: str = "PROTOCOL") -> None:
        super().__init__(text)
        self.code = code

    @property
    def event(self) -> Faulted:
        return Faulted(self.code, str(self), 0)


def parse_server_message(data: bytes) -> wire.ServerMessage:
    """One frame.

    Raises:
        BrokenFrameError: it is no message, or holds no event that is known.
    """
    try:
        message = wire.ServerMessage.FromString(data)
    except DecodeError:
        raise BrokenFrameError("the server sent a frame that is no ServerMessage") from None
    if message.WhichOneof("event") is None:
        raise BrokenFrameError("the server sent an event this version does not know")
    return message


def classify(message: wire.ServerMessage, epoch: int) -> Event:
    """What a frame says to a client that is in this epoch."""
    event = str(message.WhichOneof("event"))
    if event in ("verdict", "standing") and getattr(message, event).epoch != epoch:
        return Event.STALE
    if event == "fault" and message.fault.epoch not in (0, epoch):
        return Event.STALE
    if event == "fault" and message.fault.code == wire.FAULT_CODE_OUT_OF_SYNC:
        return Event.OUT_OF_SYNC
    return _EVENTS[event]


def echo_of(message: wire.ServerMessage) -> list[SessionEvent]:
    """That of a stamp of the client's, if the frame has one."""
    event = str(message.WhichOneof("event"))
    if event not in ("verdict", "standing", "pong"):
        return []
    echo = getattr(message, event).echo
    return [Echoed(echo.stamp, echo.held_us / 1e6)] if echo.stamp else []


def limits_of(welcome: wire.Welcome) -> Limits:
    """What the verifier allows.

    Raises:
        BrokenFrameError: it speaks another version, or names numbers that cannot be.
    """
    if max(welcome.epoch, welcome.connection) > _MOST_COUNTED:
        raise BrokenFrameError(f"the server counts {welcome.epoch} epochs and {welcome.connection} connections")
    if welcome.protocol_version != PROTOCOL_VERSION:
        text = f"the verifier speaks protocol version {welcome.protocol_version}, this client {PROTOCOL_VERSION}"
        raise BrokenFrameError(text, "VERSION_MISMATCH")
    limits = welcome.limits
    if not 0 < limits.max_context <= _LONGEST_CONTEXT:
        raise BrokenFrameError(f"the server says that its target has a context of {limits.max_context} tokens")
    return Limits(
        limits.max_context,
        limits.max_draft_tokens,
        limits.max_frame_bytes,
        limits.idle_seconds,
        trees=not limits.chains_only,
        away_seconds=limits.away_seconds,
        keep_seconds=limits.keep_seconds,
    )


def check_verdict(verdict: wire.Verdict, vocab_size: int) -> None:
    """Raises BrokenFrameError: it has no tokens, fewer than were accepted, or one that there is not."""
    if not verdict.tokens or verdict.accepted > len(verdict.tokens):
        raise BrokenFrameError("the server sent a verdict without tokens")
    if max(verdict.tokens) >= vocab_size:
        raise BrokenFrameError(f"the server chose token {max(verdict.tokens)} of a vocabulary of {vocab_size}")


def rows_of(rows: wire.MemoryRows, held: int, end: int) -> RowsReceived | None:
    """The memory rows of a frame, if it has some that are of use.

    Args:
        held: rows that the device holds, of the first so many positions. Behind a gap rows are of no use.
        end: neither are those from this position on.

    Raises:
        BrokenFrameError: sizes that do not fit together.
    """
    try:
        keys, values = decode_rows(rows)
    except RowsError as error:
        raise BrokenFrameError(f"the server sent broken memory rows: {error}") from None
    count = end - rows.start
    if rows.start > held or count < 1 or not len(keys):
        return None
    return RowsReceived(rows.start, keys[:count], values[:count])


def fault_of(fault: wire.Fault) -> Faulted:
    """A fault as the application hears of it."""
    known = fault.code in wire.FaultCode.values()
    code = wire.FaultCode.Name(fault.code).removeprefix("FAULT_CODE_") if known else "UNKNOWN"
    return Faulted(code, _said(fault.text) or f"the verifier refused, and said only {code}", fault.retry_after_ms)


def _said(text: str) -> str:
    """A text from outside as it may be shown: nothing in it talks to a terminal."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[:_MOST_SAID])
    return f"{shown}..." if len(text) > _MOST_SAID else shown
