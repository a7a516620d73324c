"""Sessions that are closed and restored, spelled out; any moment of any schedule: test_session_properties."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from moa_runtime.bundle import Fingerprints
from moa_runtime.errors import MoaError
from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.events import Committed, Origin, Policy, Resumed, Sampling
from moa_runtime.session.snapshot import SNAPSHOT_VERSION
from support.session.fixtures_pair import LIMITS, PRINTS, STOP, Pair, decode, rows_of

PROMPT = [5, 6, 7]


def offline(policy: Policy = Policy.ROLLBACK, right: bool = True) -> Pair:
    """A pair whose link broke in an answer, after which the device wrote on."""
    pair = Pair(policy)
    pair.connect()
    pair.client.prompt(PROMPT, Sampling(temperature=0.5, seed=2**64 - 1), 30)
    pair.settle()
    pair.write(3, right=True)
    pair.client.propose()
    pair.settle()
    pair.cut()
    pair.write(6, right=right, origin=Origin.OFFLINE)
    return pair


def saved(pair: Pair) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(pair.client.snapshot()))
    return read


def restored(snapshot: object, fingerprints: Fingerprints = PRINTS) -> ClientSession:
    return ClientSession.restore(snapshot, fingerprints, stop_tokens=[STOP])


def test_a_restored_session_is_the_same_without_link_and_rows() -> None:
    pair = offline(Policy.ASK)
    client = restored(saved(pair))
    assert client.link is LinkState.DOWN and client.rows == 0 and not client.frames_to_send()
    assert client.tokens == pair.client.tokens and client.unconfirmed == pair.client.unconfirmed
    assert client.answering and client.policy is Policy.ASK and client.room == pair.client.room
    assert client.limits == LIMITS
    assert client.snapshot() == pair.client.snapshot()


def test_a_prompt_after_an_old_snapshot_is_a_new_one_for_the_server() -> None:
    """The same answer is continued by different lengths: both would have the same epoch and tokens."""
    pair = Pair()
    pair.connect()
    pair.client.prompt(PROMPT, Sampling(), 3)
    pair.finish()
    snapshot = saved(pair)
    pair.client.continue_answer([], len(PROMPT), Sampling(), 2)
    pair.finish()
    pair.cut()
    pair.client = restored(snapshot)
    pair.client.continue_answer([], len(PROMPT), Sampling(), 6)
    pair.connect()
    pair.finish()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 9)


def test_a_snapshot_does_not_change_with_its_session() -> None:
    pair = offline()
    snapshot = pair.client.snapshot()
    before = json.dumps(snapshot)
    pair.connect()
    pair.finish()
    assert json.dumps(snapshot) == before


@pytest.mark.parametrize("forgot", [False, True])
def test_a_restored_session_gets_its_rows_from_every_server(forgot: bool) -> None:
    pair = offline()
    pair.reopen(saved(pair))
    if forgot:
        pair.server.restart(LIMITS)
    passes, length = pair.server.passes, len(pair.client.committed)
    pair.connect()
    pair.settle()
    assert pair.server.passes == passes + 1
    assert (Resumed(length) in pair.events) is forgot
    assert pair.rows == rows_of(pair.client.committed)[: len(pair.rows)] and len(pair.rows) >= length
    pair.finish()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 30)
    origins = [origin for event in pair.events if isinstance(event, Committed) for origin in event.origins]
    assert origins.count(Origin.OFFLINE) == 6


def test_rows_of_a_lost_verdict_come_with_the_next_connection() -> None:
    pair = offline()
    pair.reopen(saved(pair))
    pair.connect()
    for _ in range(2):
        pair.deliver_up()
        pair.down[:-1] = []
        pair.cut() if pair.client.link is LinkState.UP else pair.deliver_down()
    pair.connect()
    pair.finish()
    assert pair.rows == rows_of(pair.client.committed)[: len(pair.rows)] and len(pair.rows) > 30


def test_an_old_snapshot_of_another_text_continues_with_its_own() -> None:
    pair = offline()
    old = saved(pair)
    for prompt in ([1, 2], [3, 4], [8]):  # the program goes on, with a later epoch each time
        pair.client.cancel()
        pair.client.rewind(1)
        pair.forget_rows(1)
        pair.client.prompt(prompt, Sampling(), 20)
        pair.finish()
    assert pair.client.committed[1] == 8
    pair.reopen(old)
    pair.finish()
    assert pair.client.committed == decode(PROMPT, len(PROMPT) + 30) == pair.server.session.committed


def test_offline_text_is_kept_by_the_policy_of_the_snapshot() -> None:
    pair = offline(Policy.KEEP, right=False)
    written = pair.client.tokens
    pair.reopen(saved(pair))
    pair.finish()
    assert pair.client.committed[: len(written)] == written


def test_a_conversation_without_an_answer_is_restored() -> None:
    pair = offline()
    pair.finish()
    pair.reopen(saved(pair))
    pair.connect()
    pair.settle()
    assert not pair.rows
    before = list(pair.client.committed)
    pair.client.prompt([9, 9], Sampling(), 4)
    pair.finish()
    assert pair.client.committed == decode([*before, 9, 9], len(before) + 6)
    assert pair.rows == rows_of(pair.client.committed[: pair.client.rows]) != []


def test_a_cancelled_prompt_of_kept_tokens_leaves_nothing() -> None:
    pair = offline(Policy.KEEP)
    pair.connect()
    while pair.client.link is not LinkState.UP:  # the Prompt with the kept tokens is on its way
        (pair.deliver_up if pair.up else pair.deliver_down)()
    pair.client.cancel()
    assert restored(saved(pair)).unconfirmed == ()


def test_a_snapshot_fits_another_drafter_but_no_other_target() -> None:
    snapshot = saved(offline())
    assert restored(snapshot, Fingerprints("target", "tokenizer", "other")).fingerprints.drafter == "other"
    with pytest.raises(MoaError, match="made with target target, this bundle is for other"):
        restored(snapshot, Fingerprints("other", "tokenizer", "drafter"))
    with pytest.raises(MoaError, match="made with tokenizer tokenizer, this bundle is for other"):
        restored(snapshot, Fingerprints("target", "other", "drafter"))


def test_an_unknown_version_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        MoaError, match=f"version {SNAPSHOT_VERSION + 1}, this program reads version {SNAPSHOT_VERSION}"
    ):
        restored({**saved(offline()), "version": SNAPSHOT_VERSION + 1})


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("version", "1", "version must be a whole number"),
        ("fingerprints", [], r"fingerprints must be an object, not \[\]"),
        ("fingerprints", {"target": "target"}, "tokenizer is missing"),
        ("policy", "hope", "policy knows rollback, keep, ask, not hope"),
        ("limits", {"max_context": -1}, "max_context must be a whole number from 0"),
        ("resume_token", None, "resume_token must be a text, not None"),
        ("epoch", 2**64, "epoch must be a whole number"),
        ("committed", "abc", "committed must be a list, not abc"),
        ("committed", [1, "2"], "committed must be token ids, whole numbers from 0 to 4294967295, not 2"),
        ("committed", [1.0], r"token ids.* not 1\.0"),
        ("committed", [True], "token ids.* not True"),
        ("committed", [-1], "token ids.* not -1"),
        ("committed", [2**32], "token ids.* not 4294967296"),
        ("supplied", {}, r"supplied must be a list, not {}"),
        ("kept", 1, "1 of 0 supplied tokens are kept"),
        ("tentative", [1], "1 tentative tokens have 6 origins"),
        ("origins", ["offline"] * 5 + ["dreamt"], "origins knows drafted, offline, corrected, kept, not dreamt"),
        ("origins", [["offline"]], r"not \['offline'\]"),
        ("answering", 1, "answering must be true or false, not 1"),
        ("answering", False, "no answer is running, but tokens await the target"),
        ("answer_start", None, "an answer runs from position None"),
        ("answer_start", 99, "an answer runs from position 99 of 8 tokens"),
        ("sampling", {"temperature": float("nan")}, "temperature must be a number from 0"),
        ("sampling", {"temperature": 10**400}, "temperature must be a number from 0"),
        ("sampling", {"temperature": 0, "top_p": 1, "seed": -1}, "seed must be a whole number"),
        ("max_length", None, "max_length must be a whole number"),
    ],
)
def test_invalid_content_is_refused_with_one_sentence(key: str, value: object, sentence: str) -> None:
    with pytest.raises(MoaError, match=f"^the snapshot is broken: .*{sentence}.*; begin a new conversation$"):
        restored({**saved(offline()), key: value})


def test_every_missing_key_is_named() -> None:
    whole = saved(offline())
    paths = [[key] for key in whole]
    paths += [[key, inner] for key in ("limits", "sampling") for inner in whole[key]]
    paths += [["fingerprints", "target"], ["fingerprints", "tokenizer"]]
    for path in paths:
        snapshot = inner = copy.deepcopy(whole)
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        with pytest.raises(MoaError, match=f"the snapshot is broken: {path[-1]} is missing"):
            restored(snapshot)


@pytest.mark.parametrize("snapshot", [None, [], "text", 3, b"{}"])
def test_values_that_are_no_snapshot_are_refused(snapshot: object) -> None:
    with pytest.raises(MoaError, match="a snapshot must be an object"):
        restored(snapshot)
