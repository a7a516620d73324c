"""Answers of the OpenAI-compatible endpoint only grow, and end at a stop text."""

from __future__ import annotations

import asyncio
import itertools

import pytest

pytest.importorskip("starlette")

from moa_chat.gateway.answers import StopFilter, answer
from moa_chat.gateway.schemas import ApiError, Ending, usage_of
from moa_runtime.events import (
    AnswerUpdate,
    FinishReason,
    LinkChanged,
    LinkStatus,
    Origin,
    Paused,
    PauseReason,
    Statistics,
    TokenOrigin,
)
from support.chat.fake_chat import HANG, finished, origins, update
from support.chat.pooled_chat import PooledChat, parse


@pytest.mark.parametrize("stops", [("END",), ("aab",), ("b", "ab"), ("aa", "ba"), ("xyz",)])
def test_a_stop_text_ends_the_text_wherever_it_is_cut(stops):
    for text in ("aaab END of", "abab", "the E N D", "ENEND!", "aab"):
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        expected = text[: min(found)] if found else text
        for cuts in itertools.combinations(range(len(text) + 1), 2):
            pieces = StopFilter(stops)
            out = "".join(pieces.feed(part) for part in (text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]))
            assert expected.startswith(out)
            assert (pieces.end is not None) == bool(found) and out + pieces.finish() == expected


def test_only_what_may_become_a_stop_text_is_held_back():
    pieces = StopFilter(["END"])
    assert [pieces.feed(text) for text in ("the E", "N", "T", "EN")] == ["the ", "", "ENT", ""]
    assert pieces.finish() == "EN" and pieces.end is None
    assert StopFilter([]).feed("text") == "text"


def kept(committed: str, tail: str) -> AnswerUpdate:
    """The verifier is back, and has not yet confirmed what is kept."""
    tokens = (*origins(committed), *(TokenOrigin(ord(char), Origin.KEPT, False) for char in tail))
    return AnswerUpdate(committed, tail, tokens, Statistics())


def write(*script, **fields) -> tuple[list[str], Ending, PooledChat]:
    chat = PooledChat(list(script))

    async def run() -> list[str | Ending]:
        return [piece async for piece in answer(chat, parse(**fields))]

    pieces = asyncio.run(run())
    ending = pieces.pop()
    assert isinstance(ending, Ending)
    return pieces, ending, chat


def test_online_only_confirmed_text_is_sent():
    pieces, ending, _ = write(update("", "Pb"), update("P", "cd"), update("Par"), finished("Paris"))
    assert pieces == ["P", "ar", "is"]
    assert ending.reason == "stop" and not ending.offline
    usage = usage_of([ending])
    figures = usage.pop("moa")
    assert usage == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert figures["offline"] is False and figures["offline_tokens"] == 0
    assert {"tau", "rounds", "drafted", "accepted", "kept", "rolled_back", "round_trip_ms", "bytes_up"} <= set(figures)


def test_offline_the_devices_text_is_sent_and_stays():
    lost = LinkChanged(LinkStatus.OFFLINE, "gone")
    script = [
        update("a", "b"),
        lost,
        update("a", "b", "c"),
        update("a", "b", "cd"),
        kept("a", "bcd"),
        finished("abcde"),
    ]
    pieces, ending, _ = write(*script)
    assert pieces == ["a", "bc", "d", "e"] and ending.reason == "stop" and not ending.offline


@pytest.mark.parametrize(
    ("why", "reason"), [(PauseReason.END, "stop"), (PauseReason.LENGTH, "length"), (PauseReason.LIMIT, "length")]
)
def test_an_answer_ends_where_the_device_cannot_go_on_alone(why, reason):
    pieces, ending, chat = write(update("ab"), update("ab", "c", "de"), Paused(why), finished("never"))
    assert pieces == ["ab", "cde"] and ending.reason == reason and ending.offline and chat.stopped == 1
    assert ending.completion_tokens == 5 and ending.own_tokens == 3


def test_what_a_verdict_was_awaited_for_is_not_lost_at_the_end():
    """The draft under way ended the turn: an answer that says "stop" must not lack its last words."""
    pieces, ending, _ = write(update("ab", "cd"), Paused(PauseReason.END))
    assert pieces == ["ab", "cd"] and ending.reason == "stop" and ending.offline
    assert ending.completion_tokens == 4 and ending.own_tokens == 2


@pytest.mark.parametrize(
    ("offline", "why", "said"),
    [
        ("off", PauseReason.OFF, "nothing is to be written without it"),
        ("drafter", PauseReason.UNPREPARED, "the drafter writes no answer that the verifier did not begin"),
        ("writer", PauseReason.UNPREPARED, "the bundle has no writer"),
    ],
)
def test_a_first_question_that_nobody_may_answer_offline(offline, why, said):
    with pytest.raises(ApiError, match=said) as caught:
        write(LinkChanged(LinkStatus.OFFLINE), Paused(why), offline=offline)
    assert caught.value.status == 503 and caught.value.headers == {"Retry-After": "5"}


def test_without_text_of_the_device_a_loss_is_waited_out(monkeypatch):
    monkeypatch.setattr("moa_chat.gateway.answers._PATIENCE_S", 0.3)
    lost, back = LinkChanged(LinkStatus.OFFLINE, "gone"), LinkChanged(LinkStatus.ONLINE)
    pieces, ending, chat = write(
        update("a", "b"), lost, Paused(PauseReason.OFF), back, 0.6, update("ax"), finished("axy")
    )
    assert pieces == ["a", "x", "y"] and not ending.offline and chat.offline == "off"
    with pytest.raises(ApiError, match=r"stayed away for 0\.3 s") as caught:
        write(update("a", "b"), lost, Paused(PauseReason.OFF), HANG)
    assert caught.value.status == 503


def test_a_drafter_that_is_not_sure_has_the_verifier_waited_for(monkeypatch):
    monkeypatch.setattr("moa_chat.gateway.answers._PATIENCE_S", 0.3)
    lost, unsure = LinkChanged(LinkStatus.OFFLINE, "gone"), Paused(PauseReason.UNSURE)
    back = LinkChanged(LinkStatus.ONLINE)
    pieces, ending, chat = write(
        update("a", "b"), lost, update("a", "bc"), unsure, back, 0.6, update("ax"), finished("axy"), offline="drafter"
    )
    assert "".join(pieces).endswith("xy") and not ending.offline and chat.offline == "drafter"
    with pytest.raises(ApiError, match=r"stayed away for 0\.3 s") as caught:
        write(update("a", "b"), lost, unsure, HANG, offline="drafter")
    assert caught.value.status == 503


def test_a_stop_text_stops_the_answer():
    pieces, ending, chat = write(update("one t"), update("one two"), finished("never"), stop=["tw"])
    assert pieces == ["one "] and ending.reason == "stop" and chat.stopped == 1


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CONTEXT])
def test_a_full_answer_ends_for_its_length(reason):
    assert write(finished("abc", reason))[1].reason == "length"
