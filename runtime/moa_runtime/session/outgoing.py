"""Frames from the device to the server: their epochs, the one that awaits a verdict, and the credit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moa_runtime.session.handshake import PROTOCOL_VERSION, Fingerprints
from moa_runtime.session.sampling import Sampling, message_of
from moa_runtime.wire.moa.v1 import session_pb2 as wire

_LARGEST_STAMP = 2**32 - 1
#: More epochs than a program begins between two snapshots.
_LEAP = 1 << 20


@dataclass(frozen=True)
class InFlight:
    """The one frame awaiting a verdict.

    Attributes:
        asked: whether it was sent on this connection; else a verdict comes without.
    """

    frame: bytes
    drafted: int
    supplied: int
    asked: bool = True


class Outgoing:
    """Makes frames and holds them until they are taken.

    Attributes:
        epoch: of the frames made from now on; each prompt and cancellation begins one.
        connection: how many connections there were.
        in_flight: what awaits its verdict; None for nothing.
        credit: the position up to which the server goes on by itself.
        awaits_revocation: the credit was withdrawn, and the server may not have heard yet.
        serial: of this connection's newest Credit.
        repeated: something was sent twice on this connection.
        stamp: of the newest frame that has one.
        round_trip_us: of the link, for the server; 0 where it is not known.
    """

    def __init__(self, epoch: int = 0, connection: int = 0) -> None:
        self.epoch, self.connection = epoch, connection
        self.in_flight: InFlight | None = None
        self.credit = self.serial = self.stamp = self.round_trip_us = 0
        self.awaits_revocation = self.repeated = False
        self._cuts: list[tuple[int, int]] = []  # epochs of this connection that cut, and where
        self._step = 1  # from an epoch to the next
        self._frames: list[bytes] = []

    @classmethod
    def restored(cls, epoch: int, connection: int) -> Outgoing:
        """That of a snapshot. The program that made it may have begun more epochs, of which the server has heard: one
        that begins before the server says so is none of them."""
        outgoing = cls(epoch, connection)
        outgoing._step = _LEAP
        return outgoing

    def take(self) -> list[bytes]:
        """The frames made since the last call, in order."""
        frames, self._frames = self._frames, []
        return frames

    def clear(self) -> None:
        """The connection is gone, and with it what was under way."""
        self.in_flight = None
        self.awaits_revocation, self.serial, self.repeated = False, 0, False
        self._cuts.clear()
        self._frames.clear()

    def begin_epoch(self, cut: int | None = None) -> None:
        """Verdicts on earlier frames do not count any more, nor does the credit.

        Args:
            cut: the conversation's tokens from here on are gone; None where all stay.
        """
        self.epoch, self._step = self.epoch + self._step, 1
        self.in_flight = None
        self.end_credit()
        if cut is not None:
            self._cuts.append((self.epoch, cut))

    def rows_hold_until(self, epoch: int, end: int) -> int:
        """Up to which position rows that were sent at ``epoch`` are those of the conversation's tokens; ``end`` if all
        before it are."""
        return min((cut for begun, cut in self._cuts if begun > epoch), default=end)

    def catch_up(self, epoch: int, connection: int) -> None:
        """The server has heard of these."""
        self.epoch, self.connection, self._step = max(self.epoch, epoch), max(self.connection, connection), 1

    def resend(self) -> bool:
        """Once more what is in flight, and the credit; says whether there is anything."""
        before = len(self._frames)
        if self.in_flight is not None:
            self._frames.append(self.in_flight.frame)
        if self.credit or self.awaits_revocation:
            self._credit()
        sent = len(self._frames) > before
        self.repeated = self.repeated or sent
        return sent

    def hello(self, fingerprints: Fingerprints, row_encoding: int, resume: wire.Resume) -> None:
        """The Hello of the next connection.

        Args:
            resume: the conversation that goes on; its count, epoch and credit are filled in here.
        """
        self.connection += 1
        resume.connection, resume.epoch, resume.credit = self.connection, self.epoch, self.credit
        hello = wire.Hello(
            protocol_version=PROTOCOL_VERSION,
            newest_version=PROTOCOL_VERSION,
            fingerprints=wire.Fingerprints(
                target=fingerprints.target, tokenizer=fingerprints.tokenizer, drafter=fingerprints.drafter
            ),
            row_encoding=wire.RowEncoding.Name(row_encoding),
            resume=resume,
        )
        self._add(wire.ClientMessage(hello=hello))

    def prompt(
        self,
        base_len: int,
        tokens: Sequence[int],
        *,
        rows_from: int,
        sampling: Sampling,
        max_length: int,
        while_away: bool,
        answer_from: int,
    ) -> None:
        prompt = wire.Prompt(
            epoch=self.epoch,
            base_len=base_len,
            tokens=tokens,
            rows_from=rows_from,
            sampling=message_of(sampling),
            max_length=max_length,
            while_away=while_away,
            answer_from=answer_from,
            stamp=self._next_stamp(),
        )
        self._launch(wire.ClientMessage(prompt=prompt), supplied=len(tokens))

    def draft(self, base_len: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """A Draft; without ``parents`` the tokens are a chain."""
        draft = wire.Draft(
            epoch=self.epoch, base_len=base_len, tokens=tokens, parents=parents, stamp=self._next_stamp()
        )
        self._launch(wire.ClientMessage(draft=draft), drafted=len(tokens))

    def grant_credit(self, position: int) -> None:
        """The server may go on by itself up to ``position``."""
        self.credit, self.awaits_revocation = position, False
        self._new_credit()

    def revoke_credit(self) -> None:
        """It may no longer."""
        self.credit, self.awaits_revocation = 0, True
        self._new_credit()

    def end_credit(self) -> None:
        """The answer is over, and with it its credit."""
        self.credit, self.awaits_revocation = 0, False

    def expect(self, base_len: int) -> None:
        """A verdict on what follows ``base_len`` tokens comes without being asked for; :meth:`resend` asks for it."""
        draft = wire.Draft(epoch=self.epoch, base_len=base_len)
        self.in_flight = InFlight(wire.ClientMessage(draft=draft).SerializeToString(), 0, 0, asked=False)

    def cancel(self, base_len: int) -> None:
        self._add(wire.ClientMessage(cancel=wire.Cancel(epoch=self.epoch, base_len=base_len)))

    def _launch(self, message: wire.ClientMessage, *, drafted: int = 0, supplied: int = 0) -> None:
        self.in_flight = InFlight(message.SerializeToString(), drafted, supplied)
        self._frames.append(self.in_flight.frame)

    def _new_credit(self) -> None:
        self.serial += 1
        self._credit()

    def _credit(self) -> None:
        credit = wire.Credit(epoch=self.epoch, position=self.credit, serial=self.serial, stamp=self._next_stamp())
        credit.round_trip_us = self.round_trip_us
        self._add(wire.ClientMessage(credit=credit))

    def _next_stamp(self) -> int:
        self.stamp = self.stamp % _LARGEST_STAMP + 1
        return self.stamp

    def _add(self, message: wire.ClientMessage) -> None:
        self._frames.append(message.SerializeToString())
