"""Memory rows that wait to be sent to a client: in order, without gaps, after the text."""

from __future__ import annotations

from moa_runtime.session.memory_rows import Float32, encode_rows, part_of
from moa_runtime.wire.moa.v1 import session_pb2 as wire


class RowQueue:
    """Queue of rows that the engine made and the client has not been sent.

    Args:
        encoding: ``RowEncoding`` of the wire; unspecified if no rows are wanted.
        start: the client has the rows before this position.

    Attributes:
        next: first position whose row the engine has not made.
        sent: the rows before this position were sent.
    """

    def __init__(self, encoding: int = wire.ROW_ENCODING_UNSPECIFIED, start: int = 0) -> None:
        self.encoding, self.next, self.sent = encoding, start, start
        self._waiting: list[wire.MemoryRows] = []

    @property
    def wanted(self) -> bool:
        """Whether the client takes rows at all."""
        return self.encoding != wire.ROW_ENCODING_UNSPECIFIED

    def disable(self) -> None:
        """Drop all rows, now and later: the engine makes none."""
        self.encoding = wire.ROW_ENCODING_UNSPECIFIED
        self._waiting.clear()

    def skip_to(self, length: int) -> None:
        """Skip the rows of the first ``length`` positions, which the client has."""
        if length > self.sent:
            self._waiting.clear()
            self.next = self.sent = length

    def add(self, start: int, keys: Float32, values: Float32, end: int) -> None:
        """Append the engine's rows; those before :attr:`next` and from ``end`` on are left out.

        Args:
            start: position of the first row.
            keys, values: float32 ``[n, kv_heads, head_dim]``.
            end: position after the last row that may be sent.
        """
        first, last = self.next - start, min(end, start + len(keys)) - start
        if not self.wanted or first < 0 or last <= first:
            return
        self._waiting.append(encode_rows(self.next, keys[first:last], values[first:last], self.encoding))
        self.next = start + last

    def truncate(self, length: int) -> None:
        """Drop the rows from position ``length`` on."""
        while self._waiting and self._waiting[-1].start >= length:
            self._waiting.pop()
        if self._waiting:
            last = self._waiting[-1]
            self._waiting[-1] = part_of(last, 0, min(last.count, length - last.start))
        self.next, self.sent = min(self.next, length), min(self.sent, length)

    def take(self, most: int, epoch: int) -> wire.ServerMessage | None:
        """Remove and return the next frame with at most ``most`` rows; None if the queue is empty."""
        if not self._waiting:
            return None
        first = self._waiting.pop(0)
        if first.count > most:
            self._waiting.insert(0, part_of(first, most, first.count))
            first = part_of(first, 0, most)
        self.sent = first.start + first.count
        first.epoch = epoch
        return wire.ServerMessage(rows=first)
