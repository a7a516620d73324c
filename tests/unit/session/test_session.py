"""Single steps of the protocol, spelled out."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from moa_runtime.bundle import Fingerprints
from moa_runtime.session.client import LinkState, LocalProtocolError
from moa_runtime.session.events import Committed, Faulted, Finished, FinishReason, Origin, Policy, RolledBack, Sampling
from moa_runtime.session.handshake import PROTOCOL_VERSION, Limits, check_hello, digest
from moa_runtime.session.memory_rows import RowsError, decode_rows, encode_rows
from moa_runtime.session.server import Verify
from moa_runtime.session.tree import DraftTree, TreeError, accepted_path, chain, check_parents, depths
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.drafted import path_of
from support.session.fixtures_pair import LIMITS, STOP, VOCAB, Pair, choice, decode, rows_of, wrong

PROMPT = [5, 6, 7]
GREEDY = Sampling()


def asked(max_new_tokens: int = 0, policy: Policy = Policy.ROLLBACK) -> Pair:
    """A connected pair that has its first answer token."""
    pair = Pair(policy)
    pair.connect()
    pair.settle()
    pair.client.prompt(PROMPT, GREEDY, max_new_tokens)
    pair.settle()
    return pair


def last_frame(pair: Pair) -> wire.ClientMessage:
    return wire.ClientMessage.FromString(pair.up[-1])


def test_a_prompt_is_answered_with_one_token_and_its_rows() -> None:
    pair = asked()
    assert pair.client.committed == [*PROMPT, choice(PROMPT)]
    assert pair.client.rows == len(PROMPT)


def test_a_right_draft_is_committed_with_a_bonus_token() -> None:
    pair = asked()
    pair.write(3, right=True)
    pair.client.propose()
    pair.settle()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 5)
    committed = pair.told[-1]
    assert isinstance(committed, Committed)
    assert committed.origins == (Origin.DRAFTED,) * 3 + (Origin.CORRECTED,)
    assert pair.client.rows == len(PROMPT) + 4  # all but the bonus token's


def test_a_tree_may_be_accepted_on_another_branch() -> None:
    pair = asked()
    right = decode(PROMPT, len(PROMPT) + 4)[-3:]
    wrong = [token % (VOCAB - 1) + 1 for token in right]
    tree = DraftTree((wrong[0], right[0], wrong[1], right[1]), (0, 0, 1, 2), (-0.1, -0.9, -0.2, -1.0))
    pair.client.extend(path_of(tree), Origin.DRAFTED)
    assert pair.client.propose(tree=tree)
    pair.flush()
    sent = last_frame(pair).draft
    assert (tuple(sent.tokens), tuple(sent.parents)) == (tree.tokens, tree.parents)
    pair.settle()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 4)
    rolled_back, committed = pair.told[-2:]
    assert isinstance(rolled_back, RolledBack) and rolled_back.tokens == (wrong[0], wrong[1])
    assert isinstance(committed, Committed)
    assert committed.origins == (Origin.DRAFTED, Origin.DRAFTED, Origin.CORRECTED)


def test_a_tree_is_truncated_to_the_verifiers_limit() -> None:
    pair = asked()
    most = LIMITS.max_draft_tokens
    tree = DraftTree((VOCAB - 1,) * (most + 3), (0,) * (most + 3), (-1.0,) * (most + 3))
    pair.client.propose(tree=tree)
    (frame,) = pair.client.frames_to_send()
    draft = wire.ClientMessage.FromString(frame).draft
    assert len(draft.parents) == len(draft.tokens) == most


def test_a_wrong_token_is_rolled_back_and_corrected() -> None:
    pair = asked()
    pair.write(3, right=False)
    wrong = pair.client.tentative[-1]
    pair.client.propose()
    pair.settle()
    rolled_back, committed = pair.told[-2:]
    assert rolled_back == RolledBack(len(PROMPT) + 3, (wrong,), (Origin.DRAFTED,))
    assert isinstance(committed, Committed) and committed.origins[-1] is Origin.CORRECTED
    assert pair.client.tentative == ()


def test_tokens_drafted_ahead_of_an_agreeing_verdict_stay() -> None:
    pair = asked()
    pair.write(2, right=True)
    pair.client.propose()
    pair.write(3, right=True)
    pair.settle()
    assert len(pair.client.tentative) == 2  # of the three, one was the bonus token
    assert pair.client.tokens == decode(PROMPT, len(PROMPT) + 6)


def test_offline_text_is_verified_in_one_pass() -> None:
    pair = asked()
    pair.cut()
    pair.write(9, right=True, origin=Origin.OFFLINE)
    passes = pair.server.passes
    pair.connect()
    pair.settle()
    assert pair.server.passes == passes + 1
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 11)
    assert pair.told[-1].origins.count(Origin.OFFLINE) == 9  # type: ignore[union-attr]


def test_keep_commits_offline_tokens_that_the_target_disagrees_with() -> None:
    pair = asked(policy=Policy.KEEP)
    before = list(pair.client.committed)
    pair.cut()
    pair.write(4, right=False, origin=Origin.OFFLINE)
    kept = list(pair.client.tentative)
    assert kept[-1] != choice([*before, *kept[:-1]])
    pair.connect()
    pair.settle()
    assert pair.client.committed == [*before, *kept, choice([*before, *kept])]
    origins = [o for e in pair.events if isinstance(e, Committed) for o in e.origins]
    assert origins[-5:] == [Origin.KEPT] * 4 + [Origin.CORRECTED]


def test_keep_drops_end_of_turn_tokens() -> None:
    pair = asked(policy=Policy.KEEP)
    pair.cut()
    pair.client.extend([3, STOP], Origin.OFFLINE)
    assert pair.client.tentative_finish is not None
    pair.connect()
    pair.settle()
    assert pair.client.committed[4:6] == [3, choice([*pair.client.committed[:5]])]


def test_keep_overrules_a_late_verdict() -> None:
    pair = asked(policy=Policy.KEEP)
    before = list(pair.client.committed)
    pair.write(3, right=False)
    pair.client.propose()
    pair.write(4, right=True, origin=Origin.OFFLINE)  # nobody waits any longer
    written = list(pair.client.tentative)
    pair.settle()
    assert pair.client.committed == [*before, *written, choice([*before, *written])]
    origins = [o for e in pair.events if isinstance(e, Committed) for o in e.origins]
    assert origins[-8:] == [Origin.DRAFTED] * 2 + [Origin.KEPT] * 5 + [Origin.CORRECTED]
    assert not any(isinstance(e, RolledBack) for e in pair.events)


def test_rows_of_an_overruled_verdict_are_dropped() -> None:
    pair = asked(policy=Policy.KEEP)
    start = len(pair.client.committed)
    pair.write(3, right=False, origin=Origin.OFFLINE)
    written = pair.client.tokens
    tree = pair.tree([(2, [True, True])], by_level=False)  # what the target writes after the two right ones
    assert pair.client.propose(tree=tree)
    pair.flush()
    pair.deliver_up()
    pair.deliver_down()
    pair.deliver_down()  # the rows behind the verdict
    assert pair.client.committed == written[: start + 2] and pair.client.rows == len(pair.rows) == start + 2
    pair.settle()
    assert pair.client.committed[: start + 3] == written
    assert pair.rows == rows_of(pair.client.committed[: pair.client.rows]) and pair.client.rows == start + 3


def test_kept_tokens_leave_room_in_the_context() -> None:
    pair = asked()
    start = len(pair.client.committed)
    pair.client.keep(start, [5] * LIMITS.max_context)
    pair.settle()
    assert not any(isinstance(event, Faulted) for event in pair.events)
    assert pair.finished and len(pair.client.committed) == LIMITS.max_context


def test_kept_tokens_leave_room_in_the_answer() -> None:
    pair = asked(policy=Policy.KEEP)
    pair.cut()
    while len(pair.client.tokens) < LIMITS.max_context:
        pair.client.extend([3], Origin.OFFLINE)
    pair.connect()
    pair.settle()
    assert len(pair.client.committed) == LIMITS.max_context
    assert pair.told[-1] == Finished(FinishReason.CONTEXT)


@pytest.mark.parametrize("written", [1, 8])
def test_the_target_chooses_the_last_token_after_kept_ones(written: int) -> None:
    pair = asked(max_new_tokens=written + 1, policy=Policy.KEEP)
    before = list(pair.client.committed)
    pair.cut()
    pair.client.extend([3] * written, Origin.OFFLINE)
    assert pair.client.tentative_finish is not None
    pair.connect()
    pair.settle()
    kept = [*before, *[3] * (written - 1)]
    assert pair.client.committed == pair.server.session.committed == [*kept, choice(kept)]
    assert isinstance(pair.told[-1], Finished)


def held_at_a_welcome(policy: Policy = Policy.ROLLBACK, *, forgotten: bool = False) -> Pair:
    """A pair whose link came back with two tokens written offline, while nothing is to be asked for."""
    pair = asked(policy=policy)
    pair.cut()
    if forgotten:
        pair.server.restart(LIMITS)
    pair.write(2, right=False, origin=Origin.OFFLINE)
    pair.client.held = True
    pair.connect()
    pair.settle()
    return pair


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("forgotten", [False, True])
def test_held_requests_are_sent_by_resume(policy: Policy, forgotten: bool) -> None:
    pair = held_at_a_welcome(policy, forgotten=forgotten)
    passes, written = pair.server.passes, pair.client.tokens
    assert pair.client.link is LinkState.UP and not pair.client.awaiting_verdict
    assert pair.client.resume() == [] and not pair.client.frames_to_send()
    pair.client.held = False
    owed = forgotten or policy is Policy.KEEP
    assert pair.client.may_propose is not owed
    pair.client.resume()
    assert pair.client.awaiting_verdict is owed
    pair.client.propose()
    pair.settle()
    pair.finish()
    assert pair.finished and pair.server.passes > passes
    if policy is Policy.KEEP:
        assert pair.client.committed[: len(written)] == written
    else:
        assert pair.client.committed == decode(PROMPT, LIMITS.max_context)


def test_a_new_prompt_includes_tokens_that_were_held() -> None:
    pair = held_at_a_welcome(forgotten=True)
    pair.client.cancel()
    pair.client.prompt(PROMPT, GREEDY, 4)
    pair.settle()
    assert pair.client.awaiting_verdict is False and pair.client.resume() == []
    assert pair.server.session.committed == pair.client.committed


@pytest.mark.parametrize("online", [True, False])
def test_an_answer_after_a_rewind_is_the_same(online: bool) -> None:
    pair = asked(max_new_tokens=9)
    pair.finish()
    answer = list(pair.client.committed)
    if not online:
        pair.cut()
    pair.client.rewind(2)
    assert pair.client.committed == PROMPT[:2] and pair.client.rows == 2
    pair.client.prompt(PROMPT[2:], GREEDY, 9)
    pair.finish()
    assert pair.client.committed == pair.server.session.committed == answer


@pytest.mark.parametrize("ended", [True, False])
def test_kept_tokens_replace_those_of_the_target(ended: bool) -> None:
    pair = asked(max_new_tokens=12)
    pair.write(4, right=True)
    pair.client.propose()
    pair.settle()
    if ended:
        pair.finish()
    start = len(PROMPT) + 2
    begun = [*pair.client.committed[:start], 11, 12, 11]
    pair.client.keep(start, [11, 12, STOP, 11])
    assert pair.client.unconfirmed == ((11, Origin.KEPT), (12, Origin.KEPT), (11, Origin.KEPT))
    pair.finish()
    assert pair.client.committed == pair.server.session.committed == decode(begun, len(PROMPT) + 12)


def test_a_verdict_of_an_older_epoch_is_ignored() -> None:
    pair = asked()
    pair.write(3, right=True)
    pair.client.propose()
    pair.flush()
    pair.deliver_up()
    late = pair.down.pop()
    pair.client.cancel()
    pair.client.rewind(1)
    pair.client.prompt([9], GREEDY)
    assert pair.client.receive(late) == []
    assert pair.client.committed == PROMPT[:1]


def test_a_prompt_works_offline() -> None:
    pair = Pair()
    pair.client.prompt(PROMPT, GREEDY, 4)
    pair.write(2, right=True, origin=Origin.OFFLINE)
    pair.connect()
    pair.settle()
    pair.finish()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 4)


def test_a_restarted_server_gets_the_tokens_and_sends_no_row_twice() -> None:
    pair = asked()
    pair.write(3, right=True)
    pair.client.propose()
    pair.settle()
    rows = pair.client.rows
    pair.cut()
    pair.server.restart(LIMITS)
    pair.connect()
    pair.deliver_up()
    pair.deliver_down()
    prompt = last_frame(pair).prompt
    assert prompt.base_len == 0 and list(prompt.tokens) == pair.client.committed
    assert prompt.rows_from == rows
    pair.settle()
    assert pair.client.rows == len(pair.client.committed) - 1
    pair.finish()
    assert pair.client.committed == decode(PROMPT, 96)


def test_a_lost_verdict_is_repeated() -> None:
    pair = asked()
    pair.write(3, right=True)
    pair.client.propose()
    pair.flush()
    pair.deliver_up()
    pair.down.clear()
    pair.client.resend()
    pair.settle()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 5)


def test_an_answer_ends_at_its_length_or_its_stop_token() -> None:
    pair = asked(max_new_tokens=3)
    pair.finish()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 3)
    assert pair.told[-1] == Finished(FinishReason.LENGTH)
    pair = asked()
    pair.finish()
    reason = FinishReason.STOP if pair.client.committed[-1] == STOP else FinishReason.CONTEXT
    assert pair.told[-1] == Finished(reason)


def test_a_cancelled_answer_keeps_its_committed_tokens() -> None:
    pair = asked()
    pair.write(3, right=True)
    confirmed = list(pair.client.committed)
    assert len(pair.client.cancel()) == 1
    pair.settle()
    assert pair.client.committed == pair.server.session.committed == confirmed
    pair.client.prompt([2, 3], GREEDY, 4)
    pair.settle()
    pair.finish()
    assert pair.client.committed == decode([*confirmed, 2, 3], len(confirmed) + 6)


def test_a_prompt_beyond_the_context_is_a_fault_that_names_both_lengths() -> None:
    pair = Pair()
    pair.connect()
    pair.settle()
    pair.client.prompt([1] * 200, GREEDY)
    pair.settle()
    fault = pair.told[-1]
    assert isinstance(fault, Faulted) and fault.code == "CONTEXT_FULL"
    assert "200" in fault.text and "96" in fault.text


@pytest.mark.parametrize(
    "message",
    [
        wire.ClientMessage(prompt=wire.Prompt(epoch=9, base_len=1, tokens=[VOCAB])),
        wire.ClientMessage(prompt=wire.Prompt(epoch=9, base_len=1)),
        wire.ClientMessage(draft=wire.Draft(epoch=9, base_len=4, tokens=[1, 2], parents=[0])),
        wire.ClientMessage(draft=wire.Draft(epoch=9, base_len=4, tokens=[1, 2], parents=[0, 2])),
        wire.ClientMessage(draft=wire.Draft(epoch=9, base_len=4, tokens=[1] * 17)),
        wire.ClientMessage(draft=wire.Draft(epoch=9, base_len=400)),
        wire.ClientMessage(hello=wire.Hello()),
    ],
)
def test_invalid_frames_are_faults_and_change_nothing(message: wire.ClientMessage) -> None:
    pair = asked()
    before = list(pair.server.session.committed)
    answer = pair.server.session.receive(message)
    assert isinstance(answer, wire.ServerMessage) and answer.HasField("fault") and answer.fault.text
    assert pair.server.session.committed == before


def test_calls_in_wrong_states_raise() -> None:
    pair = asked()
    with pytest.raises(LocalProtocolError, match="while an answer is running"):
        pair.client.prompt([1], GREEDY)
    with pytest.raises(LocalProtocolError, match="while the link is up"):
        pair.client.connect()
    with pytest.raises(LocalProtocolError, match="rewind while an answer is running"):
        pair.client.rewind(0)
    with pytest.raises(LocalProtocolError, match="keep tokens from 1 on"):
        pair.client.keep(1, [2])
    with pytest.raises(LocalProtocolError, match="empty text"):
        pair.client.keep(len(PROMPT), [STOP])
    pair.client.cancel()
    with pytest.raises(LocalProtocolError, match="rewind to 99: 4 tokens"):
        pair.client.rewind(99)
    with pytest.raises(LocalProtocolError, match="no answer is running"):
        pair.client.extend([1], Origin.DRAFTED)
    assert pair.client.link is LinkState.UP


def test_a_bundle_of_another_target_is_refused_with_both_fingerprints() -> None:
    hello = wire.Hello(
        protocol_version=PROTOCOL_VERSION,
        fingerprints=wire.Fingerprints(target="aaaa", tokenizer="t", drafter="d"),
        row_encoding=wire.ROW_ENCODING_INT8,
    )
    refused = check_hello(hello, Fingerprints("bbbb", "t", "d"))
    assert refused is not None and "aaaa" in refused.fault.text and "bbbb" in refused.fault.text
    hello.fingerprints.target = "bbbb"
    assert check_hello(hello, Fingerprints("bbbb", "t", "d")) is None


def test_a_bundle_of_another_drafter_is_refused_with_advice() -> None:
    hello = wire.Hello(
        protocol_version=PROTOCOL_VERSION,
        fingerprints=wire.Fingerprints(target="a", tokenizer="t", drafter="dddd"),
        row_encoding=wire.ROW_ENCODING_INT8,
    )
    for served, helps in (("eeee", True), ("", False)):
        refused = check_hello(hello, Fingerprints("a", "t", served))
        assert refused is not None and "drafter dddd" in refused.fault.text
        assert f"this verifier serves drafter {served or 'none'}" in refused.fault.text
        assert ("give moa-serve the --drafter that moa-chat has" in refused.fault.text) is helps
        assert refused.fault.text.endswith("draft without memory rows, as moa-chat --drafter sssd does")
    hello.row_encoding = wire.ROW_ENCODING_UNSPECIFIED
    assert check_hello(hello, Fingerprints("a", "t", "eeee")) is None


@pytest.mark.parametrize(
    ("oldest", "newest", "refused"),
    [(1, 0, "version 1"), (1, 3, ""), (PROTOCOL_VERSION, 0, ""), (3, 4, "versions 3 to 4")],
)
def test_ends_without_a_common_version_are_refused(oldest: int, newest: int, refused: str) -> None:
    """The first versions named one only."""
    hello = wire.Hello(protocol_version=oldest, newest_version=newest)
    answer = check_hello(hello, Fingerprints("", "", ""))
    if not refused:
        assert answer is None
    else:
        assert answer is not None and answer.fault.code == wire.FAULT_CODE_VERSION_MISMATCH
        assert refused in answer.fault.text and f"this verifier version {PROTOCOL_VERSION}" in answer.fault.text


def test_a_tree_is_walked_along_the_targets_choices() -> None:
    tokens, parents = [10, 11, 12, 13], [0, 1, 1, 3]  # 10(11, 12(13))
    assert depths(parents) == [1, 2, 2, 3]
    assert accepted_path(tokens, parents, [10, 12, 0, 13, 99]) == [0, 2, 3]
    assert accepted_path(tokens, parents, [10, 11, 5, 0, 0]) == [0, 1]
    assert accepted_path(tokens, parents, [9, 11, 5, 0, 0]) == []
    assert check_parents([], 3) == [0, 1, 2]
    with pytest.raises(TreeError):
        check_parents([0, 5], 2)


class ReadOnce(list[int]):
    """Tokens that are read from the first on once."""

    def __iter__(self) -> Iterator[int]:
        assert not self.read
        self.read = True
        return super().__iter__()

    read = False


def test_a_walk_reads_each_token_once() -> None:
    """A draft that is known already costs the verifier no forward: a thousand tokens of it must not hold up others."""
    right = list(range(1, 1001))
    assert accepted_path(ReadOnce(right), chain(1000), [*right, 7]) == list(range(1000))


@pytest.mark.parametrize(
    ("encoding", "tolerance"), [(wire.ROW_ENCODING_INT8, 1 / 127), (wire.ROW_ENCODING_FLOAT16, 1e-3)]
)
def test_rows_are_encoded_and_decoded(encoding: int, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(5, 3, 8)).astype(np.float32) * 20
    values = rng.normal(size=(5, 3, 8)).astype(np.float32)
    values[2] = 0
    got_keys, got_values = decode_rows(encode_rows(7, keys, values, encoding))
    for got, sent in ((got_keys, keys), (got_values, values)):
        assert got.shape == sent.shape
        peak = np.abs(sent).max(axis=-1, keepdims=True)
        assert (np.abs(got - sent) <= tolerance * peak + 1e-6).all()


def test_the_documented_row_example() -> None:
    keys = np.array([[[0.0, 127.0]]], np.float32)
    rows = encode_rows(0, keys, keys, wire.ROW_ENCODING_INT8)
    assert rows.data == b"\x00\x7f\x00\x7f"
    assert np.frombuffer(rows.scales, "<f2").tolist() == [1.0, 1.0]


def test_rows_whose_sizes_disagree_are_refused() -> None:
    rows = encode_rows(0, np.ones((2, 1, 4), np.float32), np.ones((2, 1, 4), np.float32), wire.ROW_ENCODING_INT8)
    rows.count = 3
    with pytest.raises(RowsError, match="take 24 bytes"):
        decode_rows(rows)


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


def answers_at(pair: Pair, base_len: int, tokens: tuple[int, ...] = (1,)) -> list[wire.ServerMessage]:
    """Return the answer to a draft that another process sends for this conversation."""
    draft = wire.Draft(epoch=pair.server.session._epoch, base_len=base_len, tokens=tokens)
    answers = pair.server.receive(wire.ClientMessage(draft=draft).SerializeToString(), "resume")
    return [wire.ServerMessage.FromString(answer) for answer in answers]


def draft_at(pair: Pair, base_len: int, tokens: tuple[int, ...] = (1,)) -> wire.Verdict:
    """The verdict on it."""
    return answers_at(pair, base_len, tokens)[0].verdict


def test_rows_are_sent_once_on_a_connection() -> None:
    pair = asked()
    for _ in range(4):
        reached = len(pair.server.session.committed)
        passes = pair.server.passes
        assert len(answers_at(pair, reached - 1)) == 1 and pair.server.passes == passes
        verdict, rows = answers_at(pair, reached)
        assert rows.rows.start == reached - 1 and verdict.verdict.rows_until == len(pair.server.session.committed) - 1
    reached = len(pair.server.session.committed)
    token = wire.Mark(length=reached, digest=digest(pair.server.session.committed))
    for held, start in ((2, 2), (0, 0), (10**9, reached)):  # a new connection says what its client holds
        hello = wire.Hello(resume=wire.Resume(marks=[token], rows=held), row_encoding=wire.ROW_ENCODING_INT8)
        pair.server.session.greet(hello, "resume")
        work = pair.server.session.receive(
            wire.ClientMessage(draft=wire.Draft(epoch=pair.server.session._epoch, base_len=reached))
        )
        assert isinstance(work, Verify) and work.rows_from == start


@pytest.mark.parametrize("rows_from", [40, 10**9, 2**64 - 1])
def test_rows_from_beyond_the_conversation_are_ignored(rows_from: int) -> None:
    session = asked().server.session
    prompt = wire.Prompt(epoch=8, base_len=0, tokens=[1, 2, 3], rows_from=rows_from)
    work = session.receive(wire.ClientMessage(prompt=prompt))
    assert isinstance(work, Verify) and work.rows_from is None
    session.decide(work, [], 5)
    assert session.next_work() is None and not session.rows_due


def test_the_documented_digest() -> None:
    assert digest([1, 2]) == 58791804 == zlib.crc32(b"\x01\0\0\0\x02\0\0\0")


def test_decided_tokens_are_repeated_without_the_engine() -> None:
    """Only a Prompt or Cancel truncates the server's tokens."""
    pair = asked()
    first = draft_at(pair, 4, (choice(pair.client.committed),))
    passes, committed = pair.server.passes, list(pair.server.session.committed)
    assert first.accepted == 1 and len(first.tokens) == 2
    again = draft_at(pair, 4, (first.tokens[0], first.tokens[1], 1))
    assert list(again.tokens) == list(first.tokens) and again.accepted == 2
    assert draft_at(pair, 4, (wrong(first.tokens[0]),)).accepted == 0
    assert list(draft_at(pair, 5).tokens) == [first.tokens[1]]
    assert pair.server.passes == passes and pair.server.session.committed == committed


