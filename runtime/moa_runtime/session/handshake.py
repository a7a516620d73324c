"""Hello and Welcome: what both ends have to agree on before a conversation starts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from moa_runtime.manifest import Fingerprints
from moa_runtime.wire.moa.v1 import session_pb2 as wire

PROTOCOL_VERSION = 2
_LONGEST_NAME = 100  # characters of a client's fingerprint in a fault


@dataclass(frozen=True)
class Limits:
    """Limits of a verifier, as in its Welcome.

    Attributes:
        max_context: context of the target, tokens.
        max_draft_tokens: largest draft, tokens.
        max_frame_bytes: largest frame, bytes.
        idle_seconds: a connection is closed after this silence.
        trees: whether draft trees are verified; else only chains.
        away_seconds: how long an answer is continued after its client disconnected; 0 if it is not.
        keep_seconds: how long a conversation is kept after its client disconnected.
    """

    max_context: int = 8192
    max_draft_tokens: int = 1024
    max_frame_bytes: int = 1 << 20
    idle_seconds: int = 900
    trees: bool = True
    away_seconds: int = 0
    keep_seconds: int = 0

    @classmethod
    def from_message(cls, message: wire.Limits) -> Limits:
        """Parse the limits of a Welcome."""
        return cls(trees=not message.chains_only, **{name: getattr(message, name) for name in NUMERIC_LIMITS})

    def to_message(self) -> wire.Limits:
        """Build the limits of a Welcome."""
        return wire.Limits(chains_only=not self.trees, **{name: getattr(self, name) for name in NUMERIC_LIMITS})


#: Names of the limits that are numbers.
NUMERIC_LIMITS = tuple(field.name for field in fields(Limits) if field.name != "trees")


def fault(code: int, text: str, *, retry_after_ms: int = 0, committed_length: int = 0) -> wire.ServerMessage:
    """Build a Fault message.

    Args:
        code: ``FaultCode`` of the wire.
        text: sentence for people.
        retry_after_ms: delay after which a retry may succeed, milliseconds; 0 for never.
        committed_length: for OUT_OF_SYNC: number of committed tokens that the server has.
    """
    return wire.ServerMessage(
        fault=wire.Fault(
            code=wire.FaultCode.Name(code), text=text, retry_after_ms=retry_after_ms, committed_length=committed_length
        )
    )


def digest(tokens: Sequence[int]) -> int:
    """Return the CRC-32 (IEEE 802.3) of token ids as four bytes each, little-endian; ``digest([1, 2])`` is 58791804."""
    return zlib.crc32(np.asarray(tokens, "<u4").tobytes())


def check_hello(hello: wire.Hello, own: Fingerprints) -> wire.ServerMessage | None:
    """Return the fault that refuses a Hello; None if versions and fingerprints match."""
    oldest, newest = hello.protocol_version, max(hello.protocol_version, hello.newest_version)
    if not oldest <= PROTOCOL_VERSION <= newest:
        theirs = f"version {oldest}" if newest == oldest else f"versions {oldest} to {newest}"
        return fault(
            wire.FAULT_CODE_VERSION_MISMATCH,
            f"the client speaks protocol {theirs}, this verifier version {PROTOCOL_VERSION}; update the older one",
        )
    prints = hello.fingerprints
    for name in ("target", "tokenizer", "drafter"):
        client, server = getattr(prints, name), getattr(own, name)
        if name == "drafter" and hello.row_encoding == wire.ROW_ENCODING_UNSPECIFIED:
            continue
        if client != server:
            client = client[:_LONGEST_NAME]
            found = f"the bundle was made for {name} {client or 'none'}, this verifier serves {name} {server or 'none'}"
            advice = "export a bundle with the verifier's model and drafter"
            if name == "drafter":
                bundle = f"{advice}, or " if server else ""
                serve = "start moa-serve with the --drafter of the bundle"
                advice = f"{bundle}{serve}, or draft without memory rows, as moa-chat --drafter sssd does"
            return fault(wire.FAULT_CODE_FINGERPRINT_MISMATCH, f"{found}; {advice}")
    return None
