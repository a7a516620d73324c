"""Single steps of the protocol, spelled out.

The recorded vectors hold each step of the client (``tests/vectors``), the property machine holds both ends under all
schedules. Here are examples, what the verifier's end answers, and what a step costs.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest

from moa_runtime.errors import MoaError
from moa_runtime.manifest import Fingerprints
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import (
    AnswerSampling,
    Cause,
    Decided,
    Faulted,
    Grammar,
    GrammarState,
    Origin,
    RowsReceived,
    Sampling,
    TokenLogprobs,
)
from moa_runtime.session.handshake import PROTOCOL_VERSION, Limits, check_hello, digest
from moa_runtime.session.memory_rows import RowsError, decode_rows, encode_rows
from moa_runtime.session.server import RowsWork, ServerSession, Verify
from moa_runtime.session.snapshot import SnapshotError, sampling_from_json
from moa_runtime.session.tree import TreeError, accepted_path, chain, check_parents, depths
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.session.fixtures_pair import LIMITS, VOCAB, Pair, choice, decode, rows_of

PROMPT = [5, 6, 7]


def connected() -> Pair:
    pair = Pair()
    pair.connect()
    pair.settle()
    return pair


def asked(max_new_tokens: int = 0) -> Pair:
    """A connected pair whose prompt is on its way."""
    pair = connected()
    pair.client.prompt(PROMPT, Sampling(), max_new_tokens)
    return pair


def answered() -> Pair:
    """A connected pair that has its first answer token."""
    pair = asked()
    pair.settle()
    return pair


def server_session() -> ServerSession:
    return ServerSession(LIMITS, VOCAB, [0])


def receive(session: ServerSession, **event: object) -> Verify | wire.ServerMessage | None:
    return session.receive(wire.ClientMessage(**event))


def fault_of(answer: Verify | wire.ServerMessage | None) -> wire.Fault:
    assert isinstance(answer, wire.ServerMessage) and answer.HasField("fault")
    return answer.fault


# -- prompts, drafts and verdicts ------------------------------------------------------------------


def test_offline_text_is_verified_in_one_pass() -> None:
    pair = answered()
    pair.cut()
    pair.write(9, right=True, origin=Origin.OFFLINE)
    passes = pair.server.passes
    pair.connect()
    pair.settle()
    assert pair.server.passes == passes + 1
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 11)
    assert pair.told[-1].origins.count(Origin.OFFLINE) == 9  # type: ignore[union-attr]


def test_a_restarted_server_gets_the_tokens_and_sends_no_row_twice() -> None:
    pair = answered()
    rows = pair.client.rows
    pair.cut()
    pair.server.restart(LIMITS)
    pair.connect()
    pair.deliver_up()
    pair.deliver_down()
    prompt = wire.ClientMessage.FromString(pair.up[-1]).prompt
    assert prompt.base_len == 0 and list(prompt.tokens) == pair.client.committed and prompt.rows_from == rows
    pair.settle()
    assert pair.client.rows == len(pair.client.committed) - 1


def test_a_late_fault_does_not_apply_to_the_next_prompt() -> None:
    """A Prompt that was sent again is refused twice, and the client may have asked something else between the two."""
    pair = connected()
    pair.client.prompt([1] * LIMITS.max_context, Sampling())
    pair.flush()
    pair.up.append(pair.up[0])
    pair.deliver_up()
    pair.deliver_up()
    pair.deliver_down()
    [full] = [event for event in pair.events if isinstance(event, Faulted)]
    assert full.code == "CONTEXT_FULL" and str(LIMITS.max_context) in full.text
    pair.events.clear()
    pair.client.cancel()
    pair.client.prompt(PROMPT, Sampling())
    pair.settle()
    assert not any(isinstance(event, Faulted) for event in pair.events)
    assert pair.client.committed == [*PROMPT, choice(PROMPT)]


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ({"prompt": wire.Prompt(epoch=9, base_len=1, tokens=[VOCAB])}, "PROTOCOL"),
        ({"prompt": wire.Prompt(epoch=9, base_len=1)}, "PROTOCOL"),
        ({"draft": wire.Draft(epoch=1, base_len=4, tokens=[1, 2], parents=[0])}, "PROTOCOL"),
        ({"draft": wire.Draft(epoch=1, base_len=4, tokens=[1, 2], parents=[0, 2])}, "PROTOCOL"),
        ({"draft": wire.Draft(epoch=1, base_len=4, tokens=[VOCAB])}, "PROTOCOL"),
        ({"draft": wire.Draft(epoch=1, base_len=4, tokens=[1, 2], confidences=b"1")}, "PROTOCOL"),
        ({"draft": wire.Draft(epoch=1, base_len=4, tokens=[1] * 17)}, "TOO_LARGE"),
        ({"draft": wire.Draft(epoch=9, base_len=4)}, "OUT_OF_SYNC"),
    ],
)
def test_invalid_frames_are_faults_and_change_nothing(frame: dict[str, object], code: str) -> None:
    session = answered().server.session
    before = list(session.committed)
    refused = fault_of(receive(session, **frame))
    assert wire.FaultCode.Name(refused.code) == f"FAULT_CODE_{code}" and refused.text
    assert session.committed == before


def test_a_verifier_of_chains_refuses_trees() -> None:
    pair = answered()
    pair.server.session.limits = Limits(max_context=96, max_draft_tokens=16, trees=False)
    tree = wire.Draft(epoch=1, base_len=len(pair.client.committed), tokens=[1, 2], parents=[0, 0])
    assert fault_of(receive(pair.server.session, draft=tree)).code == wire.FAULT_CODE_PROTOCOL


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (wire.Sampling(presence_penalty=2.5), "presence_penalty"),
        (wire.Sampling(frequency_penalty=math.nan), "frequency_penalty"),
        (wire.Sampling(repetition_penalty=-1.2), "repetition_penalty"),
        (wire.Sampling(repetition_penalty=11), "repetition_penalty"),
        (wire.Sampling(logit_bias={3: 101}), "3, 101"),
        (wire.Sampling(logit_bias={1 << 31: 1}), str(1 << 31)),
        (wire.Sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "1025"),
        (wire.Sampling(logprobs=21), "21"),
        (wire.Sampling(temperature=math.nan), "nan"),
        (wire.Sampling(temperature=-1), "-1.0"),
        (wire.Sampling(temperature=math.inf), "inf"),
        (wire.Sampling(temperature=1, top_p=math.nan), "top_p"),
        (wire.Sampling(temperature=1, top_p=-1), "top_p"),
        (wire.Sampling(temperature=1, min_p=math.nan), "min_p"),
    ],
)
def test_sampling_that_is_unsupported_or_out_of_range_is_refused(sampling: wire.Sampling, named: str) -> None:
    session = server_session()
    refused = fault_of(receive(session, prompt=wire.Prompt(epoch=1, tokens=PROMPT, sampling=sampling)))
    assert refused.code == wire.FAULT_CODE_PROTOCOL and named in refused.text and not session.committed


PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25}
ALL_FIELDS = Sampling(
    0.5, 0.75, 7, 40, 0.125, **PENALTIES, logit_bias=((2, 1.5), (5, -100.0)), min_tokens=3, logprobs=3
)
WITH_GRAMMAR = replace(ALL_FIELDS, grammar=Grammar("regex", "a+"))


def test_all_fields_of_a_sampling_reach_the_engine_after_a_prompt_a_replay_and_a_continued_answer() -> None:
    """So does the position from which they count; a restored session has them, too."""
    pair = connected()
    pair.client.prompt(PROMPT, ALL_FIELDS)
    expected = AnswerSampling(**vars(ALL_FIELDS), answer_from=len(PROMPT))
    for _ in range(2):
        pair.flush()
        pair.deliver_up()
        work = pair.server.session.next_background_work()
        assert work is not None and work.sampling == expected
        pair.settle()
        snapshot = json.loads(json.dumps(pair.client.snapshot()))
        assert ClientSession.restore(snapshot, pair.client.fingerprints, stop_tokens=[]).sampling == ALL_FIELDS
        pair.client.cancel()
        pair.settle()
        pair.client.continue_answer([], len(PROMPT), ALL_FIELDS)


class _Letters:
    """A grammar of tokens from 5 on."""

    def __init__(self, limit: str = "") -> None:
        self.limit = limit

    def accepts(self, answer: Sequence[int]) -> bool:
        return all(token >= 5 for token in answer)

    def problem(self, answer: Sequence[int]) -> str:
        return self.limit


def grammar_prompt(kind: int, text: str = "", tokens: Sequence[int] = PROMPT, answer_from: int = 0) -> wire.Prompt:
    grammar = wire.Grammar(kind=kind, text=text)
    return wire.Prompt(epoch=1, tokens=tokens, sampling=wire.Sampling(grammar=grammar), answer_from=answer_from)


@pytest.mark.parametrize(
    ("prompt", "grammar"),
    [
        (grammar_prompt(wire.GRAMMAR_KIND_REGEX), None),
        (grammar_prompt(0), None),
        (grammar_prompt(9), None),
        (grammar_prompt(wire.GRAMMAR_KIND_LARK, "bad"), MoaError("bad", code="invalid_grammar")),
        (grammar_prompt(wire.GRAMMAR_KIND_LARK, tokens=[5, 6, 1], answer_from=1), _Letters()),
    ],
)
def test_a_grammar_that_cannot_be_served_is_refused(prompt: wire.Prompt, grammar: GrammarState | None) -> None:
    session = ServerSession(LIMITS, VOCAB, [])
    refused = session.receive(wire.ClientMessage(prompt=prompt), grammar)
    assert fault_of(refused).code == wire.FAULT_CODE_PROTOCOL and not session.committed


def test_an_answer_so_far_that_meets_a_limit_is_refused_with_it() -> None:
    prompt = grammar_prompt(wire.GRAMMAR_KIND_LARK, tokens=[5, 6, 1], answer_from=1)
    refused = ServerSession(LIMITS, VOCAB, []).receive(wire.ClientMessage(prompt=prompt), _Letters("too long"))
    assert fault_of(refused).text.endswith(": too long")


def test_forced_tokens_are_committed_at_once_and_their_rows_follow_with_the_next_pass() -> None:
    session = ServerSession(LIMITS, VOCAB, [])
    session.greet(wire.Hello(row_encoding=wire.ROW_ENCODING_FLOAT16), "token")
    prompt = wire.ClientMessage(prompt=grammar_prompt(wire.GRAMMAR_KIND_REGEX, "a"))
    work = session.receive(prompt, _Letters())  # type: ignore[arg-type]
    assert isinstance(work, Verify)
    verdict = session.decide(work, [], 8, forced=[9, 10]).verdict
    assert list(verdict.tokens) == [8, 9, 10] and verdict.accepted == 0 and session.committed == [*PROMPT, 8, 9, 10]
    assert verdict.rows_until == 3 and session.next_work() == RowsWork(tuple(PROMPT), 0)
    draft = wire.Draft(epoch=1, base_len=6, tokens=[11])
    work = session.receive(wire.ClientMessage(draft=draft))
    assert isinstance(work, Verify) and work.prefix == (*PROMPT, 8, 9, 10)
    assert session.decide(work, [0], 12).verdict.rows_until == 7


def test_a_verdict_that_is_sent_again_has_the_logprobs_that_are_still_known() -> None:
    session = ServerSession(replace(LIMITS, max_context=4000), VOCAB, [0])
    prompt = wire.Prompt(epoch=1, tokens=PROMPT, sampling=wire.Sampling(logprobs=1))
    work, sent = receive(session, prompt=prompt), []
    for number in range(1100):
        assert isinstance(work, Verify) and work.sampling.logprobs == 1
        known = [TokenLogprobs(-float(number), (3,), (-0.5,))] if number else []  # an engine may give none
        sent += session.decide(work, [], 1, logprobs=known, sent=number < 50).verdict.logprobs
        work = receive(session, draft=wire.Draft(epoch=1, base_len=len(session.committed)))
    again = receive(session, draft=wire.Draft(epoch=1, base_len=len(PROMPT)))
    assert isinstance(again, wire.ServerMessage) and len(again.verdict.logprobs) == 1100
    assert [each.HasField("logprob") for each in again.verdict.logprobs] == [False] * 76 + [True] * 1024
    assert list(again.verdict.logprobs)[76:] == sent[76:] and not sent[0].HasField("logprob")


@pytest.mark.parametrize(
    "logprobs",
    [
        [{"logprob": -1}] * 2,
        [{"logprob": 0.5}],
        [{"logprob": math.nan}],
        [{"logprob": -1, "top_tokens": [VOCAB], "top_logprobs": [-1]}],
        [{"logprob": -1, "top_tokens": [1], "top_logprobs": []}],
        [{"logprob": -1, "top_tokens": [1] * 21, "top_logprobs": [-1] * 21}],
    ],
)
def test_a_verdict_with_broken_logprobs_is_a_fault(logprobs: list[dict[str, object]]) -> None:
    for wanted, broken in ((1, True), (None, False)):
        pair = connected()
        pair.client._vocab_size = VOCAB
        pair.client.prompt(PROMPT, Sampling(logprobs=wanted))
        verdict = wire.Verdict(epoch=pair.client._outgoing.epoch, base_len=len(PROMPT), tokens=[1])
        verdict.logprobs.extend(wire.TokenLogprobs(**each) for each in logprobs)  # type: ignore[arg-type]
        events = pair.client.receive(wire.ServerMessage(verdict=verdict).SerializeToString())
        assert isinstance(events[0], Faulted) == broken


def test_text_of_the_device_is_kept_only_if_it_is_known_to_conform() -> None:
    client = connected().client
    client.prompt(PROMPT, WITH_GRAMMAR)
    assert client.keepable([6, 7], len(PROMPT)) == []
    client.grammar = _Letters()  # type: ignore[assignment]
    client.extend([8], Origin.OFFLINE)
    assert client.keepable([6, 7], len(PROMPT)) == [6, 7] and client.keepable([6, 4], len(PROMPT)) == []


def test_a_snapshot_has_penalties_and_biases_only_if_there_are_any() -> None:
    assert set(connected().client.snapshot()["sampling"]) == {"temperature", "top_p", "seed", "top_k", "min_p"}
    for sampling in (ALL_FIELDS, WITH_GRAMMAR):
        assert sampling_from_json(asdict(sampling)) == sampling_from_json(sampling.to_json()) == sampling
    for broken in (
        {"logit_bias": [[1]]},
        {"logit_bias": [[1, 200]]},
        {"presence_penalty": "1"},
        {"min_tokens": -1},
        {"grammar": {"kind": "x", "text": ""}},
    ):
        with pytest.raises(SnapshotError):
            sampling_from_json(ALL_FIELDS.to_json() | broken)


# -- credit ----------------------------------------------------------------------------------------


def test_credit_sent_with_the_prompt_costs_no_round_trip() -> None:
    pair = asked(8)
    pair.client.grant_credit(100)
    pair.settle()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 8)
    assert not pair.client.answering and pair.client.credit == 0 and not pair.server.session.pushes
    causes = [event.cause for event in pair.events if isinstance(event, Decided)]
    assert causes == [Cause.ASKED] + [Cause.PUSHED] * 7 and pair.server.passes == 8


# -- unsolicited drafts ----------------------------------------------------------------------------


def streaming() -> ServerSession:
    """A server session that has decided 4 after ``PROMPT`` and was sent an unsolicited 5(6, 8(9)) after it."""
    session = server_session()
    session.greet(wire.Hello(row_encoding=wire.ROW_ENCODING_INT8), "resume")
    work = receive(session, prompt=wire.Prompt(epoch=1, tokens=PROMPT, max_length=12))
    assert isinstance(work, Verify)
    session.decide(work, [], 4)
    receive(session, credit=wire.Credit(epoch=1, position=90, serial=1))
    suggest(session)
    return session


def suggest(session: ServerSession, **draft: object) -> None:
    tree = {"epoch": 1, "base_len": 4, "tokens": [5, 6, 8, 9], "parents": [0, 1, 1, 3], "stamp": 7, "unsolicited": True}
    assert receive(session, draft=wire.Draft(**tree | {"confidences": bytes([0, 8, 16, 255])} | draft)) is None


def pushed(session: ServerSession, *tokens: int) -> wire.Verdict:
    """The verdict that commits ``tokens``, the last of which is the target's own; its rows are made with it."""
    work = session.next_work()
    assert isinstance(work, Verify) and work.pushed
    path = list(range(len(tokens) - 1))
    work = replace(work, draft=tokens[:-1], parents=tuple(path))
    verdict = session.decide(work, path, tokens[-1], draft_stamp=7 if path else 0).verdict
    if work.rows_from is not None:
        rows = np.zeros((len(session.committed) - 1 - work.rows_from, 1, 1), np.float32)
        session.add_rows(work.rows_from, rows, rows)
    return verdict


