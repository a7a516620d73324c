"""The gateway's answer depends on the target's tokens alone, not on how many a verdict brings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from moa_chat.gateway.app import Access, create_app
from moa_chat.gateway.pool import ChatPool
from moa_runtime.answer_view import AnswerRecord
from moa_runtime.conversation import Question
from moa_runtime.events import ChatEvent, FinishReason, Origin
from moa_runtime.reasoning import ControlTokens
from moa_runtime.session.events import Committed
from support.chat.pooled_chat import DEFAULTS, USER, PooledChat

#: Of the tokens 0, 1, ...; some are parts of a character, or of none.
BYTES = (b"a", b"b", b"ab", b"ba", b"aab", b"bbab", b"\xc3", b"\xa9", "é".encode(), b"", b" ", b"<think>", b"</think>")
TOKENIZER: Any = SimpleNamespace(
    decode=lambda tokens, shown: b"".join(BYTES[token] for token in tokens).decode(errors="replace"),
    control_tokens=ControlTokens({}, str),
    stop_tokens=(),
)


def events_of(verdicts: Sequence[tuple[Sequence[int], Sequence[int]]], reason: FinishReason) -> list[ChatEvent]:
    """Events of a chat for verdicts: the tokens that each brings, and those drafted after them."""
    record = AnswerRecord(TOKENIZER, Question([], 0, []), lambda: (0, 0))
    events: list[ChatEvent] = []
    for committed, drafted in verdicts:
        record.hear(Committed(0, tuple(committed), (Origin.CORRECTED,) * len(committed)))
        events.append(record.update([(token, Origin.DRAFTED) for token in drafted]))
    return [*events, record.finish(reason)]


def answered(
    events: list[ChatEvent], stops: Sequence[str], *, stream: bool, least: int = 0
) -> tuple[str, str, dict[str, int]]:
    """Text, ``finish_reason`` and OpenAI's figures."""

    async def connect(needs_verifier: bool) -> PooledChat:
        return PooledChat(events)

    pool = ChatPool(connect)
    http = TestClient(create_app(pool, pool, DEFAULTS, Access("", loopback=False), lambda line: None))
    body = {"messages": [USER], "stop": list(stops), "stream": stream, "stream_options": {"include_usage": True}}
    body["min_tokens"] = least
    answer = http.post("/v1/chat/completions", json=body)
    if not stream:
        whole = answer.json()
        [choice] = whole["choices"]
        text, reason, usage = choice["message"]["content"], choice["finish_reason"], whole["usage"]
    else:
        *events_sent, done = answer.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        *chunks, figures = (json.loads(event.removeprefix("data: ")) for event in events_sent)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        reason, usage = chunks[-1]["choices"][0]["finish_reason"], figures["usage"]
    return text, reason, {name: value for name, value in usage.items() if name != "moa"}


TOKENS = st.integers(0, len(BYTES) - 3)


@given(
    verdicts=st.lists(st.tuples(st.lists(TOKENS, max_size=5), st.lists(TOKENS, max_size=3)), max_size=8),
    stops=st.lists(st.text("abé �", min_size=1, max_size=4), max_size=4),
    reason=st.sampled_from(FinishReason),
    least=st.integers(0, 4),
)
def test_any_verdicts_of_the_same_tokens_give_the_same_answer(verdicts, stops, reason, least):
    tokens = [token for committed, _ in verdicts for token in committed]
    one_by_one = answered(events_of([([token], ()) for token in tokens], reason), stops, stream=False, least=least)
    at_once = answered(events_of([(tokens, ())], reason), stops, stream=False, least=least)
    events = events_of(verdicts, reason)
    as_they_came = answered(events, stops, stream=False, least=least)
    assert one_by_one == at_once == as_they_came == answered(events, stops, stream=True, least=least)


@pytest.mark.parametrize(
    ("tokens", "stops", "text", "count"),
    [
        ([0, 1, 0, 1], ["bab", "b"], "a", 2),  # complete first, though the other one begins in the same place
        ([4, 1, 0, 1], ["aabbab", "ab"], "a", 1),  # complete first, though the other one begins before it
        ([0, 5, 0], ["abb", "b"], "a", 2),  # within a token, too
        ([0, 0, 1, 1], ["b", "ab", "aab"], "", 3),  # with the same character: the longest
        ([0, 6, 7, 1], ["é"], "a", 3),  # the token that completes the character
        ([0, 6, 0], ["�"], "a", 3),  # one that never becomes whole
        ([10, 9, 1], ["c"], " b", 3),
    ],
)
def test_an_answer_ends_at_the_stop_text_that_is_complete_first(tokens, stops, text, count):
    for verdicts in ([(tokens, ())], [([token], (0, 1)) for token in tokens]):
        said, reason, usage = answered(events_of(verdicts, FinishReason.LENGTH), stops, stream=False)
        assert (said, usage["completion_tokens"]) == (text, count)
        assert reason == ("length" if stops == ["c"] else "stop")


@pytest.mark.parametrize(
    ("least", "text"), [(0, ""), (1, "ab"), (2, "ab"), (3, "aba"), (4, "ababbbab"), (5, "ababbbabaab")]
)
def test_a_stop_text_counts_after_the_least_tokens(least, text):
    tokens, stops = [0, 1, 2, 5, 4], ["a", "bb"]  # "a", "b", "ab", "bbab", "aab"
    for verdicts in ([(tokens, ())], [([token], (0, 1)) for token in tokens]):
        assert answered(events_of(verdicts, FinishReason.LENGTH), stops, stream=False, least=least)[0] == text


def test_reasoning_is_apart_from_the_answer_and_switched_by_the_request():
    asked: list[bool | None] = []

    class ReasoningChat(PooledChat):
        thinking = property(lambda self: None, lambda self, thinking: asked.append(thinking))

    tokens = [11, 10, 4, 10, 12, 10, 1]

    async def connect(needs_verifier: bool) -> PooledChat:
        return ReasoningChat(events_of([([token], ()) for token in tokens], FinishReason.STOP))

    def app() -> TestClient:
        pool = ChatPool(connect)
        return TestClient(create_app(pool, pool, DEFAULTS, Access("", (), None), lambda line: None))

    body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}}
    message = app().post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"], asked) == ("aab", "b", [True])
    sent = app().post("/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in sent if event[6:].startswith("{")]
    for name, text in (("reasoning_content", "aab"), ("content", "b")):
        assert "".join(delta.get(name, "") for delta in deltas) == text
    for wrong in ({"enable_thinking": 1}, {"surprise": True}, []):
        assert app().post("/v1/chat/completions", json={**body, "chat_template_kwargs": wrong}).status_code == 400
