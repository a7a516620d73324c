"""Hello and Welcome: what both ends must agree on before a conversation starts."""

from __future__ import annotations

from dataclasses import dataclass

from moa_runtime.bundle import Fingerprints
from moa_runtime.wire.moa.v1 import session_pb2 as wire

__all__ = ["PROTOCOL_VERSION", "Fingerprints", "Limits", "check_hello", "fault"]

PROTOCOL_VERSION = 1
_LONGEST_NAME = 100  # of what a client sent, in a sentence to it


@dataclass(frozen=True)
class Limits:
    """What a verifier allows: tokens, tokens, bytes, seconds, and whether it verifies trees."""

    max_context: int = 8192
    max_draft_tokens: int = 1024
    max_frame_bytes: int = 1 << 20
    idle_seconds: int = 900
    trees: bool = True


def fault(code: int, text: str, *, retry_after_ms: int = 0, committed_length: int = 0) -> wire.ServerMessage:
    """A Fault message; ``code`` is a ``FaultCode`` of the wire."""
    return wire.ServerMessage(
        fault=wire.Fault(
            code=wire.FaultCode.Name(code), text=text, retry_after_ms=retry_after_ms, committed_length=committed_length
        )
    )


def check_hello(hello: wire.Hello, own: Fingerprints) -> wire.ServerMessage | None:
    """The fault that refuses a Hello, or None when both ends fit together."""
    if hello.protocol_version != PROTOCOL_VERSION:
        return fault(
            wire.FAULT_CODE_VERSION_MISMATCH,
            f"the client speaks protocol version {hello.protocol_version}, this verifier {PROTOCOL_VERSION}; "
            "update the older one",
        )
    theirs = hello.fingerprints
    for name in ("target", "tokenizer", "drafter"):
        client, server = getattr(theirs, name), getattr(own, name)
        if name == "drafter" and hello.row_encoding == wire.ROW_ENCODING_UNSPECIFIED:
            continue
        if client != server:
            client = client[:_LONGEST_NAME]
            return fault(
                wire.FAULT_CODE_FINGERPRINT_MISMATCH,
                f"the bundle was made for {name} {client or 'none'}, this verifier serves {name} {server or 'none'}; "
                "export a bundle with the verifier's model and drafter",
            )
    return None
