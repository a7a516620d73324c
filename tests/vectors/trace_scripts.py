"""Traces that neither walks nor tests cover: single frames of a verifier, and the client's answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from moa_runtime.session.client import ClientSession, LocalProtocolError
from moa_runtime.session.events import Origin, Policy, Sampling
from moa_runtime.session.memory_rows import encode_rows
from moa_runtime.session.tree import DraftTree
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.session.fixtures_pair import PRINTS, STOP, VOCAB

PROMPT = [5, 6, 7]
LARGE = 2**53 + 1


def tell(client: ClientSession, **event: Any) -> None:
    client.receive(wire.ServerMessage(**event).SerializeToString(deterministic=True))
    client.frames_to_send()


def welcome(**fields: Any) -> wire.Welcome:
    fields = {"protocol_version": 2, "resume_token": "token"} | fields
    return wire.Welcome(limits=wire.Limits(max_context=100, max_draft_tokens=10, idle_seconds=60), **fields)


def asked(policy: Policy = Policy.ROLLBACK, encoding: int = wire.ROW_ENCODING_INT8, **fields: Any) -> ClientSession:
    """A question is on its way: the verdict is awaited, in epoch 1."""
    client = ClientSession(PRINTS, stop_tokens=[STOP], policy=policy, row_encoding=encoding, vocab_size=VOCAB)
    client.connect()
    client.frames_to_send()
    tell(client, welcome=welcome(**fields))
    client.prompt(PROMPT, Sampling(0.7, 0.9, 2**64 - 1, top_k=40, min_p=0.05), 20)
    client.frames_to_send()
    return client


def verdict(base_len: int, tokens: list[int], **fields: Any) -> wire.Verdict:
    return wire.Verdict(**{"epoch": 1, "base_len": base_len, "tokens": tokens} | fields)


def answered(**fields: Any) -> ClientSession:
    client = asked(**fields)
    tell(client, verdict=verdict(3, [8], rows_until=3, echo=wire.Echo(stamp=client.stamp, held_us=1234)))
    return client


def drafted() -> ClientSession:
    """A draft of two is on its way."""
    client = answered()
    client.extend([2, 3], Origin.DRAFTED)
    client.propose()
    client.frames_to_send()
    return client


def faults() -> None:
    """Every code, and an unknown one, with and without a retry."""
    for code in (*wire.FaultCode.values(), 99):
        for retry in (0, 250):
            fault = wire.Fault(text=f"code {code}", retry_after_ms=retry, committed_length=2)
            fault.MergeFromString(bytes([8, code]))  # an open enum
            tell(drafted(), fault=fault)
            idle = asked()
            idle.cancel()
            tell(idle, fault=fault)


def refused(call: Callable[..., object], *args: object) -> None:
    """Make a call that the session's state may not allow."""
    with contextlib.suppress(LocalProtocolError):
        call(*args)


def refused_greeting() -> None:
    for code in ("VERSION_MISMATCH", "FINGERPRINT_MISMATCH", "BUSY", "REPLACED"):
        client = ClientSession(PRINTS, stop_tokens=[STOP])
        client.connect()
        client.frames_to_send()
        tell(client, fault=wire.Fault(code=f"FAULT_CODE_{code}", text="no", retry_after_ms=1000 * (code == "BUSY")))
        client.disconnected()


def finishes() -> None:
    for finish in wire.Finish.keys():  # noqa: SIM118
        client = drafted()
        client.extend([4], Origin.OFFLINE)
        tell(client, verdict=verdict(4, [2, 3], accepted=2, finish=finish, compute_us=777, sharing=5))
        client.propose()
        client.frames_to_send()


def continued() -> None:
    """A finished answer is continued, connected or not; perhaps after a part of it only."""
    for online in (True, False):
        client = drafted()
        tell(client, verdict=verdict(4, [2, 3], accepted=2, finish=wire.FINISH_LENGTH))
        refused(client.continue_answer, [4], 7, Sampling(), 5)
        refused(client.continue_answer, [4], 0, Sampling(), 5)
        if not online:
            client.disconnected()
        client.rewind(5)
        client.continue_answer([6, 7], 3, Sampling(0.5, 0.75, 9), 5, while_away=False)
        refused(client.continue_answer, [], 3, Sampling(), 5)
        if not online:
            client.connect()
            client.frames_to_send()
            tell(client, welcome=welcome(epoch=1, committed_length=0))
        client.frames_to_send()
        tell(client, verdict=verdict(7, [8, 9], epoch=2 if online else 3, finish=wire.FINISH_LENGTH))
        client.continue_answer([], 3, Sampling())
        client.frames_to_send()
        client.cancel()


