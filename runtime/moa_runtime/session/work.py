"""What a verifier's session hears from its client, and what it asks of the engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from moa_runtime.session.handshake import fault
from moa_runtime.session.sampling import Sampling
from moa_runtime.wire.moa.v1 import session_pb2 as wire


@dataclass(frozen=True)
class Verify:
    """Run the target over ``draft``, a tree of ``parents`` after ``prefix``; then
    :meth:`~moa_runtime.session.server.ServerSession.decide`.

    Attributes:
        prefix: the whole committed conversation.
        rows_from: the first memory row that is wanted of it; None for none.
        supplied: tokens at the end of the prefix that came with this frame.
        pushed: no frame asked for it.
    """

    prefix: tuple[int, ...]
    draft: tuple[int, ...]
    parents: tuple[int, ...]
    sampling: Sampling
    rows_from: int | None = None
    supplied: int = 0
    pushed: bool = False


@dataclass(frozen=True)
class RowsWork:
    """Memory rows of ``prefix`` from position ``start`` on; then
    :meth:`~moa_runtime.session.server.ServerSession.add_rows`."""

    prefix: tuple[int, ...]
    start: int


def until_end(
    tokens: list[int], base_len: int, stop_tokens: Collection[int], max_length: int, max_context: int
) -> tuple[list[int], int]:
    """Those of the tokens behind ``base_len`` others that belong to the answer, and the ``Finish`` that ends it there;
    a ``max_length`` of 0 is none."""
    for count, token in enumerate(tokens, 1):
        if token in stop_tokens:
            return tokens[:count], wire.FINISH_STOP
        if max_length and base_len + count >= max_length:
            return tokens[:count], wire.FINISH_LENGTH
        if base_len + count >= max_context:
            return tokens[:count], wire.FINISH_CONTEXT
    return tokens, wire.FINISH_UNSPECIFIED


def parse_client_message(data: bytes) -> wire.ClientMessage | wire.ServerMessage:
    """A frame from a client, or the fault that answers one that is no message."""
    try:
        message = wire.ClientMessage.FromString(data)
    except DecodeError:
        return fault(wire.FAULT_CODE_PROTOCOL, "the frame is no ClientMessage")
    if message.WhichOneof("event") is None:
        return fault(wire.FAULT_CODE_PROTOCOL, "the ClientMessage holds no event this version knows")
    return message
