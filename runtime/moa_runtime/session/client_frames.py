"""Frames of the client session: those from the server are parsed and checked, those to the server are built.

Nothing here knows the conversation's tokens; :class:`~moa_runtime.session.client.ClientSession` does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from google.protobuf.message import DecodeError

from moa_runtime.errors import printable
from moa_runtime.manifest import Fingerprints
from moa_runtime.session.client_table import Event
from moa_runtime.session.events import (
    MOST_LOGPROBS,
    Echoed,
    Faulted,
    FinishReason,
    RowsReceived,
    Sampling,
    SessionEvent,
    TokenLogprobs,
)
from moa_runtime.session.handshake import PROTOCOL_VERSION, Limits
from moa_runtime.session.memory_rows import RowsError, decode_rows
from moa_runtime.wire.moa.v1 import session_pb2 as wire

# -- frames from the server --------------------------------------------------------------------

#: Why an answer ended; with a finish that is missing here it continues.
FINISH = {
    wire.FINISH_STOP: FinishReason.STOP,
    wire.FINISH_LENGTH: FinishReason.LENGTH,
    wire.FINISH_CONTEXT: FinishReason.CONTEXT,
    wire.FINISH_GRAMMAR: FinishReason.GRAMMAR,
}

_EVENTS = {
    "welcome": Event.WELCOME,
    "verdict": Event.VERDICT,
    "standing": Event.CREDIT_REVOKED,
    "rows": Event.ROWS,
    "pong": Event.PONG,
    "fault": Event.FAULT,
}

#: Largest epoch and connection number that a Welcome may name: the client counts on from them, in 64 bits.
_MAX_COUNT = 1 << 62
#: Largest context that a Welcome may name, in tokens.
_MAX_CONTEXT = 1 << 24
#: Characters of a fault's text that are shown.
_MAX_FAULT_TEXT = 400
#: The name of a type of numbers.
_WORD = re.compile("[a-z0-9]{1,16}")


class BrokenFrameError(Exception):
    """A frame violates the protocol.

    Attributes:
        code: the code of the event that reports it.
    """

    def __init__(self, text: str, code: str = "PROTOCOL") -> None:
        super().__init__(text)
        self.code = code


def parse_server_message(data: bytes) -> wire.ServerMessage:
    """Parse one frame.

    Raises:
        BrokenFrameError: if the frame is not a ServerMessage, or its event is unknown.
    """
    try:
        message = wire.ServerMessage.FromString(data)
    except DecodeError:
        raise BrokenFrameError("the server sent a frame that is no ServerMessage") from None
    if message.WhichOneof("event") is None:
        raise BrokenFrameError("the server sent an event this version does not know")
    return message


def classify(message: wire.ServerMessage, epoch: int) -> Event:
    """Return the table's event for a frame that arrives in ``epoch``."""
    event = str(message.WhichOneof("event"))
    if event in ("verdict", "standing") and getattr(message, event).epoch != epoch:
        return Event.STALE
    if event == "fault" and message.fault.epoch not in (0, epoch):
        return Event.STALE
    if event == "fault" and message.fault.code == wire.FAULT_CODE_OUT_OF_SYNC:
        return Event.OUT_OF_SYNC
    return _EVENTS[event]


def parse_echo(message: wire.ServerMessage) -> list[SessionEvent]:
    """Return an Echoed event if the frame echoes a stamp of the client, else an empty list."""
    event = str(message.WhichOneof("event"))
    if event not in ("verdict", "standing", "pong"):
        return []
    echo = getattr(message, event).echo
    return [Echoed(echo.stamp, echo.held_us / 1e6)] if echo.stamp else []


def parse_limits(welcome: wire.Welcome) -> Limits:
    """Return the verifier's limits.

    Raises:
        BrokenFrameError: if the protocol version differs, or a number is out of range.
    """
    if max(welcome.epoch, welcome.connection) > _MAX_COUNT:
        raise BrokenFrameError(f"the server counts {welcome.epoch} epochs and {welcome.connection} connections")
    if welcome.protocol_version != PROTOCOL_VERSION:
        text = f"the verifier speaks protocol version {welcome.protocol_version}, this client {PROTOCOL_VERSION}"
        raise BrokenFrameError(text, "VERSION_MISMATCH")
    if not 0 < welcome.limits.max_context <= _MAX_CONTEXT:
        raise BrokenFrameError(f"the server reports a context of {welcome.limits.max_context} tokens")
    return Limits.from_message(welcome.limits)


def parse_dtype(welcome: wire.Welcome) -> str:
    """Return the type of the target's numbers, such as "int4"; empty if the verifier names none, or no plain word."""
    return welcome.dtype if _WORD.fullmatch(welcome.dtype) else ""


def check_verdict(verdict: wire.Verdict, vocab_size: int) -> None:
    """Check a verdict's tokens.

    Raises:
        BrokenFrameError: if there are none or fewer than were accepted, or if one is outside the vocabulary.
    """
    if not verdict.tokens or verdict.accepted > len(verdict.tokens):
        raise BrokenFrameError("the server sent a verdict without tokens")
    if max(verdict.tokens) >= vocab_size:
        raise BrokenFrameError(f"the server chose token {max(verdict.tokens)} of a vocabulary of {vocab_size}")