@pytest.mark.parametrize(
    ("committed", "tokens", "parents", "confidences"),
    [
        ((), (5, 6, 8, 9), (0, 1, 1, 3), (0, 8, 16, 255)),
        ((5,), (6, 8, 9), (0, 0, 2), (8, 16, 255)),
        ((5, 8), (9,), (0,), (255,)),
        ((5, 6), (), (), ()),
        ((5, 7), (), (), ()),
        ((6,), (), (), ()),
        ((5, 8, 9, 1), (), (), ()),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_what_was_committed_since_is_taken_off_a_draft(
    at_once: bool,
    committed: tuple[int, ...],
    tokens: tuple[int, ...],
    parents: tuple[int, ...],
    confidences: tuple[int, ...],
) -> None:
    session = streaming()
    for part in [committed] if at_once and committed else [(token,) for token in committed]:
        pushed(session, *part)
        session.newest_draft()
    found = session.newest_draft()
    if not tokens:
        assert found is None
        return
    assert found is not None and (found.tokens, found.parents, found.stamp) == (tokens, parents, 7)
    assert found.confidences == pytest.approx([math.exp(-each / 16) for each in confidences])


@pytest.mark.parametrize(
    "draft",
    [
        {"epoch": 0},
        {"epoch": 2},
        {"base_len": 2},
        {"base_len": 5},
        {"tokens": [5, VOCAB, 8, 9]},
        {"tokens": [1] * 17, "parents": [], "confidences": b""},
        {"parents": [0, 1]},
        {"parents": [0, 3, 1, 1]},
        {"confidences": b"123"},
    ],
    ids=str,
)
def test_an_unsolicited_draft_that_cannot_be_verified_is_dropped(draft: dict[str, object]) -> None:
    session = streaming()
    suggest(session, stamp=8, **draft)
    kept = session.newest_draft()
    assert kept is not None and kept.stamp == 7
    suggest(session, stamp=9, tokens=[3], parents=[], confidences=b"")
    kept = session.newest_draft()
    assert kept is not None and (kept.tokens, kept.confidences, kept.stamp) == ((3,), None, 9)


def test_an_unsolicited_draft_is_forgotten_with_its_epoch_and_its_connection() -> None:
    hello = wire.Hello(resume=wire.Resume(epoch=1, marks=[wire.Mark(length=4, digest=digest([*PROMPT, 4]))]))
    for message in (
        {"prompt": wire.Prompt(epoch=2, base_len=4, tokens=[1])},
        {"cancel": wire.Cancel(epoch=1, base_len=4)},
        {},
    ):
        session = streaming()
        if message:
            receive(session, **message)
        else:
            session.greet(hello, "resume")
        assert session.newest_draft() is None


def test_a_draft_is_cut_to_the_room_of_the_answer() -> None:
    """The answer ends at 12: of the last token the draft proposes nothing, for the target chooses it anyway."""
    session = streaming()
    pushed(session, *[1] * 5)
    suggest(session, base_len=9)
    found = session.newest_draft()
    assert found is not None and (found.tokens, found.parents) == ((5, 6, 8), (0, 1, 1))
    pushed(session, 5)
    pushed(session, 8)
    assert session.newest_draft() is None


def test_rows_follow_each_verdict_while_unsolicited_drafts_arrive() -> None:
    session = streaming()
    verdict = pushed(session, 5, 8, 1)
    assert (verdict.rows_until, verdict.drafted, verdict.accepted, verdict.draft_stamp) == (6, 2, 2, 7)
    assert (rows := session.take_rows()) is not None and (rows.rows.start, rows.rows.count) == (0, 6)
    assert session.take_rows() is None
    session._max_length = 0
    for length in range(7, 36):
        assert pushed(session, 1).rows_until == length
        assert session.take_rows() is not None
    assert pushed(session, 1).rows_until == 0  # the last draft began 33 tokens back
    work = session.next_work()
    assert isinstance(work, Verify) and work.rows_from is None


def test_a_verdict_on_a_part_of_a_draft_says_so() -> None:
    session = streaming()
    receive(session, credit=wire.Credit(epoch=1, position=0, serial=2))
    work = receive(session, draft=wire.Draft(epoch=1, base_len=4, tokens=[5, 6], stamp=8, confidences=b"\0\x10"))
    assert isinstance(work, Verify) and work.stamp == 8 and work.confidences == (1.0, math.exp(-1))
    verdict = session.decide(replace(work, draft=(5,), parents=(0,)), [], 3, draft_stamp=work.stamp).verdict
    assert (verdict.drafted, verdict.draft_stamp, verdict.pushed) == (1, 8, False)


# -- memory rows -----------------------------------------------------------------------------------


def test_few_rows_follow_each_pushed_verdict() -> None:
    """Of a long prompt: text never waits for more than sixteen rows."""
    pair = connected()
    pair.client.prompt([1 + at % 12 for at in range(40)], Sampling(), 40)
    pair.client.grant_credit(100)
    pair.settle()
    verdicts = [at for at, event in enumerate(pair.events) if isinstance(event, Decided)]
    for before, after in itertools.pairwise(verdicts):
        assert sum(len(event.keys) for event in pair.events[before:after] if isinstance(event, RowsReceived)) <= 16
    assert pair.client.rows == len(pair.client.committed) - 1
    assert pair.rows == rows_of(pair.client.committed[:-1])


@pytest.mark.parametrize(("round_trip_us", "most"), [(50_000, 16), (500_000, 2)])
def test_rows_of_a_prompt_do_not_delay_text_if_drafts_come_too_late(round_trip_us: int, most: int) -> None:
    """A token takes 10 ms."""
    session = ServerSession(Limits(512, 16), VOCAB, [0])
    session.greet(wire.Hello(row_encoding=wire.ROW_ENCODING_INT8), "resume")
    work = receive(session, prompt=wire.Prompt(epoch=1, tokens=[1] * 200))
    receive(session, credit=wire.Credit(epoch=1, position=400, serial=1, round_trip_us=round_trip_us))
    counts, made = [], 0
    for _ in range(20):
        assert isinstance(work, Verify)
        session.decide(work, [], 1, 10_000)
        while isinstance(work := session.next_work(), RowsWork):
            rows = np.zeros((len(work.prefix) - work.start, 1, 1), np.float32)
            session.add_rows(work.start, rows, rows)
            made += len(rows)
        rows_frame = session.take_rows()
        counts.append(0 if rows_frame is None else rows_frame.rows.count)
    assert max(counts[2:]) == most and made - sum(counts) < 64 + 16, "none are made long before they are sent"


def test_missing_rows_of_a_long_prompt_do_not_delay_verdicts_although_drafts_arrive() -> None:
    """A piece of work asks for 64 rows at most: for more, the engine would make rows alone, step after step."""
    session = ServerSession(Limits(512, 16), VOCAB, [0])
    session.greet(wire.Hello(row_encoding=wire.ROW_ENCODING_INT8), "resume")
    work = receive(session, prompt=wire.Prompt(epoch=1, tokens=[1] * 200))
    assert isinstance(work, Verify)
    session.decide(work, [], 1)
    receive(session, credit=wire.Credit(epoch=1, position=400, serial=1))
    with_verdict = 0
    for _ in range(40):
        draft = wire.Draft(epoch=1, base_len=len(session.committed), tokens=[2], unsolicited=True)
        assert receive(session, draft=draft) is None
        alone = 0
        while isinstance(work := session.next_work(), RowsWork):
            alone += 1
            rows = np.zeros((len(work.prefix) - work.start, 1, 1), np.float32)
            session.add_rows(work.start, rows, rows)
        assert isinstance(work, Verify) and alone <= 1
        session.decide(work, [], 1)
        if work.rows_from is not None:
            rows = np.zeros((len(work.prefix) - work.rows_from, 1, 1), np.float32)
            assert 0 < len(rows) <= 64 + 1
            session.add_rows(work.rows_from, rows, rows)
            with_verdict += 1
        while session.take_rows() is not None:
            pass
    assert with_verdict > 20


def test_rows_are_sent_once_on_a_connection() -> None:
    pair = answered()
    session = pair.server.session
    for _ in range(4):
        reached = len(session.committed)
        draft = wire.ClientMessage(draft=wire.Draft(epoch=1, base_len=reached, tokens=[1])).SerializeToString()
        verdict, rows = map(wire.ServerMessage.FromString, pair.server.receive(draft, "resume"))
        assert rows.rows.start == reached - 1 and verdict.verdict.rows_until == len(session.committed) - 1
        assert len(pair.server.receive(draft, "resume")) == 1  # the verdict alone
    reached = len(session.committed)
    mark = wire.Mark(length=reached, digest=digest(session.committed))
    for held, start in ((2, 2), (0, 0), (10**9, reached)):  # the number that a client holds on a new connection
        hello = wire.Hello(resume=wire.Resume(marks=[mark], rows=held), row_encoding=wire.ROW_ENCODING_INT8)
        session.greet(hello, "resume")
        work = receive(session, draft=wire.Draft(epoch=1, base_len=reached))
        assert isinstance(work, Verify) and work.rows_from == start


@pytest.mark.parametrize("rows_from", [40, 2**64 - 1])
def test_rows_from_beyond_the_conversation_are_ignored(rows_from: int) -> None:
    session = answered().server.session
    work = receive(session, prompt=wire.Prompt(epoch=8, base_len=0, tokens=[1, 2, 3], rows_from=rows_from))
    assert isinstance(work, Verify) and work.rows_from is None
    session.decide(work, [], 5)
    assert session.next_work() is None and not session.rows_due


def test_disabled_rows_are_not_due() -> None:
    session = server_session()
    session.greet(wire.Hello(row_encoding=wire.ROW_ENCODING_INT8), "resume")
    work = receive(session, prompt=wire.Prompt(epoch=1, tokens=PROMPT))
    assert isinstance(work, Verify)
    assert session.decide(work, [], 4).verdict.rows_until == 3
    assert isinstance(session.next_work(), RowsWork)
    session.disable_rows()
    assert session.next_work() is None and not session.rows_due


@pytest.mark.parametrize(
    ("encoding", "tolerance"), [(wire.ROW_ENCODING_INT8, 1 / 127), (wire.ROW_ENCODING_FLOAT16, 1e-3)]
)
def test_rows_are_encoded_and_decoded(encoding: int, tolerance: float) -> None:
    keys, values = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32) * 20
    values[2] = 0
    for got, sent in zip(decode_rows(encode_rows(7, keys, values, encoding)), (keys, values), strict=True):
        assert got.shape == sent.shape
        peak = np.abs(sent).max(axis=-1, keepdims=True)
        assert (np.abs(got - sent) <= tolerance * peak + 1e-6).all()


def test_the_documented_row_example() -> None:
    keys = np.array([[[0.0, 127.0]]], np.float32)
    rows = encode_rows(0, keys, keys, wire.ROW_ENCODING_INT8)
    assert rows.data == b"\x00\x7f\x00\x7f"
    assert np.frombuffer(rows.scales, "<f2").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("encoding", [wire.ROW_ENCODING_INT8, wire.ROW_ENCODING_FLOAT16])
def test_values_that_are_not_finite_are_clipped_or_refused(encoding: int) -> None:
    keys = np.array([[[np.nan, np.inf, -1e30, 2.0]]], np.float32)
    (got,), _ = decode_rows(encode_rows(0, keys, keys, encoding))
    assert got.tolist()[0] == pytest.approx([0.0, 65504.0, -65504.0, 2.0], rel=0.01, abs=2.0)
    rows = encode_rows(0, keys, keys, encoding)
    name = "scales" if rows.scales else "data"
    setattr(rows, name, np.full(len(getattr(rows, name)) // 2, np.nan, "<f2").tobytes())
    with pytest.raises(RowsError, match="not finite"):
        decode_rows(rows)


# -- hello, digests and trees ----------------------------------------------------------------------


def hello(**fields: object) -> wire.Hello:
    prints = wire.Fingerprints(target="aaaa", tokenizer="t", drafter="dddd")
    row_encoding = "ROW_ENCODING_INT8"
    return wire.Hello(**{"protocol_version": 2, "fingerprints": prints, "row_encoding": row_encoding} | fields)


@pytest.mark.parametrize(
    ("served", "named"),
    [
        (("bbbb", "t", "dddd"), ("aaaa", "bbbb")),
        (("aaaa", "t", "eeee"), ("dddd", "eeee", "moa-serve", "--drafter sssd")),
        (("aaaa", "t", ""), ("dddd", "none", "--drafter sssd")),
    ],
)
def test_a_bundle_of_another_target_or_drafter_is_refused(served: tuple[str, str, str], named: tuple[str, ...]) -> None:
    refused = check_hello(hello(), Fingerprints(*served))
    assert refused is not None and refused.fault.code == wire.FAULT_CODE_FINGERPRINT_MISMATCH
    assert all(word in refused.fault.text for word in named)


def test_without_memory_rows_any_drafter_fits() -> None:
    assert check_hello(hello(), Fingerprints("aaaa", "t", "dddd")) is None
    assert check_hello(hello(row_encoding="ROW_ENCODING_UNSPECIFIED"), Fingerprints("aaaa", "t", "eeee")) is None


@pytest.mark.parametrize(
    ("oldest", "newest", "named"), [(1, 0, "version 1"), (1, 3, ""), (PROTOCOL_VERSION, 0, ""), (3, 4, "3 to 4")]
)
def test_ends_without_a_common_version_are_refused(oldest: int, newest: int, named: str) -> None:
    """The first versions named one only."""
    answer = check_hello(hello(protocol_version=oldest, newest_version=newest), Fingerprints("aaaa", "t", "dddd"))
    assert (answer is None) is not bool(named)
    if answer is not None:
        assert answer.fault.code == wire.FAULT_CODE_VERSION_MISMATCH
        assert named in answer.fault.text and f"version {PROTOCOL_VERSION}" in answer.fault.text


def test_the_documented_digest() -> None:
    assert digest([1, 2]) == 58791804 == zlib.crc32(b"\x01\0\0\0\x02\0\0\0")


def test_a_tree_is_walked_along_the_targets_choices() -> None:
    tokens, parents = [10, 11, 12, 13], [0, 1, 1, 3]  # 10(11, 12(13))
    assert depths(parents) == [1, 2, 2, 3]
    assert accepted_path(tokens, parents, [10, 12, 0, 13, 99]) == [0, 2, 3]
    assert accepted_path(tokens, parents, [10, 11, 5, 0, 0]) == [0, 1]
    assert accepted_path(tokens, parents, [9, 11, 5, 0, 0]) == []
    assert check_parents([], 3) == [0, 1, 2]
    with pytest.raises(TreeError):
        check_parents([0, 5], 2)


def test_a_walk_reads_each_token_once() -> None:
    """A draft that is known already costs the verifier no forward: a thousand tokens of it must not hold up others."""
    right = list(range(1, 1001))
    tokens = iter(right)
    assert accepted_path(tokens, chain(1000), [*right, 7]) == list(range(1000))  # type: ignore[arg-type]
