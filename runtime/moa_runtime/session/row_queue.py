"""Memory rows on their way to one client: in order, without gaps, behind the text."""

from __future__ import annotations

from moa_runtime.session.memory_rows import Float32, encode_rows, part_of
from moa_runtime.wire.moa.v1 import session_pb2 as wire


class RowsBehind:
    """What the engine made and the client has not been sent.

    Args:
        encoding: a ``RowEncoding`` of the wire; unspecified where no rows are wanted.
        start: the client holds the rows before.

    Attributes:
        next: the first position that the engine is still to make.
        sent: the client has the rows before, or they are under way.
    """

    def __init__(self, encoding: int = wire.ROW_ENCODING_UNSPECIFIED, start: int = 0) -> None:
        self.encoding, self.next, self.sent = encoding, start, start
        self._waiting: list[wire.MemoryRows] = []

    @property
    def wanted(self) -> bool:
        """Whether the client takes rows at all."""
        return self.encoding != wire.ROW_ENCODING_UNSPECIFIED

    def none_come(self) -> None:
        """The engine makes none."""
        self.encoding = wire.ROW_ENCODING_UNSPECIFIED
        self._waiting.clear()

    def held_by_client(self, length: int) -> None:
        """It holds the rows of the first ``length`` positions."""
        if length > self.sent:
            self._waiting.clear()
            self.next = self.sent = length

    def add(self, start: int, keys: Float32, values: Float32, end: int) -> None:
        """Rows of the engine from position ``start`` on, float32 ``[n, kv_heads, head_dim]``; those behind ``end``, and
        those before :attr:`next`, are left out."""
        first, last = self.next - start, min(end, start + len(keys)) - start
        if not self.wanted or first < 0 or last <= first:
            return
        self._waiting.append(encode_rows(self.next, keys[first:last], values[first:last], self.encoding))
        self.next = start + last

    def cut(self, length: int) -> None:
        """The conversation's tokens from position ``length`` on are gone."""
        while self._waiting and self._waiting[-1].start >= length:
            self._waiting.pop()
        if self._waiting:
            last = self._waiting[-1]
            self._waiting[-1] = part_of(last, 0, min(last.count, length - last.start))
        self.next, self.sent = min(self.next, length), min(self.sent, length)

    def take(self, most: int, epoch: int) -> wire.ServerMessage | None:
        """The next frame, of at most so many rows; None where none wait."""
        if not self._waiting:
            return None
        first = self._waiting.pop(0)
        if first.count > most:
            self._waiting.insert(0, part_of(first, most, first.count))
            first = part_of(first, 0, most)
        self.sent = first.start + first.count
        first.epoch = epoch
        return wire.ServerMessage(rows=first)