def parse_logprobs(verdict: wire.Verdict, vocab_size: int) -> list[TokenLogprobs | None]:
    """Return the log probabilities of a verdict: of each token, None if it is unknown; empty without any.

    Raises:
        BrokenFrameError: if they do not belong to the tokens, or are no logarithms of probabilities.
    """
    if len(verdict.logprobs) not in (0, len(verdict.tokens)):
        raise BrokenFrameError(f"the server sent {len(verdict.logprobs)} logprobs with {len(verdict.tokens)} tokens")
    found: list[TokenLogprobs | None] = []
    for each in verdict.logprobs:
        top, values = tuple(each.top_tokens), tuple(each.top_logprobs)
        if not len(top) == len(values) <= MOST_LOGPROBS or max(top, default=0) >= vocab_size:
            raise BrokenFrameError("the server sent logprobs that are not of tokens")
        if not all(value <= 0 for value in (each.logprob, *values)):
            raise BrokenFrameError("the server sent logprobs that are no logarithms of probabilities")
        found.append(TokenLogprobs(each.logprob, top, values) if each.HasField("logprob") else None)
    return found


def parse_rows(rows: wire.MemoryRows, held: int, end: int) -> RowsReceived | None:
    """Decode a frame's memory rows.

    Args:
        held: number of rows that the device holds. Rows after a gap are useless.
        end: position from which on rows are useless.

    Returns:
        the rows before ``end``; None if there are none, or if they begin after ``held``.

    Raises:
        BrokenFrameError: if the sizes in the frame disagree.
    """
    try:
        keys, values = decode_rows(rows)
    except RowsError as error:
        raise BrokenFrameError(f"the server sent broken memory rows: {error}") from None
    count = end - rows.start
    if rows.start > held or count < 1 or not len(keys):
        return None
    return RowsReceived(rows.start, keys[:count], values[:count])


def parse_fault(fault: wire.Fault) -> Faulted:
    """Return the event that reports a fault to the application."""
    known = fault.code in wire.FaultCode.values()
    code = wire.FaultCode.Name(fault.code).removeprefix("FAULT_CODE_") if known else "UNKNOWN"
    text = printable(fault.text[:_MAX_FAULT_TEXT]) + "..." * (len(fault.text) > _MAX_FAULT_TEXT)
    return Faulted(code, text or f"the verifier refused with {code}", fault.retry_after_ms)


# -- frames to the server ----------------------------------------------------------------------

_LARGEST_STAMP = 2**32 - 1
#: First step of the epoch after a restore; more than the number of epochs that a program begins between snapshots.
_EPOCH_LEAP = 1 << 20


@dataclass(frozen=True)
class InFlight:
    """The frame that awaits a verdict.

    Attributes:
        frame: the serialised Prompt or Draft.
        drafted, supplied: number of tokens in it, drafted or supplied by the client.
        asked: False if the frame was not sent, because the Welcome already announced the verdict.
    """

    frame: bytes
    drafted: int
    supplied: int
    asked: bool = True