def beyond_the_end() -> None:
    """More than was asked for, or than a context holds; contexts that there are not."""
    tell(drafted(), verdict=verdict(4, [2] * 19))
    tell(drafted(), verdict=verdict(4, [2] * 20))
    for context in (0, 1 << 24, (1 << 24) + 1):
        client = ClientSession(PRINTS, stop_tokens=[STOP])
        client.connect()
        client.frames_to_send()
        tell(client, welcome=wire.Welcome(protocol_version=2, limits=wire.Limits(max_context=context)))


def fault_texts() -> None:
    """Nothing in them talks to a terminal."""
    for text in ("", "a\tb\r\nc\x1b[2Jd\x7f\x85\xa0e", "\u200b\u2028\ue000\U000e0001\U0001f600é", "x" * 401):
        tell(drafted(), fault=wire.Fault(code="FAULT_CODE_BUSY", text=text))


def broken_verdicts() -> None:
    for said in (
        verdict(4, []),
        verdict(4, [2], accepted=2),
        verdict(4, [2, VOCAB]),
        verdict(6, [2]),
        verdict(2**63, [2]),
        verdict(2, [7, 9, 2]),
        verdict(2, [7, 8, 2, 3, 4], accepted=4),
        verdict(2, [7, 8]),
        verdict(4, [2], epoch=0),
        verdict(4, [2], epoch=2),
        verdict(4, [2], epoch=2**64 - 1),
        verdict(4, [9], accepted=0),
    ):
        tell(drafted(), verdict=said)


def verdicts_on_a_prompt() -> None:
    """Those that name an earlier position say nothing of a prompt's tokens."""
    for said in (verdict(2, [7, 8]), verdict(4, [8]), verdict(3, [8], accepted=1, pushed=True, drafted=3)):
        tell(asked(), verdict=said)


def pushed() -> None:
    client = answered(capabilities=[wire.CAPABILITY_DRAFTS])
    client.note_round_trip(0.0425)
    client.grant_credit(30)
    client.frames_to_send()
    said = {"pushed": True, "drafted": 4, "accepted": 2, "draft_us": 2500, "compute_us": 30000, "drafts_wanted": True}
    tell(client, verdict=verdict(4, [2, 3, 4], **said, sharing=2**32 - 1))
    client.extend([5, 6], Origin.DRAFTED)
    tell(client, verdict=verdict(7, [5, 1], accepted=1, pushed=True, drafted=1))
    client.note_round_trip(5000.0)
    client.grant_credit(31)
    client.revoke_credit()
    client.frames_to_send()
    tell(client, standing=wire.CreditRevoked(epoch=1, serial=1))
    tell(client, standing=wire.CreditRevoked(epoch=0, serial=3))
    tell(client, verdict=verdict(9, [2], pushed=True))
    tell(client, standing=wire.CreditRevoked(epoch=1, serial=3, echo=wire.Echo(stamp=client.stamp, held_us=3)))
    client.propose(0)
    client.frames_to_send()
    client.resend()
    tell(client, pong=wire.Pong(echo=wire.Echo(stamp=2, held_us=2**32 - 1)))
    tell(client, pong=wire.Pong())


def rows_of_both_encodings() -> None:
    numbers = np.linspace(-3, 5, 24, dtype=np.float32).reshape(3, 2, 4)
    for encoding in (wire.ROW_ENCODING_INT8, wire.ROW_ENCODING_FLOAT16):
        whole = encode_rows(0, numbers, numbers[::-1] * 1e-4, encoding)
        whole.epoch = 1
        tell(answered(encoding=encoding), rows=whole)
        for name, value in (
            ("count", 2),
            ("head_dim", 5),
            ("encoding", 0),
            ("encoding", 3),
            ("start", 1),
            ("count", 0),
        ):
            other = wire.MemoryRows()
            other.CopyFrom(whole)
            setattr(other, name, value)
            tell(answered(encoding=encoding), rows=other)
        infinite = wire.MemoryRows()
        infinite.CopyFrom(whole)
        name = "data" if encoding == wire.ROW_ENCODING_FLOAT16 else "scales"
        setattr(infinite, name, b"\x00\x7c" + getattr(whole, name)[2:])
        tell(answered(encoding=encoding), rows=infinite)
    nothing = wire.MemoryRows(start=0, encoding="ROW_ENCODING_INT8", kv_heads=2, head_dim=4)
    tell(answered(), rows=nothing)


def rows_of_an_older_epoch() -> None:
    numbers = np.ones((4, 1, 2), np.float32)
    for start in (0, 2):
        client = answered()
        tell(client, rows=encode_rows(0, numbers[:start], numbers[:start], wire.ROW_ENCODING_INT8))
        client.cancel()
        client.rewind(3)
        client.prompt([1, 2], Sampling())
        client.frames_to_send()
        late = encode_rows(start, numbers[start:], numbers[start:], wire.ROW_ENCODING_INT8)
        late.epoch = 1
        tell(client, rows=late)


