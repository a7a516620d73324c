"""Memory rows on the wire (int8 with one float16 scale per token and head, or float16), and their queue."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_runtime.wire.moa.v1 import session_pb2 as wire

Float32 = NDArray[np.float32]
_LARGEST = 65504.0  # largest finite float16


class RowsError(ValueError):
    """The sizes in a MemoryRows message disagree, or a value is not finite."""


def encoding_of(architecture: str) -> int:
    """Return the encoding of the rows for a drafter of this architecture, as ``row_encoding`` of the Hello.

    EAGLE-3's are made of hidden states, which have outliers: with their scale in int8, little would be left of the
    other numbers.
    """
    return wire.ROW_ENCODING_FLOAT16 if architecture == "eagle3" else wire.ROW_ENCODING_INT8


def encode_rows(start: int, keys: Float32, values: Float32, encoding: int) -> wire.MemoryRows:
    """Encode rows for the wire.

    Args:
        start: absolute position of the first row.
        keys, values: float32 ``[n, kv_heads, head_dim]``; values are clipped to the range of float16, NaN becomes 0.
        encoding: ``ROW_ENCODING_INT8`` or ``ROW_ENCODING_FLOAT16``.

    Example: one int8 row of one head, ``keys [[[0.0, 127.0]]]``, is the bytes ``00 7f`` with scale 1.0.
    """
    both = np.stack((keys, values))
    if not np.abs(both).max(initial=0.0) <= _LARGEST:
        both = np.clip(np.nan_to_num(both), -_LARGEST, _LARGEST)
    count, kv_heads, head_dim = keys.shape
    rows = wire.MemoryRows(start=start, count=count, kv_heads=kv_heads, head_dim=head_dim)
    if encoding == wire.ROW_ENCODING_FLOAT16:
        rows.encoding = wire.ROW_ENCODING_FLOAT16
        rows.data = both.astype("<f2").tobytes()
        return rows
    # Round the scale to float16 first: the receiver multiplies with the rounded scale.
    peak = np.abs(both).max(axis=-1) / 127
    scales = np.maximum(peak, np.finfo(np.float16).tiny).astype("<f2")
    rows.encoding = wire.ROW_ENCODING_INT8
    rows.data = np.rint(both / scales[..., None].astype(np.float32)).astype(np.int8).tobytes()  # 127.06 at most
    rows.scales = scales.tobytes()
    return rows


def decode_rows(rows: wire.MemoryRows) -> tuple[Float32, Float32]:
    """Decode to float32 keys and values, each ``[count, kv_heads, head_dim]``.

    Raises:
        RowsError: if the encoding is unknown, the sizes disagree, or a value is not finite.
    """
    shape = (2, rows.count, rows.kv_heads, rows.head_dim)
    numbers = 2 * rows.count * rows.kv_heads * rows.head_dim
    if not numbers:  # the other sizes are arbitrary
        return np.zeros((0, 0, 0), np.float32), np.zeros((0, 0, 0), np.float32)
    both: NDArray[Any]
    if rows.encoding == wire.ROW_ENCODING_FLOAT16:
        if len(rows.data) != 2 * numbers:
            raise RowsError(f"float16 rows of shape {shape} take {2 * numbers} bytes, not {len(rows.data)}")
        both = np.frombuffer(rows.data, "<f2").astype(np.float32).reshape(shape)
    elif rows.encoding == wire.ROW_ENCODING_INT8:
        scale_bytes = 4 * rows.count * rows.kv_heads
        if len(rows.data) != numbers or len(rows.scales) != scale_bytes:
            raise RowsError(
                f"int8 rows of shape {shape} take {numbers} bytes and {scale_bytes} of scales, "
                f"not {len(rows.data)} and {len(rows.scales)}"
            )
        scales = np.frombuffer(rows.scales, "<f2").astype(np.float32).reshape(*shape[:3], 1)
        both = np.frombuffer(rows.data, np.int8).astype(np.float32).reshape(shape) * scales
    else:
        raise RowsError(f"unknown row encoding {rows.encoding}")
    if not np.isfinite(both).all():
        raise RowsError("numbers that are not finite")
    return both[0], both[1]


def part_of(rows: wire.MemoryRows, first: int, last: int) -> wire.MemoryRows:
    """Return the rows ``first`` to ``last`` (exclusive), counted from the message's own start.

    It must hold that ``0 <= first < last <= count``.
    """
    size = 2 if rows.encoding == wire.ROW_ENCODING_FLOAT16 else 1

    def part(data: bytes, width: int) -> bytes:
        return np.frombuffer(data, np.uint8).reshape(2, rows.count, width)[:, first:last].tobytes()

    return wire.MemoryRows(
        start=rows.start + first,
        count=last - first,
        kv_heads=rows.kv_heads,
        head_dim=rows.head_dim,
        encoding=rows.encoding,
        data=part(rows.data, size * rows.kv_heads * rows.head_dim),
        scales=part(rows.scales, 2 * rows.kv_heads) if rows.scales else b"",
        epoch=rows.epoch,
    )


class RowQueue:
    """Queue of rows that the engine made and that were not sent to the client yet.

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
