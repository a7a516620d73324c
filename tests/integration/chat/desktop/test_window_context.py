"""The context's meter, and what a user reads while waiting."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt

from moa_chat import strings
from moa_chat.desktop.chat_page import ContextMeter
from support.chat.desktop.window_driving import QUESTION, TOKEN, answered, answers_of, ask, is_online


@pytest.mark.parametrize(
    ("used", "limit", "words"),
    [
        (0, 0, ""),
        (100, 0, ""),
        (499, 1000, ""),
        (620, 1000, strings.CONTEXT_FILLED.format(62)),
        (850, 1000, strings.CONTEXT_FULL.format(85)),
        (2000, 1000, strings.CONTEXT_FULL.format(100)),
    ],
)
def test_the_meter_is_hidden_until_half_of_the_context_is_full(qtbot, appearance, used, limit, words):
    meter = ContextMeter(appearance)
    qtbot.addWidget(meter)
    meter.show_use(used, limit)
    assert meter.isHidden() is not bool(words) and (not words or meter.text() == words)
    assert meter.accessibleDescription() == strings.CONTEXT_TOKENS.format(used, limit)


def test_the_meter_follows_the_open_chat(connected, qtbot, until):
    seen, written = [], []

    def note(used: int, limit: int) -> None:
        seen.append((used, limit))
        if (answering := connected.chats._answering) is not None:
            written.append((used, connected.runtime.prompt_tokens + answering.tokens))

    connected.chats.context_changed.connect(note)
    answered(qtbot, connected)
    chat, limit = connected.runtime.chat, connected.runtime.chat.manifest.max_context
    assert seen[-1] == (len(chat.tokens), limit)
    # How many updates one tick of the window holds is luck; each tick shows what it has taken, no more.
    assert written and all(shown == taken for shown, taken in written)
    assert written[0][0] > connected.runtime.prompt_tokens
    number = connected.chats.current
    connected.new_chat()
    until(lambda: seen[-1] == (0, limit))
    connected.chats.open_chat(number)
    turns = [message.turn for message in connected.chats.messages]
    until(lambda: seen[-1] == (len(chat.tokenizer.encode_chat(turns, False)), limit))


def test_the_reading_verifier_is_named_and_can_be_given_up(open_online, link, qtbot, until):
    window = open_online(server=f"ws://127.0.0.1:{link.port}", token=TOKEN)
    until(lambda: is_online(window))
    link.cut()  # from here on it is as if the target read without end
    ask(qtbot, window)
    answer = answers_of(window)[-1]
    assert not answer.cancel_button.isVisible()
    until(lambda: answer.waiting == strings.READING_TOKENS.format(window.runtime.chat.new_tokens))
    qtbot.mouseClick(answer.cancel_button, Qt.MouseButton.LeftButton)
    until(lambda: not window.chats.busy)
    assert window.chats.messages == [] and window.page.composer.text == QUESTION
    link.restore()
