"""Credit: the server pushes verdicts up to a position, until the credit is revoked."""

from __future__ import annotations

import itertools
import math

import pytest

from moa_runtime.session.client import LinkState, LocalProtocolError
from moa_runtime.session.events import Cause, Committed, Decided, Faulted, Finished, Origin, RowsReceived, Sampling
from moa_runtime.session.server import RowsWork, ServerSession, Verify
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.session.fixtures_pair import LIMITS, VOCAB, Pair, choice, decode, rows_of, wrong

PROMPT = [5, 6, 7]


def connected() -> Pair:
    pair = Pair()
    pair.connect()
    pair.settle()
    return pair


def asked(limit: int = 40) -> Pair:
    """A prompt is on its way, nothing of it has arrived."""
    pair = connected()
    pair.client.prompt(PROMPT, Sampling(), limit)
    return pair


def frames(pair: Pair) -> list[wire.ServerMessage]:
    return [wire.ServerMessage.FromString(frame) for frame in pair.down]


def test_credit_sent_with_the_prompt_costs_no_round_trip() -> None:
    pair = asked(8)
    pair.client.grant_credit(100)
    assert pair.client.credit_open and pair.client.awaiting_prefill and not pair.client.may_propose
    pair.settle()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 8)
    assert not pair.client.answering and pair.client.credit == 0
    causes = [event.cause for event in pair.events if isinstance(event, Decided)]
    assert causes == [Cause.ASKED] + [Cause.PUSHED] * 7
    # A prompt and a credit went up, nothing else.
    assert pair.server.passes == 8


def test_the_server_stops_at_the_position_and_the_device_drafts() -> None:
    pair = asked()
    pair.client.grant_credit(len(PROMPT) + 5)
    pair.settle()
    assert len(pair.client.committed) == len(PROMPT) + 5 == len(pair.server.session.committed)
    assert pair.client.may_propose and not pair.client.awaiting_verdict
    pair.write(3, right=True)
    assert pair.client.propose()
    pair.settle()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 9)


def test_verdicts_in_flight_at_a_revocation_are_committed() -> None:
    pair = asked()
    pair.client.grant_credit(100)
    pair.flush()
    pair.deliver_up()
    pair.deliver_up()
    pair.push()
    pair.push()
    pair.client.revoke_credit()
    pair.flush()
    assert not pair.client.may_propose and pair.client.awaiting_verdict  # until CreditRevoked arrives
    pair.deliver_down()
    assert len(pair.client.committed) == len(PROMPT) + 1 and not pair.client.may_propose
    passes = pair.server.passes
    pair.settle()
    assert pair.client.may_propose and pair.server.passes == passes
    assert pair.client.committed == pair.server.session.committed == decode(PROMPT, len(PROMPT) + 3)


def test_an_older_credit_revoked_is_ignored() -> None:
    pair = asked()
    pair.client.grant_credit(100)
    pair.client.revoke_credit()
    pair.flush()
    for _ in range(3):
        pair.deliver_up()
    revoked = next(frame for frame in pair.down if wire.ServerMessage.FromString(frame).HasField("standing"))
    pair.down.remove(revoked)
    pair.client.revoke_credit()  # no credit is open: does nothing
    assert not pair.client.may_grant_credit  # the server may not have received it
    while pair.down:
        pair.deliver_down()
    assert not pair.client.may_propose
    pair.client.resend()
    pair.settle()
    assert pair.client.may_propose
    pair.client.grant_credit(50)
    pair.client.revoke_credit()
    pair.client.receive(revoked)  # of the first credit
    assert not pair.client.may_propose


def test_the_suffix_stays_as_far_as_pushed_verdicts_agree() -> None:
    pair = asked()
    pair.client.grant_credit(100)
    pair.flush()
    pair.deliver_up()
    pair.deliver_up()
    pair.deliver_down()
    pair.write(4, right=False)  # the verdicts are late
    for _ in range(3):
        pair.push()
    while pair.down:
        pair.deliver_down()
    assert len(pair.client.tentative) == 1
    pair.push()
    while pair.down:
        pair.deliver_down()
    assert pair.client.tentative == ()
    origins = [origin for event in pair.told if isinstance(event, Committed) for origin in event.origins]
    assert origins == [Origin.CORRECTED, *[Origin.DRAFTED] * 3, Origin.CORRECTED]


def test_tokens_drafted_by_the_server_are_committed_at_once() -> None:
    pair = asked()
    pair.client.grant_credit(100)
    pair.flush()
    pair.deliver_up()
    pair.deliver_up()
    assert pair.push(drafted=5)
    while pair.down:
        pair.deliver_down()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 7)
    decided = [event for event in pair.events if isinstance(event, Decided)][-1]
    assert (decided.cause, decided.drafted, decided.accepted) == (Cause.PUSHED, 5, 5)


