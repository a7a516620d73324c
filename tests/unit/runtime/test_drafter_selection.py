"""The drafting side: the server at first, the device if its drafts show that rounds are faster, and back."""

from __future__ import annotations

import pytest

from moa_runtime.drafting.drafter_selection import DrafterSelection
from moa_runtime.drafting.events import RoundEnded
from moa_runtime.options import Drafting


def selection(
    drafting: Drafting = "auto", *, able: bool = True, trip_s: float = 0.005, takes_drafts: bool = True
) -> DrafterSelection:
    one = DrafterSelection(drafting, able=able)
    one.takes_drafts = takes_drafts
    one.note_round_trip(trip_s)
    return one


def push(one: DrafterSelection, count: int = 1, *, tokens: int = 1, seconds: float = 0.03, used: bool = False) -> None:
    for _ in range(count):
        one.pushed(tokens, seconds, 0.0, used=used)


def outcome(accepted: int, draft_s: float, waited_s: float) -> RoundEnded:
    return RoundEnded(0, 6, 6, accepted, (1,) * 6, draft_s, waited_s, None)


def stream(one: DrafterSelection, verdicts: int, *, accepted: int, draft_s: float = 0.01, used: bool = False) -> int:
    """Let the server stream as long as it may, with a draft after each verdict; return the number of drafts."""
    drafts = 0
    for _ in range(verdicts):
        if not one.at_server:
            break
        push(one, used=used)
        if one.wants_draft:
            one.drafted(outcome(accepted, draft_s, one.round_s), 0.0)
            drafts += 1
    return drafts


def rounds(one: DrafterSelection, most: int, *, accepted: int, draft_s: float = 0.01, waited_s: float = 0.035) -> int:
    """Return the number of rounds until the server streams, at most ``most``."""
    for number in range(most):
        if one.at_server:
            return number
        one.round_ended(outcome(accepted, draft_s, waited_s), accepted + 1, 0.0)
    return most


def test_the_device_takes_over_if_its_drafts_show_faster_rounds() -> None:
    one = selection()
    assert one.at_server and not one.wants_draft
    drafts = stream(one, 50, accepted=2, used=True)
    assert not one.at_server and drafts == 12  # 3 tokens in 45 ms against 1 in 30; fewer may be one copied passage
    close = selection()
    assert stream(close, 50, accepted=0, used=True) == 50 and close.at_server  # 1 token in 45 ms


def test_the_server_streams_on_if_it_leaves_out_what_drafts_have_right() -> None:
    """It serves many sessions, so it would leave out the tokens of rounds as well."""
    crowd, older = selection(), selection(takes_drafts=False)
    assert stream(crowd, 400, accepted=2) == 3 * 16 and crowd.at_server  # with pauses
    assert stream(older, 400, accepted=2) == 12 and not older.at_server
    stream(crowd, 500, accepted=2, used=True)
    assert not crowd.at_server


def test_a_small_lead_needs_more_drafts() -> None:
    lasting = (0.005, 0.035, 0.048)
    counts = [stream(one := selection(), 400, accepted=2, draft_s=draft_s, used=True) for draft_s in lasting]
    assert counts == sorted(counts) and counts[0] < counts[-1] < 400 and not one.at_server


@pytest.mark.parametrize("takes_drafts", [True, False])
def test_drafts_in_vain_pause_for_longer_and_longer(takes_drafts: bool) -> None:
    one = selection(takes_drafts=takes_drafts)
    push(one)
    pauses, drafts = [], []
    for _ in range(4):
        drafts.append(0)
        while one.wants_draft:
            one.drafted(outcome(0, 0.01, one.round_s), 0.0)
            drafts[-1] += 1
        pauses.append(0)
        while not one.wants_draft:
            push(one)
            pauses[-1] += 1
    assert drafts == [16] * 4 and pauses == [64, 128, 256, 512]
    push(one, used=True)
    assert stream(one, 100, accepted=0, used=True) == 100


@pytest.mark.parametrize(
    ("accepted", "waited_s", "most"),
    [(0, 0.035, 30), (2, 0.075, 3), (2, 0.305, 2)],
    ids=["worse drafts", "a pass of others before each", "a slower verifier"],
)
def test_the_server_streams_again_if_rounds_bring_less_than_expected(accepted: int, waited_s: float, most: int) -> None:
    one = selection()
    stream(one, 50, accepted=2, used=True)
    assert rounds(one, 100, accepted=accepted, waited_s=waited_s) <= most
    stream(one, 100, accepted=2, used=True)
    assert one.at_server  # it pauses
    stream(one, 100, accepted=2, used=True)
    assert not one.at_server


def test_a_verifier_that_slowly_becomes_slower_is_not_busy() -> None:
    """Passes take longer as the context grows."""
    one = selection()
    stream(one, 50, accepted=2, used=True)
    for number in range(22):
        assert not one.at_server
        one.round_ended(outcome(2, 0.01, 0.035 * 1.002**number), 3, 0.0)


def test_streaming_is_measured_again_after_a_pause_that_becomes_longer() -> None:
    one = selection()
    counts = []
    for _ in range(3):
        stream(one, 50, accepted=2, used=True)
        assert not one.at_server
        counts.append(rounds(one, 200, accepted=2))
    assert counts == [22, 43, 86]  # 64, 128 and 256 tokens
    for _ in range(200):  # unsolicited drafts are used now
        push(one, tokens=3, used=True)
        one.drafted(outcome(2, 0.01, one.round_s), 0.0)
    assert one.at_server


def test_a_chosen_side_always_drafts() -> None:
    device = selection("device")
    assert rounds(device, 50, accepted=0, draft_s=1.0, waited_s=1.0) == 50
    for server in (selection("server"), selection("server", able=False), selection(able=False)):
        assert not stream(server, 20, accepted=4) and server.at_server