class OutgoingFrames:
    """Builds the frames of a client session and holds them until they are taken.

    Args:
        epoch, connection: counters to continue from.
        restored: whether they are those of a snapshot. Its process may have used later epochs, so the next one skips
            ahead by 2^20, unless a Welcome names the server's epoch before.

    Attributes:
        epoch: epoch of new frames; every Prompt and Cancel begins one.
        connection: number of connections so far.
        in_flight: the frame that awaits its verdict, if any.
        credit: position up to which the server may push verdicts; 0 for none.
        awaits_revocation: the credit is revoked, and the server has not confirmed it.
        serial: serial of the newest Credit of this connection.
        repeated: whether a frame was sent twice on this connection.
        stamp: stamp of the newest frame that has one.
        round_trip_us: round trip time of the link for the next Credit, microseconds; 0 if unknown.
    """

    def __init__(self, epoch: int = 0, connection: int = 0, *, restored: bool = False) -> None:
        self.epoch, self.connection = epoch, connection
        self.in_flight: InFlight | None = None
        self.credit = self.serial = self.stamp = self.round_trip_us = 0
        self.awaits_revocation = self.repeated = False
        self._truncations: list[tuple[int, int]] = []  # of this connection: epoch, and length left at its begin
        self._epoch_step = _EPOCH_LEAP if restored else 1
        self._frames: list[bytes] = []

    def take(self) -> list[bytes]:
        """Remove and return the frames built since the last call, in order."""
        frames, self._frames = self._frames, []
        return frames

    def clear(self) -> None:
        """Drop the state of a lost connection: frames, the awaited verdict, serials."""
        self.in_flight = None
        self.awaits_revocation, self.serial, self.repeated = False, 0, False
        self._truncations.clear()
        self._frames.clear()

    def begin_epoch(self, truncated_to: int | None = None) -> None:
        """Begin an epoch: verdicts on earlier frames are void, and so is the credit.

        Args:
            truncated_to: length to which the conversation was truncated; None if it was not.
        """
        self.epoch, self._epoch_step = self.epoch + self._epoch_step, 1
        self.in_flight = None
        self.end_credit()
        if truncated_to is not None:
            self._truncations.append((self.epoch, truncated_to))

    def rows_valid_until(self, epoch: int, end: int) -> int:
        """Return the position up to which memory rows sent in ``epoch`` are valid; ``end`` if nothing was truncated."""
        return min((length for begun, length in self._truncations if begun > epoch), default=end)

    def sync_counters(self, epoch: int, connection: int) -> None:
        """Adopt the counters of a Welcome if they are larger."""
        self.epoch, self.connection, self._epoch_step = max(self.epoch, epoch), max(self.connection, connection), 1

    def resend(self) -> bool:
        """Send the frame in flight and the newest Credit again; return whether there was either."""
        before = len(self._frames)
        if self.in_flight is not None:
            self._frames.append(self.in_flight.frame)
        if self.credit or self.awaits_revocation:
            self._send_credit()
        sent = len(self._frames) > before
        self.repeated = self.repeated or sent
        return sent

    def hello(self, fingerprints: Fingerprints, row_encoding: int, resume: wire.Resume) -> None:
        """Send Hello on the next connection.

        Args:
            fingerprints: those of the bundle.
            row_encoding: ``RowEncoding`` in which memory rows are wanted.
            resume: the conversation to continue; its connection, epoch and credit are filled in here.
        """
        self.connection += 1
        resume.connection, resume.epoch, resume.credit = self.connection, self.epoch, self.credit
        hello = wire.Hello(
            protocol_version=PROTOCOL_VERSION,
            newest_version=PROTOCOL_VERSION,
            fingerprints=wire.Fingerprints(**asdict(fingerprints)),
            row_encoding=wire.RowEncoding.Name(row_encoding),
            resume=resume,
        )
        self._send(wire.ClientMessage(hello=hello))

    def prompt(self, prompt: wire.Prompt) -> None:
        """Send a Prompt, whose epoch and stamp are filled in here."""
        prompt.epoch, prompt.stamp = self.epoch, self._next_stamp()
        self._send_awaited(wire.ClientMessage(prompt=prompt), supplied=len(prompt.tokens))

    def draft(
        self,
        base_len: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        confidences: bytes = b"",
        *,
        asks: bool = True,
    ) -> None:
        """Send Draft; without ``parents`` the tokens are a chain. If it ``asks`` for nothing, it is unsolicited."""
        draft = wire.Draft(
            epoch=self.epoch,
            base_len=base_len,
            tokens=tokens,
            parents=parents,
            stamp=self._next_stamp(),
            unsolicited=not asks,
            confidences=confidences,
        )
        message = wire.ClientMessage(draft=draft)
        if asks:
            self._send_awaited(message, drafted=len(tokens))
        else:
            self._send(message)

    def expect_verdict(self, base_len: int) -> None:
        """Await a verdict that the Welcome announced; :meth:`resend` asks for it with an empty Draft."""
        draft = wire.Draft(epoch=self.epoch, base_len=base_len)
        self.in_flight = InFlight(wire.ClientMessage(draft=draft).SerializeToString(), 0, 0, asked=False)

    def grant_credit(self, position: int) -> None:
        """Send Credit up to ``position``."""
        self.credit, self.awaits_revocation = position, False
        self._send_new_credit()

    def revoke_credit(self) -> None:
        """Send Credit of position 0 and await CreditRevoked."""
        self.credit, self.awaits_revocation = 0, True
        self._send_new_credit()

    def end_credit(self) -> None:
        """Drop the credit of an answer that is over; nothing is sent."""
        self.credit, self.awaits_revocation = 0, False

    def cancel(self, base_len: int) -> None:
        """Send Cancel."""
        self._send(wire.ClientMessage(cancel=wire.Cancel(epoch=self.epoch, base_len=base_len)))

    def _send_awaited(self, message: wire.ClientMessage, *, drafted: int = 0, supplied: int = 0) -> None:
        self.in_flight = InFlight(message.SerializeToString(), drafted, supplied)
        self._frames.append(self.in_flight.frame)

    def _send_new_credit(self) -> None:
        self.serial += 1
        self._send_credit()

    def _send_credit(self) -> None:
        credit = wire.Credit(epoch=self.epoch, position=self.credit, serial=self.serial, stamp=self._next_stamp())
        credit.round_trip_us = self.round_trip_us
        self._send(wire.ClientMessage(credit=credit))

    def _next_stamp(self) -> int:
        self.stamp = self.stamp % _LARGEST_STAMP + 1
        return self.stamp

    def _send(self, message: wire.ClientMessage) -> None:
        self._frames.append(message.SerializeToString())


def sampling_message(sampling: Sampling) -> wire.Sampling:
    """Return a sampling as the wire has it."""
    values = sampling.to_json() | {"logit_bias": dict(sampling.logit_bias)}
    if sampling.grammar is not None:
        kind = f"GRAMMAR_KIND_{sampling.grammar.kind.upper()}"
        values["grammar"] = wire.Grammar(kind=kind, text=sampling.grammar.text)
    return wire.Sampling(**values)