def without_rows() -> None:
    client = answered()
    client.disconnected()
    client.wants_rows = False
    client.connect()
    client.frames_to_send()
    client.disconnected()
    client.wants_rows = True
    client.rows = 0
    client.connect()
    client.frames_to_send()


def greetings() -> None:
    """Every Welcome to a client that reconnects with two offline tokens."""
    for policy in Policy:
        for held in (False, True):
            for said in (
                {"committed_length": 4, "epoch": 1},
                {"committed_length": 4, "epoch": 1, "verdict_follows": True},
                {"committed_length": 4, "epoch": 7, "connection": 9},
                {"committed_length": 3, "epoch": 1},
                {"committed_length": 0, "resume_token": "another"},
                {"committed_length": 4, "epoch": LARGE, "connection": LARGE},
            ):
                client = answered(policy=policy)
                client.disconnected()
                client.extend([2, 3], Origin.OFFLINE)
                client.held = held
                client.connect()
                client.frames_to_send()
                tell(client, welcome=welcome(**said))
                tell(client, welcome=welcome())
                tell(client, verdict=verdict(4, [2, 9]))
                client.held = False
                client.resume()
                client.propose()
                client.frames_to_send()


def asked_while_held_and_offline() -> None:
    """A new question is sent all the same."""
    client = answered()
    client.cancel()
    client.disconnected()
    client.held = True
    client.prompt([4, 5], Sampling())
    client.connect()
    client.frames_to_send()
    tell(client, welcome=welcome(epoch=1, committed_length=4))


def greetings_without_an_answer() -> None:
    for epoch in (0, 2, 5):
        client = answered()
        client.cancel()
        client.disconnected()
        client.connect()
        client.frames_to_send()
        tell(client, welcome=welcome(epoch=epoch, committed_length=4))


def kept_when_the_verdict_is_late() -> None:
    client = answered(policy=Policy.ASK)
    client.extend([2, 3], Origin.DRAFTED)
    client.propose()
    client.frames_to_send()
    client.policy = Policy.KEEP
    client.extend([4, 5], Origin.OFFLINE)
    client.declare_offline(1)
    tell(client, verdict=verdict(4, [2, 9], accepted=1))
    tell(client, verdict=verdict(4, [2], epoch=1))
    tell(client, verdict=verdict(8, [1], epoch=2))


def trees() -> None:
    for trees_taken in (True, False):
        client = asked()
        client.disconnected()
        client.connect()
        client.frames_to_send()
        limits = wire.Limits(max_context=100, max_draft_tokens=3, chains_only=not trees_taken)
        tell(client, welcome=wire.Welcome(protocol_version=2, resume_token="token", limits=limits))
        tell(client, verdict=verdict(3, [8], epoch=2))
        client.extend([2, 4], Origin.DRAFTED)
        client.propose(tree=DraftTree((2, 3, 4, 5), (0, 0, 1, 2), (0.0,) * 4))
        client.frames_to_send()
        tell(client, verdict=verdict(4, [3, 5, 6], accepted=2, epoch=2))
        client.extend([2, 4, 2, 4], Origin.DRAFTED)
        client.propose(4)  # more than this verifier takes
        client.frames_to_send()


def other_versions() -> None:
    for version in (0, 1, 3):
        client = ClientSession(PRINTS, stop_tokens=[STOP])
        client.connect()
        client.frames_to_send()
        tell(client, welcome=welcome(protocol_version=version))
    client.receive(b"")
    client.receive(b"\x0c")
    client.receive(b"\xfa\x01\x00")  # an event of a later version


def saved() -> None:
    client = drafted()
    client.extend([4], Origin.OFFLINE)
    again = ClientSession.restore(client.snapshot(), PRINTS, stop_tokens=[STOP], vocab_size=VOCAB)
    again.connect()
    again.frames_to_send()
    tell(again, welcome=welcome(committed_length=4, epoch=1))
    tell(again, verdict=verdict(4, [2, 3, 4, 5], accepted=3, epoch=2))


SCRIPTS: tuple[Callable[[], None], ...] = (
    faults,
    refused_greeting,
    finishes,
    continued,
    beyond_the_end,
    fault_texts,
    broken_verdicts,
    verdicts_on_a_prompt,
    pushed,
    rows_of_both_encodings,
    rows_of_an_older_epoch,
    without_rows,
    greetings,
    asked_while_held_and_offline,
    greetings_without_an_answer,
    kept_when_the_verdict_is_late,
    trees,
    other_versions,
    saved,
)
