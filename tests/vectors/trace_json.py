"""Values of the runtime as JSON that any language reads without loss."""

from __future__ import annotations

import base64
import enum
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import DecodeError, Message

from moa_runtime.drafting.events import RoundEnded
from moa_runtime.session.events import Committed, RowsReceived
from moa_runtime.session.tree import DraftTree
from moa_runtime.wire.moa.v1 import session_pb2 as wire

#: Larger whole numbers are written as texts: JSON readers in most languages have doubles.
LARGEST_EXACT = 2**53 - 1
#: Fields that no port has: the scores are for controllers.
_PYTHON_ALONE: dict[type, str] = {RoundEnded: "scores", Committed: "logprobs"}


def plain(value: object) -> Any:
    """Return JSON values: enums as their values, dataclasses as objects, large integers as strings.

    Raises:
        TypeError: nothing in JSON says this.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, int):
        return int(value) if abs(value) <= LARGEST_EXACT else str(int(value))
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if isinstance(value, RowsReceived):
        return {"start": value.start, "keys": value.keys.tolist(), "values": value.values.tolist()}
    if isinstance(value, DraftTree):  # the session reads no more of it
        return {"tokens": list(value.tokens), "parents": list(value.parents)}
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.name != _PYTHON_ALONE.get(type(value))]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    raise TypeError(f"no JSON for {value!r}")


def event(value: object) -> dict[str, Any]:
    """Return an event with the name of its class."""
    return {"event": type(value).__name__, **plain(value)}


def frame(data: bytes, kind: type[Message]) -> dict[str, Any]:
    """Return a frame as the JSON of Protocol Buffers; in base64 if it is not such a message."""
    try:
        message = kind.FromString(data)
        said: dict[str, Any] = MessageToDict(message)
    except (DecodeError, ValueError):
        said = {}
    if not said or ParseDict(said, kind()).SerializeToString(deterministic=True) != data:
        return {"bytes": base64.b64encode(data).decode()}
    return said


def frame_bytes(said: dict[str, Any], kind: type[Message]) -> bytes:
    """The other way round."""
    if set(said) == {"bytes"}:
        return base64.b64decode(said["bytes"])
    return ParseDict(said, kind()).SerializeToString(deterministic=True)


def up(data: bytes) -> dict[str, Any]:
    return frame(data, wire.ClientMessage)


def down(data: bytes) -> dict[str, Any]:
    return frame(data, wire.ServerMessage)