def test_credit_survives_a_lost_connection() -> None:
    pair = asked()
    pair.client.grant_credit(30)
    pair.flush()
    pair.deliver_up()
    pair.deliver_up()
    pair.push()
    pair.cut()
    assert not pair.client.credit_open and pair.client.credit == 30
    pair.connect()
    pair.settle()
    assert len(pair.client.committed) == 30


def test_a_new_epoch_ends_the_credit() -> None:
    for stop in (lambda pair: pair.client.cancel(), lambda pair: pair.client.keep(len(PROMPT), [3, 4])):
        pair = asked()
        pair.client.grant_credit(30)
        pair.flush()
        pair.deliver_up()
        pair.deliver_up()
        pair.push()
        while pair.down:
            pair.deliver_down()
        stop(pair)
        assert pair.client.credit == 0 and not pair.client.credit_open
        pair.settle()
        assert not pair.server.session.pushes


def test_credit_is_granted_again_after_an_engine_failure() -> None:
    pair = asked()
    pair.client.grant_credit(20)
    pair.flush()
    pair.deliver_up()
    pair.deliver_up()
    pair.server.session.engine_failed()
    pair.settle()
    assert len(pair.client.committed) == len(PROMPT) + 1 and pair.client.credit_open
    assert pair.client.resend()
    pair.settle()
    assert len(pair.client.committed) == 20


def test_credit_calls_are_refused_in_wrong_states() -> None:
    pair = connected()
    with pytest.raises(LocalProtocolError, match="position 9: the link is up, 0 tokens are known"):
        pair.client.grant_credit(9)
    pair.client.prompt(PROMPT, Sampling())
    with pytest.raises(LocalProtocolError, match="position 3: the link is up, 3 tokens are known"):
        pair.client.grant_credit(3)
    pair.cut()
    assert pair.client.link is LinkState.DOWN and not pair.client.may_grant_credit


@pytest.mark.parametrize(
    ("epoch", "position", "answer"),
    [(0, 50, None), (1, 50, "credit"), (1, 2, "standing"), (1, 2**64 - 1, "credit"), (7, 50, "fault")],
)
def test_the_server_accepts_credit_of_its_own_epoch(epoch: int, position: int, answer: str | None) -> None:
    session = ServerSession(LIMITS, VOCAB, [0])
    work = session.receive(wire.ClientMessage(prompt=wire.Prompt(epoch=1, tokens=PROMPT)))
    assert isinstance(work, Verify)
    session.decide(work, [], 4)
    said = session.receive(wire.ClientMessage(credit=wire.Credit(epoch=epoch, position=position, serial=3)))
    if answer in ("standing", "fault"):
        assert isinstance(said, wire.ServerMessage) and said.WhichOneof("event") == answer
    else:
        assert said is None
    assert session.pushes == (answer == "credit")


def test_few_rows_follow_each_pushed_verdict() -> None:
    """Of a long prompt: text never waits for more than sixteen rows."""
    pair = connected()
    prompt = [1 + at % 12 for at in range(40)]
    pair.client.prompt(prompt, Sampling(), 40)
    pair.client.grant_credit(100)
    pair.settle()
    assert pair.client.committed == decode(prompt, 80)[: len(pair.client.committed)]
    sizes = [len(event.keys) for event in pair.events if isinstance(event, RowsReceived)]
    verdicts = [at for at, event in enumerate(pair.events) if isinstance(event, Decided)]
    for before, after in itertools.pairwise(verdicts):
        between = pair.events[before:after]
        assert sum(len(event.keys) for event in between if isinstance(event, RowsReceived)) <= 16
    assert sum(sizes) == pair.client.rows == len(pair.client.committed) - 1
    assert pair.rows == rows_of(pair.client.committed[:-1])


def test_rows_of_an_older_epoch_are_valid_up_to_its_end() -> None:
    pair = asked()
    pair.settle()
    pair.write(4, right=True)
    pair.client.propose()
    pair.flush()
    pair.deliver_up()
    verdict, rows = pair.down
    pair.down = [verdict]
    pair.deliver_down()
    pair.client.keep(len(PROMPT) + 2, [9])
    pair.forget_rows(len(PROMPT) + 2)
    pair.down = [rows]
    pair.deliver_down()
    assert pair.client.rows == len(PROMPT) + 2
    pair.settle()
    assert pair.rows == rows_of(pair.client.committed[: pair.client.rows])


def test_disabled_rows_are_not_due() -> None:
    session = ServerSession(LIMITS, VOCAB, [0])
    session.greet(wire.Hello(row_encoding=wire.ROW_ENCODING_INT8), "resume")
    work = session.receive(wire.ClientMessage(prompt=wire.Prompt(epoch=1, tokens=PROMPT)))
    assert isinstance(work, Verify)
    assert session.decide(work, [], 4).verdict.rows_until == 3
    assert isinstance(session.next_work(), RowsWork)
    session.disable_rows()
    assert session.next_work() is None and not session.rows_due