def test_a_duplicate_prompt_is_answered_once() -> None:
    pair = Pair()
    pair.connect()
    pair.settle()
    pair.client.prompt(PROMPT, GREEDY)
    pair.flush()
    pair.up.append(pair.up[0])
    pair.settle()
    assert pair.server.passes == 1 and pair.client.committed == [*PROMPT, choice(PROMPT)]
    other = wire.Prompt(epoch=pair.server.session._epoch, base_len=0, tokens=[1, 2])
    refused = pair.server.session.receive(wire.ClientMessage(prompt=other))
    assert isinstance(refused, wire.ServerMessage) and "another Prompt of the same epoch" in refused.fault.text


def test_a_late_fault_does_not_apply_to_the_next_prompt() -> None:
    """A Prompt that was sent again is refused twice, and the client may have asked something else between the two."""
    pair = Pair()
    pair.connect()
    pair.settle()
    pair.client.prompt([1] * LIMITS.max_context, GREEDY)
    pair.flush()
    pair.up.append(pair.up[0])
    pair.deliver_up()
    pair.deliver_up()
    pair.deliver_down()
    assert [event.code for event in pair.events if isinstance(event, Faulted)] == ["CONTEXT_FULL"]
    pair.events.clear()
    pair.client.cancel()
    pair.client.prompt(PROMPT, GREEDY)
    pair.settle()
    assert not any(isinstance(event, Faulted) for event in pair.events)
    assert pair.client.committed == [*PROMPT, choice(PROMPT)]


