"""Messages that none of our verifiers sends. Each ends in a sentence, or the answer waits, within a deadline."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.system.hostile import CONTEXT, TEXT, Peer, Server, outcome


def _told(**event: Any) -> dict[str, Any]:
    """A server that answers a question with this."""
    return {"asked": lambda peer, verdict: peer.say(**event)}


def _fault(text: str, code: int = wire.FAULT_CODE_PROTOCOL, **fields: Any) -> dict[str, Any]:
    return _told(fault=wire.Fault(code=code, text=text, **fields))


def _verdict(**fields: Any) -> dict[str, Any]:
    """One whose verdicts differ in this."""

    def change(verdict: wire.Verdict) -> None:
        for name, value in fields.items():
            if name == "tokens":
                verdict.ClearField("tokens")
                verdict.tokens.extend(value)
            else:
                setattr(verdict, name, value(verdict) if callable(value) else value)

    return {"verdict": change}


def _rows(**fields: Any) -> dict[str, Any]:
    """One whose verdicts are followed by such memory rows, of the first position."""
    rows = {"count": 1, "kv_heads": 1, "head_dim": 1, "encoding": wire.ROW_ENCODING_INT8, **fields}
    rows.setdefault("data", b"\1\1")
    rows.setdefault("scales", struct.pack("<2e", 1, 1))

    def asked(peer: Peer, verdict: wire.Verdict) -> None:
        peer.say(verdict=verdict)
        peer.say(rows=wire.MemoryRows(epoch=verdict.epoch, **rows))

    return {"asked": asked}


def _changes_its_mind() -> dict[str, Any]:
    """One whose second verdict has another token where the first one had its own."""
    decided: list[int] = []

    def change(verdict: wire.Verdict) -> None:
        if decided:
            verdict.base_len -= 1
            verdict.tokens[:] = [9, 9]
        decided.append(verdict.base_len)

    return {"verdict": change}


_NAN = struct.pack("<2e", float("nan"), 1)
_LIMITS = {"max_context": CONTEXT, "max_draft_tokens": 8}


#: What a server does wrong, and what a user hears of it.
MESSAGES: list[tuple[dict[str, Any], str]] = [
    # Of the Welcome.
    ({"greeted": lambda peer: peer.frame(b"\xff" * 100)}, r"refused: \[\w+\] .* no ServerMessage"),
    ({"greeted": lambda peer: peer.frame(b"{}", TEXT)}, r"refused: \[\w+\] .* no ServerMessage"),
    ({"greeted": lambda peer: peer.frame(b"")}, r"refused: \[\w+\] .* an event"),
    ({"greeted": lambda peer: peer.say(verdict=wire.Verdict(tokens=[1]))}, r"refused: \[no_welcome\]"),
    ({"welcome": {"protocol_version": 99}}, r"refused: \[\w+\] .* 99, this client 2"),
    ({"welcome": {"epoch": 2**64 - 1}}, r"refused: \[\w+\] the server counts 18446744073709551615 epochs"),
    ({"welcome": {"limits": wire.Limits(max_context=2**32 - 1)}}, r"refused: \[\w+\] .* 4294967295 tokens"),
    ({"welcome": {"limits": wire.Limits()}}, r"refused: \[\w+\] .* a context of 0 tokens"),
    ({"welcome": {"limits": wire.Limits(max_context=CONTEXT)}}, "answered"),  # takes no drafts
    ({"welcome": {"limits": wire.Limits(**{**_LIMITS, "max_draft_tokens": 2**32 - 1})}}, "answered"),
    ({"welcome": {"committed_length": 2**60}}, "answered"),
    ({"welcome": {"resume_token": "\x1b[2J" * 100_000}}, "answered"),
    ({"welcome": {"capabilities": [99, 1], "load": wire.Load(queue_us=2**32 - 1)}}, "answered"),
    # Of a verdict.
    (_verdict(tokens=[]), "failed: the server sent a verdict without tokens"),
    (_verdict(accepted=5), "failed: the server sent a verdict without tokens"),
    (_verdict(tokens=[512]), "failed: the server chose token 512 of a vocabulary of 512"),
    (_verdict(tokens=[2**32 - 1]), "failed: the server chose token 4294967295 of a vocabulary of 512"),
    (_verdict(tokens=[5] * 10_000), r"failed: the server wrote up to position \d+, but the answer ends at \d+"),
    (_verdict(finish=0), "failed: the server wrote up to position"),  # it never says that the answer has ended
    (_verdict(base_len=lambda verdict: verdict.base_len + 3), "failed: the server left out tokens from"),
    (_verdict(base_len=2**64 - 1), "failed: the server left out tokens from"),
    (_verdict(base_len=0), "waits"),
    (_verdict(epoch=2**64 - 1), "waits"),
    (_verdict(finish=99), "failed: the server wrote up to position"),
    (_verdict(compute_us=2**32 - 1, draft_us=2**32 - 1, drafted=2**32 - 1, pushed=True, finish=2), "answered"),
    (_verdict(drafted=2**32 - 1, draft_stamp=2**32 - 1), "answered"),
    (_verdict(rows_until=2**64 - 1, finish=1), "answered"),
    (_changes_its_mind(), "failed: the server decided a position twice, with different tokens"),
    # Of memory rows.
    (_rows(scales=_NAN), "failed: the server sent broken memory rows: numbers that are not finite"),
    (_rows(data=b"\1" * 5), "failed: the server sent broken memory rows: int8 rows of shape"),
    (_rows(encoding=9), "failed: the server sent broken memory rows: unknown row encoding 9"),
    (_rows(head_dim=2, data=b"\1" * 4), "failed: the verifier's memory rows are not those of this bundle's drafter"),
    (_rows(count=0, kv_heads=2**32 - 1, head_dim=2**32 - 1, data=b"", scales=b""), "answered"),
    (_rows(count=2**32 - 1, kv_heads=0, data=b"", scales=b""), "answered"),
    (_rows(start=2**64 - 1), "failed|answered"),
    # Of a fault.
    (_fault("\x1b[2J\x1b]0;owned\x07 \u202e red"), r"failed: \\x1b\[2J\\x1b\]0;owned\\x07 \\u202e red"),
    (_fault("a" * (3 << 20)), r"failed: a{400}\.\.\."),
    (_fault(""), "failed: the verifier refused with PROTOCOL"),
    (_fault("odd", 99), "failed: odd"),
    (_fault("later", wire.FAULT_CODE_BUSY, retry_after_ms=2**32 - 1), "waits"),
    (
        _fault("lost", wire.FAULT_CODE_OUT_OF_SYNC, committed_length=2**64 - 1),
        "failed: the server still lacks tokens that were replayed",
    ),
    (_fault("another took over", wire.FAULT_CODE_REPLACED), "offline: another took over|failed: another took over"),
]


@pytest.mark.parametrize(
    ("wrong", "said"),
    MESSAGES,
    ids=lambda each: each if isinstance(each, str) else "-".join(each),  # functions differ from process to process
)
def test_messages_that_no_verifier_sends(wrong, said, small_bundle, caplog):
    wait = {"wait_s": 0.5} if said == "waits" else {}
    assert re.match(said, heard := outcome(Server(**wrong), small_bundle, caplog, **wait)), heard
