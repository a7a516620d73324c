"""Sessions that are closed and restored, spelled out; any moment of any schedule: test_session_properties."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from moa_runtime.manifest import Fingerprints
from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.events import Origin, Policy, Sampling
from moa_runtime.session.snapshot import SNAPSHOT_VERSION, SnapshotError
from support.refusals import refused
from support.session.fixtures_pair import PRINTS, STOP, Pair, decode, rows_of

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


def test_a_snapshot_fits_another_drafter_but_no_other_target() -> None:
    snapshot = saved(offline())
    assert restored(snapshot, Fingerprints("target", "tokenizer", "other")).fingerprints.drafter == "other"
    for target, tokenizer, code in (("x", "tokenizer", "other_target"), ("target", "x", "other_tokenizer")):
        with refused(code, SnapshotError):
            restored(snapshot, Fingerprints(target, tokenizer, "drafter"))


def test_an_unknown_version_is_refused_with_both_numbers() -> None:
    with refused("wrong_version", SnapshotError) as caught:
        restored({**saved(offline()), "version": SNAPSHOT_VERSION + 1})
    assert f"{SNAPSHOT_VERSION + 1}," in str(caught.value) and f"{SNAPSHOT_VERSION}:" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("fingerprints", [], "[]"),
        ("policy", "hope", "rollback, keep, ask"),
        ("limits", {"max_context": -1}, "max_context"),
        ("resume_token", "\ud800", "resume_token"),
        ("epoch", 2**64, "epoch"),
        ("committed", "abc", "abc"),
        ("committed", [1, "2"], "4294967295"),
        ("committed", [True], "True"),
        ("committed", [2**32], "4294967296"),
        ("kept", 1, "1 of 0"),
        ("tentative", [1], "origins"),
        ("origins", [["offline"]], "['offline']"),
        ("answering", 1, "answering"),
        ("answering", False, "target"),
        ("answer_start", 99, "99 of 8"),
        ("sampling", {"temperature": float("nan")}, "temperature"),
        ("sampling", {"temperature": 10**400}, "temperature"),
    ],
)
def test_invalid_content_is_refused(key: str, value: object, named: str) -> None:
    with refused("damaged", SnapshotError) as caught:
        restored({**saved(offline()), key: value})
    assert named in str(caught.value)


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
        with refused("damaged", SnapshotError) as caught:
            restored(snapshot)
        assert path[-1] in str(caught.value)


@pytest.mark.parametrize("snapshot", [None, [], "text", 3, b"{}"])
def test_values_that_are_no_snapshot_are_refused(snapshot: object) -> None:
    with refused("damaged", SnapshotError):
        restored(snapshot)