def test_a_ping_is_answered_in_every_state() -> None:
    session = ServerSession(LIMITS, VOCAB, [0])
    said = session.receive(wire.ClientMessage(ping=wire.Ping(stamp=4)))
    assert isinstance(said, wire.ServerMessage) and said.HasField("pong")


@pytest.mark.parametrize(
    ("sampling", "what"),
    [
        (wire.Sampling(grammar="root ::= x"), "grammars"),
        (wire.Sampling(presence_penalty=0.5), "penalties"),
        (wire.Sampling(repetition_penalty=1.2), "penalties"),
    ],
)
def test_unsupported_sampling_is_refused(sampling: wire.Sampling, what: str) -> None:
    session = ServerSession(LIMITS, VOCAB, [0])
    said = session.receive(wire.ClientMessage(prompt=wire.Prompt(epoch=1, tokens=PROMPT, sampling=sampling)))
    assert (
        isinstance(said, wire.ServerMessage) and said.fault.text == f"this verifier has no {what}, as its Welcome says"
    )


@pytest.mark.parametrize(
    ("sampling", "what"),
    [
        (wire.Sampling(temperature=math.nan), "a temperature is 0 or more, not nan"),
        (wire.Sampling(temperature=-1), "a temperature is 0 or more, not -1.0"),
        (wire.Sampling(temperature=math.inf), "a temperature is 0 or more, not inf"),
        (wire.Sampling(temperature=1, top_p=math.nan), "top_p is from 0 to 1, not nan"),
        (wire.Sampling(temperature=1, top_p=-1), "top_p is from 0 to 1, not -1.0"),
        (wire.Sampling(temperature=1, min_p=math.nan), "min_p is from 0 to 1, not nan"),
    ],
)
def test_invalid_sampling_is_refused(sampling: wire.Sampling, what: str) -> None:
    session = ServerSession(LIMITS, VOCAB, [0])
    said = session.receive(wire.ClientMessage(prompt=wire.Prompt(epoch=1, tokens=PROMPT, sampling=sampling)))
    assert isinstance(said, wire.ServerMessage) and said.fault.text == what
    assert said.fault.code == wire.FAULT_CODE_PROTOCOL and not session.committed


def test_top_k_and_min_p_reach_the_engine() -> None:
    pair = connected()
    sampling = Sampling(0.5, 0.75, 7, top_k=40, min_p=0.125)
    pair.client.prompt(PROMPT, sampling)
    pair.flush()
    pair.deliver_up()
    work = pair.server.session.next_background_work()
    assert work is not None and work.sampling == sampling


def test_a_late_draft_is_answered_from_pushed_tokens() -> None:
    pair = asked()
    pair.settle()
    base = len(pair.client.committed)
    pair.write(1, right=True)
    pair.client.propose()
    pair.client.grant_credit(60)
    pair.settle()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 40)[: len(pair.client.committed)]
    assert not any(isinstance(event, Faulted) for event in pair.events) and base < len(pair.client.committed)


def test_a_pushed_verdict_without_credit_is_dropped() -> None:
    pair = asked()
    pair.settle()
    before = list(pair.client.committed)
    verdict = wire.Verdict(epoch=1, base_len=len(before), tokens=[wrong(choice(before))], pushed=True)
    assert pair.client.receive(wire.ServerMessage(verdict=verdict).SerializeToString()) == []
    assert pair.client.committed == before


def test_the_answer_ends_within_the_credit() -> None:
    pair = asked(5)
    pair.client.grant_credit(1000)
    pair.settle()
    assert isinstance(pair.told[-1], Finished) and not pair.server.session.pushes
    assert pair.server.session.next_work() is None


def test_the_second_verdict_on_a_repeated_prompt_may_have_more_tokens() -> None:
    """The engine failed on a prompt, then continued for a silent client: each token is sent once."""
    pair, ends = asked(4), len(PROMPT) + 4
    pair.flush()
    assert pair.client.resend()
    for end, finish in ((ends - 2, wire.FINISH_UNSPECIFIED), (ends, wire.FINISH_LENGTH)):
        tokens = decode(PROMPT, end)[len(PROMPT) :]
        verdict = wire.Verdict(epoch=1, base_len=len(PROMPT), tokens=tokens, finish=wire.Finish.Name(finish))
        assert pair.client.answering
        pair.client.receive(wire.ServerMessage(verdict=verdict).SerializeToString())
    assert pair.client.committed == decode(PROMPT, ends) and not pair.client.answering
