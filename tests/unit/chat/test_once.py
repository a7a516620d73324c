"""``moa-chat --once`` with a chat that plays a script."""

from __future__ import annotations

import io
import json

import pytest

from moa_chat import strings
from moa_chat.oneshot import run_once
from moa_runtime.chat import ChatError
from moa_runtime.events import FinishReason, LinkChanged, LinkStatus
from moa_runtime.session.events import Grammar
from support.chat.fake_chat import FakeChat, FakeChatConfig, finished, update


def run(chat, *, as_json=False, out=None, **options):
    out = out or io.StringIO()
    assert run_once(FakeChatConfig(chat, **options), "hello", as_json=as_json, out=out) == 0
    assert chat.closed and chat.asked == ["hello"]
    return out.getvalue()


def test_committed_text_streams():
    seen, out = [], io.StringIO()
    look = lambda: seen.append(out.getvalue())  # noqa: E731
    chat = FakeChat([update("", "Pa"), update("Par", "iz"), look, update("Paris"), finished("Paris.")])
    assert run(chat, out=out) == "Paris.\n" and seen == ["Par"]


def test_json_is_one_object():
    chat = FakeChat([update("Pa", "ris"), finished("Paris", FinishReason.LENGTH)])
    result = json.loads(run(chat, as_json=True))
    assert list(result) == ["text", "finish", "statistics", "tokens", "server", "target"]
    assert result["text"] == "Paris" and result["finish"] == "length"
    assert result["tokens"][0] == {"id": ord("P"), "origin": "drafted"}
    assert result["statistics"]["tau"] == 2.5 and result["statistics"]["round_trip_ms"] == 63
    assert result["server"] == "ws://127.0.0.1:8765/v1/session" and result["target"] == "tiny-target"


def test_json_that_was_cut_is_told_on_stderr(capsys):
    schema, cut = Grammar("json_object"), [finished('{"a"', FinishReason.LENGTH)]
    run(FakeChat(cut), schema=schema)
    run(FakeChat([finished('{"a": 1}')]), schema=schema)
    run(FakeChat(cut))
    note = strings.NO_JSON.format(strings.TERMINAL_FINISH[FinishReason.LENGTH])
    assert capsys.readouterr().err.splitlines() == [strings.ONCE_CUT.format(note)]


def test_json_is_ascii_for_every_output():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    run_once(FakeChatConfig(FakeChat([finished("é 🦊 \ud83e")])), "hello", as_json=True, out=out)
    out.seek(0)
    assert json.load(out)["text"] == "é 🦊 \ud83e"


def test_a_lost_link_is_reported_once_on_stderr(capsys):
    retries = [LinkChanged(LinkStatus.RECONNECTING), LinkChanged(LinkStatus.OFFLINE, "AWAY")] * 3
    lost = LinkChanged(LinkStatus.OFFLINE, "CLOSED")
    late, online = LinkChanged(LinkStatus.ONLINE, late=True), LinkChanged(LinkStatus.ONLINE)
    chat = FakeChat([update("a"), late, online, lost, *retries, online, late, online, finished("ab")])
    assert run(chat) == "ab\n"
    assert capsys.readouterr().err.splitlines() == [strings.ONCE_OFFLINE.format(lost.detail), strings.ONCE_ONLINE]


def test_a_refused_answer_is_an_error_and_closes_the_chat():
    chat = FakeChat([ChatError("REFUSED", code="refused")])
    with pytest.raises(ChatError, match="REFUSED"):
        run(chat, as_json=True)
    assert chat.closed


def test_sampling_draws_a_seed_for_each_answer_unless_one_is_given():
    drawn = FakeChatConfig(FakeChat(), temperature=0.8)
    assert drawn.sampling().seed != drawn.sampling().seed and FakeChatConfig(FakeChat()).sampling().temperature == 0
    chat = FakeChat([finished("a")])
    run(chat, temperature=0.8, top_p=0.9, seed=7)
    assert (chat.sampling[0].temperature, chat.sampling[0].top_p, chat.sampling[0].seed) == (0.8, 0.9, 7)