def test_tokens_decided_while_disconnected_follow_the_welcome() -> None:
    pair = asked()
    pair.write(2, right=True)
    pair.client.propose()
    pair.flush()
    pair.deliver_up()
    pair.cut()  # the verdict is lost
    pair.write(2, right=False, origin=Origin.OFFLINE)
    passes = pair.server.passes
    pair.connect()
    pair.deliver_up()
    assert len(pair.down) == 2
    while pair.down:
        pair.deliver_down()
    assert pair.client.committed == decode(PROMPT, 7) and pair.server.passes == passes
    pair.finish()
    assert pair.client.committed == decode(PROMPT, LIMITS.max_context)


def test_a_prompt_answered_while_disconnected_is_not_sent_again() -> None:
    pair = Pair()
    pair.connect()
    pair.settle()
    pair.client.prompt(PROMPT, GREEDY)
    pair.flush()
    pair.deliver_up()
    pair.cut()
    pair.connect()
    pair.deliver_up()
    pair.deliver_down()
    pair.deliver_down()
    assert pair.client.committed == [*PROMPT, choice(PROMPT)] and pair.server.passes == 1 and not pair.up


def test_an_answer_cancelled_offline_is_cancelled_at_the_server() -> None:
    pair = asked()
    pair.cut()
    pair.client.cancel()
    pair.connect()
    pair.settle()
    assert pair.server.session._answer_start is None and pair.server.session.committed == pair.client.committed


def test_a_verifier_of_chains_refuses_trees_and_gets_none() -> None:
    limits = Limits(max_context=96, max_draft_tokens=16, trees=False)
    pair = asked()
    pair.server.session.limits = limits
    epoch = pair.server.session._epoch
    tree = wire.Draft(epoch=epoch, base_len=len(pair.client.committed), tokens=[1, 2], parents=[0, 0])
    refused = pair.server.session.receive(wire.ClientMessage(draft=tree))
    assert isinstance(refused, wire.ServerMessage) and "chains only" in refused.fault.text
    pair.cut()
    pair.connect()
    pair.settle()
    assert pair.client.limits == limits
    pair.client.extend([1, 2], Origin.DRAFTED)
    assert pair.client.propose(tree=DraftTree((1, 2, 3), (0, 1, 0), (-0.1, -0.2, -2.0)))
    assert list(last_frame_of(pair).draft.parents) == [] and list(last_frame_of(pair).draft.tokens) == [1, 2]


def last_frame_of(pair: Pair) -> wire.ClientMessage:
    pair.flush()
    return last_frame(pair)
