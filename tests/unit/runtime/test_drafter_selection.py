"""The drafting side: the server at first, the device if shadow drafts show that it is faster, and back."""

from __future__ import annotations

import pytest

from moa_runtime.drafting.drafter_selection import DrafterSelection
from moa_runtime.drafting.events import RoundEnded
from moa_runtime.options import Drafting


def selection(
    drafting: Drafting = "auto", *, able: bool = True, trip_s: float = 0.005, server_drafts: bool = True
) -> DrafterSelection:
    one = DrafterSelection(drafting, able=able)
    one.server_drafts = server_drafts
    one.note_round_trip(trip_s)
    return one


def push(
    one: DrafterSelection, count: int = 10, *, tokens: int = 1, seconds: float = 0.03, draft_s: float = 0.0
) -> None:
    for _ in range(count):
        one.pushed(tokens, seconds, draft_s)


def outcome(accepted: int, draft_s: float, waited_s: float = 0.0) -> RoundEnded:
    return RoundEnded(0, 6, 6, accepted, (1,) * 6, draft_s, waited_s, 0.0)


def shadow_drafts(one: DrafterSelection, accepted: int, draft_s: float) -> int:
    """Make shadow drafts until the device takes over or none is wanted; return their number."""
    count = 0
    while one.at_server and one.wants_shadow_draft:
        one.shadow_ended(outcome(accepted, draft_s, one.round_s))
        count += 1
    return count


def rounds(one: DrafterSelection, count: int, *, accepted: int, draft_s: float, waited_s: float) -> None:
    for _ in range(count):
        if not one.at_server:
            one.round_ended(outcome(accepted, draft_s, waited_s), accepted + 1)


def test_the_device_takes_over_if_its_shadow_drafts_are_faster():
    one = selection()
    assert one.at_server and not one.wants_shadow_draft
    push(one)
    assert shadow_drafts(one, accepted=2, draft_s=0.01) > 1
    assert not one.at_server  # 3 tokens in 45 ms against 1 in 30


def test_slower_shadow_drafts_pause_the_device_for_longer_and_longer():
    one = selection()
    push(one)
    tried, verdicts = [], []
    for _ in range(4):
        tried.append(shadow_drafts(one, accepted=0, draft_s=0.01))
        assert one.at_server
        verdicts.append(0)
        while not one.wants_shadow_draft:
            push(one, 1)
            verdicts[-1] += 1
    assert all(tried) and verdicts == [64, 128, 256, 512]


def test_a_device_that_cannot_win_makes_no_shadow_drafts():
    one = selection(trip_s=0.3)
    push(one, 1000)
    assert not one.wants_shadow_draft  # 6 tokens in 330 ms against 1 in 30


@pytest.mark.parametrize(("accepted", "waited_s", "at_server"), [(0, 0.035, True), (2, 0.305, False)])
def test_the_server_takes_over_if_the_device_became_slower_but_not_the_verifier(accepted, waited_s, at_server):
    one = selection()
    push(one)
    shadow_drafts(one, accepted=2, draft_s=0.01)
    rounds(one, 8, accepted=2, draft_s=0.01, waited_s=0.035)
    assert not one.at_server
    rounds(one, 30 if at_server else 12, accepted=accepted, draft_s=0.01, waited_s=waited_s)
    assert one.at_server == at_server


def test_a_drafting_server_is_measured_again_from_time_to_time():
    one = selection()
    push(one)
    shadow_drafts(one, accepted=2, draft_s=0.025)
    verdicts = []
    for _ in range(3):
        count = 0
        while not one.at_server:
            rounds(one, 1, accepted=2, draft_s=0.025, waited_s=0.035)
            count += 1
        verdicts.append(count)
        push(one, 6)
        assert not one.at_server
    assert verdicts == [22, 43, 86]  # 64, 128 and 256 tokens
    rounds(one, 171, accepted=2, draft_s=0.025, waited_s=0.035)
    assert one.at_server
    push(one, 10, tokens=4)  # its drafts have got better
    assert one.at_server


def test_the_device_begins_beside_a_server_without_drafts_if_two_tokens_a_round_pay():
    near, far, able = (selection(trip_s=trip_s, server_drafts=False) for trip_s in (0.005, 0.03, 0.005))
    for one in (near, far):
        push(one, 3)
    assert not near.at_server and far.at_server  # two tokens in 45 or 70 ms, one in 30
    rounds(near, 200, accepted=2, draft_s=0.025, waited_s=0.035)
    assert not near.at_server  # what does not draft need not show how fast it is
    assert able.at_server


def test_a_server_without_drafts_counts_a_token_for_each_pass():
    """Its first verdicts are slow, so it would look slower than rounds of one token."""
    one = selection(server_drafts=False)
    push(one, 3, seconds=0.3)
    assert not one.at_server
    rounds(one, 20, accepted=0, draft_s=0.01, waited_s=0.035)
    assert one.at_server


def test_a_chosen_side_always_drafts():
    device = selection("device")
    rounds(device, 50, accepted=0, draft_s=1.0, waited_s=1.0)
    assert not device.at_server
    for server in (selection("server"), selection("server", able=False), selection(able=False)):
        push(server)
        assert server.at_server and not server.wants_shadow_draft


def test_a_busy_verifier_gets_drafts_if_they_cost_little():
    ways = []
    for wanted in (False, True):
        one = selection()
        one.drafts_wanted = wanted
        push(one)
        shadow_drafts(one, accepted=1, draft_s=0.03)  # 2 tokens in 65 ms against 1 in 30
        ways.append(one.at_server)
    assert ways == [True, False]
