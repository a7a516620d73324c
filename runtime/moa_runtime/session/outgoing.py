"""Frames from the device to the server: their epochs, and the one that awaits a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moa_runtime.session.handshake import PROTOCOL_VERSION, Fingerprints
from moa_runtime.session.server import Sampling
from moa_runtime.wire.moa.v1 import session_pb2 as wire


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
    """

    def __init__(self, epoch: int = 0, connection: int = 0) -> None:
        self.epoch, self.connection = epoch, connection
        self.in_flight: InFlight | None = None
        self._frames: list[bytes] = []

    def take(self) -> list[bytes]:
        """The frames made since the last call, in order."""
        frames, self._frames = self._frames, []
        return frames

    def clear(self) -> None:
        """The connection is gone, and with it what was under way."""
        self.in_flight = None
        self._frames.clear()

    def begin_epoch(self) -> None:
        """Verdicts on earlier frames do not count any more."""
        self.epoch += 1
        self.in_flight = None

    def catch_up(self, epoch: int, connection: int) -> None:
        """The server has heard of these."""
        self.epoch, self.connection = max(self.epoch, epoch), max(self.connection, connection)

    def resend(self) -> bool:
        """Once more what is in flight; says whether anything is."""
        if self.in_flight is None:
            return False
        self._frames.append(self.in_flight.frame)
        return True

    def hello(self, fingerprints: Fingerprints, row_encoding: int, resume: wire.Resume | None) -> None:
        """The Hello of the next connection.

        Args:
            resume: the conversation that goes on; its count and epoch are filled in here.
        """
        self.connection += 1
        hello = wire.Hello(
            protocol_version=PROTOCOL_VERSION,
            newest_version=PROTOCOL_VERSION,
            fingerprints=wire.Fingerprints(
                target=fingerprints.target, tokenizer=fingerprints.tokenizer, drafter=fingerprints.drafter
            ),
            row_encoding=wire.RowEncoding.Name(row_encoding),
        )
        if resume is not None:
            resume.connection, resume.epoch = self.connection, self.epoch
            hello.resume.CopyFrom(resume)
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
    ) -> None:
        prompt = wire.Prompt(
            epoch=self.epoch,
            base_len=base_len,
            tokens=tokens,
            rows_from=rows_from,
            sampling=wire.Sampling(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed),
            max_length=max_length,
            while_away=while_away,
        )
        self._launch(wire.ClientMessage(prompt=prompt), supplied=len(tokens))

    def draft(self, base_len: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """A Draft; without ``parents`` the tokens are a chain."""
        draft = wire.Draft(epoch=self.epoch, base_len=base_len, tokens=tokens, parents=parents)
        self._launch(wire.ClientMessage(draft=draft), drafted=len(tokens))

    def expect(self, base_len: int) -> None:
        """A verdict on what follows ``base_len`` tokens comes without being asked for; :meth:`resend` asks for it."""
        draft = wire.Draft(epoch=self.epoch, base_len=base_len)
        self.in_flight = InFlight(wire.ClientMessage(draft=draft).SerializeToString(), 0, 0, asked=False)

    def cancel(self, base_len: int) -> None:
        self._add(wire.ClientMessage(cancel=wire.Cancel(epoch=self.epoch, base_len=base_len)))

    def _launch(self, message: wire.ClientMessage, *, drafted: int = 0, supplied: int = 0) -> None:
        self.in_flight = InFlight(message.SerializeToString(), drafted, supplied)
        self._frames.append(self.in_flight.frame)

    def _add(self, message: wire.ClientMessage) -> None:
        self._frames.append(message.SerializeToString())
