"""Answers of the OpenAI-compatible endpoint only grow, and end at a stop text."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

from moa_chat.gateway.answers import answer
from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.replies import Ending, Reply, ScoredToken, TextReply, metrics_of, usage_of
from moa_runtime.events import (
    AnswerUpdate,
    FinishReason,
    LinkChanged,
    LinkStatus,
    Origin,
    Paused,
    PauseReason,
    Statistics,
    TextSpan,
    TokenLogprobs,
    TokenOrigin,
    WholeAnswer,
)
from support.chat.fake_chat import HANG, finished, origins, update
from support.chat.pooled_chat import PooledChat, parse
from support.refusals import refused


def kept(committed: str, tail: str) -> AnswerUpdate:
    """The verifier is back, and has not yet confirmed what is kept."""
    tokens = (*origins(committed), *(TokenOrigin(ord(char), Origin.KEPT, False) for char in tail))
    spans = TextSpan(committed, Origin.DRAFTED, True), TextSpan(tail, Origin.KEPT, False)
    return AnswerUpdate.of(WholeAnswer(tokens, spans))


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
    pieces, ending, chat = write(update("", "Pb"), update("P", "cd"), update("Par"), finished("Paris"))
    assert pieces == ["P", "ar", "is"] and chat.overflow == "error"
    assert ending.reason == "stop" and not ending.offline
    usage = usage_of([ending])
    figures, details = usage.pop("moa"), usage.pop("completion_tokens_details")
    assert usage == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert details == {"reasoning_tokens": 0}
    assert '"moa": {"offline": false}' in Reply("tiny", 1).last_chunk(0, ending)
    trimmed = replace(ending, statistics=Statistics(dropped_turns=4))
    assert '"moa": {"offline": false, "dropped_turns": 4}' in Reply("tiny", 1).last_chunk(0, trimmed)
    assert figures["offline"] is False and figures["offline_tokens"] == 0
    assert {"tau", "rounds", "drafted", "accepted", "kept", "rolled_back", "round_trip_ms", "bytes_up"} <= set(figures)


def test_drafts_have_the_figures_of_vllm():
    drafts = [(3, 0)] * 2 + [(3, 3), (1, 1)]
    _, ending, _ = write(finished("Paris"))
    found = metrics_of([replace(ending, statistics=Statistics(verified=drafts))])
    assert found["speculative_decoding"] == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.4,
        "acceptance_histogram": [2, 1, 0, 1],
        "acceptance_histogram_by_draft_length": {"1": [0, 1], "3": [2, 0, 0, 1]},
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 10,
        "num_spec_tokens": 3,
    }
    none = metrics_of([ending])["speculative_decoding"]
    assert (
        none["mean_acceptance_length"] == 1 and none["acceptance_histogram"] == [0] and metrics_of([ending] * 2) is None
    )


def scored(text: str, known: int = 99) -> list[TokenOrigin]:
    """Tokens of one character; the first ``known`` have log probabilities."""
    probable = [TokenLogprobs(-float(at), (ord("x"), ord(char)), (-0.25, -math.inf)) for at, char in enumerate(text)]
    kinds = zip(text, [*probable[:known], *[None] * len(text)], strict=False)
    return [TokenOrigin(ord(char), Origin.DRAFTED, True, logprobs) for char, logprobs in kinds]


def test_tokens_have_logprobs_up_to_the_one_that_completes_a_stop_text():
    whole = replace(finished("Paris€."), tokens=(*scored("Paris€", 5), *scored(".")))
    first = update("Par")
    first = replace(first, whole=replace(first.whole, tokens=tuple(scored("Par"))))
    parts, ending, _ = write(first, whole, stop=["€"], logprobs=True, top_logprobs=2)
    tokens = [token for part in parts if isinstance(part, list) for token in part]
    assert [part for part in parts if isinstance(part, str)] == ["Par", "is"] and ending.completion_tokens == 6
    assert b"".join(token.written for token in tokens).decode() == "Paris€"
    assert [token.start for token in tokens] == [0, 1, 2, 3, 4, 5]
    assert [token.logprob for token in tokens] == [0, -1, -2, -3, -4, None]
    assert tokens[1].top == ((b"x", -0.25), (b"a", -math.inf)) and tokens[5].top == ()
    assert not any(isinstance(part, list) for part in write(first, whole)[0])


def test_logprobs_have_the_forms_of_openai():
    tokens = [
        ScoredToken("é".encode()[:1], 0, -0.5, [(b"x", -0.25), (b"y", -math.inf)]),
        ScoredToken(b"b", 1, None, ()),
    ]
    ending = write(finished("ab"))[1]
    for reply, expected in (
        (
            Reply("tiny", 1),
            {
                "content": [
                    {
                        "token": "\ufffd",
                        "logprob": -0.5,
                        "bytes": [195],
                        "top_logprobs": [
                            {"token": "x", "logprob": -0.25, "bytes": [120]},
                            {"token": "y", "logprob": -9999.0, "bytes": [121]},
                        ],
                    },
                    {"token": "b", "logprob": None, "bytes": [98], "top_logprobs": []},
                ],
                "refusal": None,
            },
        ),
        (
            TextReply("tiny", 1),
            {
                "tokens": ["bytes:\\xc3", "b"],
                "token_logprobs": [-0.5, None],
                "text_offset": [0, 1],
                "top_logprobs": [{"bytes:\\xc3": -0.5, "x": -0.25, "y": -9999.0}, None],
            },
        ),
    ):
        assert "logprobs" in reply.first_chunks() or isinstance(reply, TextReply)
        reply.score(0, tokens)
        assert reply.whole(["ab"], [ending])["choices"][0]["logprobs"] == expected
        reply.score(0, tokens)
        [choice] = json.loads(reply.chunk(0, "ab").removeprefix("data: "))["choices"]
        assert choice["logprobs"] == expected
        [choice] = json.loads(reply.last_chunk(0, ending).removeprefix("data: "))["choices"]
        assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("text", "count"), [("<think>So</think>4", 17), ("<think>So", 9), ("<think>S|o</think>4", 9), ("4", 0)]
)
def test_tokens_of_reasoning_are_counted(text, count):
    assert write(finished(text), stop=["|"])[1].reasoning_tokens == count


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


@pytest.mark.parametrize("writer", [None, object()])
def test_the_writer_is_advised_if_there_is_one(monkeypatch, writer):
    monkeypatch.setattr(PooledChat, "manifest", SimpleNamespace(writer=writer))
    with refused("verifier_unavailable", ApiError) as caught:
        write(LinkChanged(LinkStatus.OFFLINE), Paused(PauseReason.OFF), offline="off")
    assert ("writer" in str(caught.value)) == (writer is not None)


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
