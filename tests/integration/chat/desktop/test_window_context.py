"""How full the context is, and what one waits for."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt

from moa_bench.link import with_round_trip
from moa_bench.link.proxy import background_link
from moa_chat.desktop.chat_page import ContextMeter
from moa_chat.desktop.message_widgets import Answer
from moa_chat.strings import reading_words
from support.chat.desktop.window_driving import QUESTION, TOKEN, WAIT, ask, wait_for_answer


@pytest.mark.parametrize(
    ("used", "limit", "shown", "words"),
    [
        (0, 0, False, ""),
        (100, 0, False, ""),
        (499, 1000, False, ""),
        (620, 1000, True, "Context 62 % full"),
        (850, 1000, True, "begin a new chat"),
        (2000, 1000, True, "fills 100 %"),
    ],
)
def test_the_meter_is_quiet_until_it_matters(qtbot, appearance, used, limit, shown, words):
    meter = ContextMeter(appearance)
    qtbot.addWidget(meter)
    meter.show_use(used, limit)
    assert meter.isHidden() is not shown
    assert words in meter.text()
    if limit:
        assert f"{used:,} of {limit:,} tokens" in meter.accessibleDescription()


def test_the_meter_follows_the_open_chat(connected, qtbot):
    told, answered = [], []

    def note(used: int, limit: int) -> None:
        told.append((used, limit))
        if (answering := connected.chats._answering) is not None:
            answered.append((used, connected.runtime.prompt_tokens + answering.tokens))

    connected.chats.context_changed.connect(note)
    ask(qtbot, connected)
    wait_for_answer(qtbot, connected)
    chat, limit = connected.runtime.chat, connected.runtime.chat.manifest.max_context
    assert told[-1] == (len(chat.tokens), limit)
    # How many updates one tick of the window holds is luck; each tick shows what it has taken, no more.
    assert answered and all(shown == written for shown, written in answered)
    assert answered[0][0] > connected.runtime.prompt_tokens
    number = connected.chats.current
    connected.new_chat()
    qtbot.waitUntil(lambda: told[-1] == (0, limit), timeout=WAIT)
    connected.chats.open_chat(number)
    turns = [message.turn for message in connected.chats.messages]
    qtbot.waitUntil(lambda: told[-1] == (len(chat.tokenizer.encode_chat(turns, False)), limit), timeout=WAIT)


def test_a_full_context_is_a_sentence_and_the_meter_says_it(connected, qtbot):
    ask(qtbot, connected, "red " * 600)
    qtbot.waitUntil(lambda: not connected.chats.busy, timeout=WAIT)
    assert "context holds" in connected.page.notice.text


def test_what_the_verifier_reads_is_said_and_can_be_given_up(open_window, verifier, qtbot):
    with background_link(with_round_trip(10), "127.0.0.1", verifier.port) as link:
        window = open_window(server=f"ws://127.0.0.1:{link.port}", token=TOKEN)
        qtbot.waitUntil(window.page.composer.is_ready, timeout=WAIT)
        qtbot.waitUntil(lambda: window.page.pill.accessibleDescription() in ("online", "slow"), timeout=WAIT)
        link.cut()  # from here on it is as if the target read without end
        ask(qtbot, window)
        answer = window.page.conversation.findChildren(Answer)[-1]
        assert not answer.cancel_button.isVisible()
        qtbot.waitUntil(lambda: "reads your text" in answer.waiting, timeout=WAIT)
        assert f"({window.runtime.chat.new_tokens} tokens)" in answer.waiting
        qtbot.mouseClick(answer.cancel_button, Qt.MouseButton.LeftButton)
        qtbot.waitUntil(lambda: not window.chats.busy, timeout=WAIT)
        assert window.chats.messages == [] and window.page.composer.text == QUESTION
        link.restore()


def test_reading_in_words():
    assert reading_words(1234) == "The verifier reads your text (1,234 tokens)…"
