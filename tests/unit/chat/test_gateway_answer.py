"""Answers of the OpenAI-compatible endpoint only grow, and end at a stop text."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("starlette")

from moa_chat.gateway.answers import answer
from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.replies import Ending, usage_of
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
from support.refusals import refused


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


LOST, BACK = LinkChanged(LinkStatus.OFFLINE, "gone"), LinkChanged(LinkStatus.ONLINE)


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
    written = [update("a", "b", "c"), update("a", "b", "cd"), kept("a", "bcd"), finished("abcde")]
    pieces, ending, _ = write(update("a", "b"), LOST, *written)
    assert pieces == ["a", "bc", "d", "e"] and ending.reason == "stop" and not ending.offline


@pytest.mark.parametrize(
    ("written", "why", "reason", "own"),
    [
        (update("ab", "c", "de"), PauseReason.END, "stop", 3),
        (update("ab", "c", "de"), PauseReason.LENGTH, "length", 3),
        (update("ab", "c", "de"), PauseReason.LIMIT, "length", 3),
        # The draft under way ended the turn: an answer that says "stop" must not lack its last words.
        (update("ab", "cde"), PauseReason.END, "stop", 3),
    ],
)
def test_an_answer_ends_when_the_device_cannot_continue_it(written, why, reason, own):
    pieces, ending, chat = write(update("ab"), written, Paused(why), finished("never"))
    assert pieces == ["ab", "cde"] and ending.reason == reason and ending.offline and chat.stopped == 1
    assert (ending.completion_tokens, ending.own_tokens) == (5, own)


@pytest.mark.parametrize("offline", ["off", "drafter", "writer"])
def test_a_question_that_the_device_may_not_answer_offline_is_refused(offline):
    why = PauseReason.OFF if offline == "off" else PauseReason.UNPREPARED
    with refused("verifier_unavailable", ApiError) as caught:
        write(LinkChanged(LinkStatus.OFFLINE), Paused(why), offline=offline)
    assert caught.value.status == 503 and caught.value.headers == {"Retry-After": "5"}


@pytest.mark.parametrize(
    ("offline", "script"),
    [
        ("off", [LOST, Paused(PauseReason.OFF)]),
        ("drafter", [LOST, update("a", "bc"), Paused(PauseReason.UNSURE)]),  # the drafter is not sure
    ],
)
def test_an_answer_waits_for_a_verifier_that_comes_back(monkeypatch, offline, script):
    monkeypatch.setattr("moa_chat.gateway.answers._PATIENCE_S", 0.3)
    returns = [BACK, 0.6, update("ax"), finished("axy")]
    pieces, ending, chat = write(update("a", "b"), *script, *returns, offline=offline)
    assert "".join(pieces).endswith("xy") and not ending.offline and chat.offline == offline
    with refused("verifier_unavailable", ApiError) as caught:
        write(update("a", "b"), *script, HANG, offline=offline)
    assert caught.value.status == 503 and "0.3 s" in str(caught.value)


def test_a_stop_text_or_a_full_context_ends_the_answer():
    pieces, ending, chat = write(update("one t"), update("one two"), finished("never"), stop=["tw"])
    assert pieces == ["one "] and ending.reason == "stop" and chat.stopped == 1
    for reason in (FinishReason.LENGTH, FinishReason.CONTEXT):
        assert write(finished("abc", reason))[1].reason == "length"
