"""Frames of a hostile verifier: they cost the answer at most, never the conversation."""

from __future__ import annotations

import pytest

from moa_runtime.errors import MoaError
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Decided, Faulted, Sampling, SessionEvent
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.session.fixtures_pair import PRINTS, STOP, VOCAB


def asked() -> ClientSession:
    """A question waits for its connection, whose Hello is sent."""
    session = ClientSession(PRINTS, stop_tokens=[STOP], vocab_size=VOCAB)
    session.prompt([5, 6, 7], Sampling(), 20)
    session.connect()
    session.frames_to_send()
    return session


def welcomed() -> ClientSession:
    session = asked()
    told(session, welcome=welcome())
    assert session.frames_to_send()
    return session


def welcome(**fields: int) -> wire.Welcome:
    limits = wire.Limits(max_context=100, max_draft_tokens=10)
    return wire.Welcome(protocol_version=2, resume_token="token", limits=limits, **fields)


def told(session: ClientSession, **event: object) -> list[SessionEvent]:
    return session.receive(wire.ServerMessage(**event).SerializeToString())


@pytest.mark.parametrize("fields", [{"epoch": 2**64 - 1}, {"connection": 2**64 - 1}, {"epoch": 2**63}])
def test_counters_too_large_to_continue_from_are_refused(fields: dict[str, int]) -> None:
    session = asked()
    [refused] = told(session, welcome=welcome(**fields))
    assert isinstance(refused, Faulted) and "the server counts" in refused.text and not refused.retry_after_ms
    session.disconnected()
    session.connect()
    told(session, welcome=welcome(epoch=1))
    assert len(session.frames_to_send()) == 2
    ClientSession.restore(session.snapshot(), PRINTS, stop_tokens=[STOP])


def test_endless_out_of_sync_faults_are_reported() -> None:
    session, lacks = welcomed(), wire.Fault(code=wire.FAULT_CODE_OUT_OF_SYNC, text="position 3 was named")
    sent, said = 0, []
    for _ in range(50):
        said += told(session, fault=lacks)
        sent += len(session.frames_to_send())
    assert sent == 8
    assert {type(event) for event in said} == {Faulted} and "position 3 was named" in said[0].text


def test_a_verdict_resets_the_count_of_out_of_sync_faults() -> None:
    session, lacks = welcomed(), wire.Fault(code=wire.FAULT_CODE_OUT_OF_SYNC, text="no answer runs")
    for length in range(3, 15):
        assert not any(isinstance(event, Faulted) for event in told(session, fault=lacks))
        prompt = wire.ClientMessage.FromString(session.frames_to_send()[-1]).prompt
        told(session, verdict=wire.Verdict(epoch=prompt.epoch, base_len=length, tokens=[1]))
        assert len(session.committed) == length + 1 and session.propose()


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    session = welcomed()
    [refused] = told(session, verdict=wire.Verdict(epoch=2, base_len=3, tokens=[1, VOCAB]))
    assert isinstance(refused, Faulted) and f"token {VOCAB} of a vocabulary of {VOCAB}" in refused.text
    assert session.committed == []


@pytest.mark.parametrize(("said", "heard"), [(0, 1), (1, 1), (8, 8), (2**32 - 1, 2**32 - 1)])
def test_at_least_one_conversation_shares_the_target(said: int, heard: int) -> None:
    [decided, _] = told(welcomed(), verdict=wire.Verdict(epoch=2, base_len=3, tokens=[1], sharing=said))
    assert isinstance(decided, Decided) and decided.sharing == heard


def test_a_snapshot_with_a_token_outside_the_vocabulary_is_refused() -> None:
    snapshot = asked().snapshot() | {"supplied": [5, VOCAB, 7]}
    with pytest.raises(MoaError, match=f"supplied must be token ids, whole numbers from 0 to {VOCAB - 1}, not {VOCAB}"):
        ClientSession.restore(snapshot, PRINTS, stop_tokens=[STOP], vocab_size=VOCAB)
