"""Answers that were cut off go on."""

from __future__ import annotations

import dataclasses

import pytest
from PySide6.QtCore import Qt

from moa_chat.desktop.message_widgets import Answer
from moa_chat.history.message import Message
from moa_runtime.session.events import Sampling
from support.chat.desktop.window_driving import TOKEN, WAIT, ask, shown_messages, wait_for_answer

LONG = {"recommended": False, "temperature": 0.9, "top_p": 0.95}


def last_answer(window) -> Answer:
    return [widget for widget in window.page.conversation.widgets if isinstance(widget, Answer)][-1]


def at_most(window, tokens: int) -> None:
    """The longest answer of the open chat."""
    window.chats.change_settings(dataclasses.replace(window.chats.settings, max_new_tokens=tokens))


@pytest.mark.parametrize("settings", [{}, LONG], ids=["greedy", "sampled"])
def test_a_cut_off_answer_becomes_what_a_larger_limit_gives(open_window, verifier, options, settings, qtbot):
    options.seed = 1
    window = open_window(server=verifier.url, token=TOKEN, max_new_tokens=40, **settings)
    qtbot.waitUntil(window.page.composer.is_ready, timeout=WAIT)
    ask(qtbot, window)
    whole = wait_for_answer(qtbot, window)
    window.new_chat()
    at_most(window, 17)
    ask(qtbot, window)
    cut = wait_for_answer(qtbot, window)
    assert whole.startswith(cut) and cut != whole
    assert window.chats.messages[-1].figures == "cut off at the length limit"
    button = last_answer(window).continue_button
    assert button.isVisible() and button.text().strip() == "Continue"
    at_most(window, 23)
    spans = window.chats.messages[-1].spans
    qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
    assert window.chats.busy and not button.isVisible()
    assert wait_for_answer(qtbot, window) == whole
    message = window.chats.messages[-1]
    assert "".join(span.text for span in message.spans) == whole and message.spans[: len(spans) - 1] == spans[:-1]
    assert window.chats.history.messages(window.chats.current)[1] == message
    assert len(window.chats.messages) == 2 and whole in shown_messages(window)


def test_a_stored_answer_goes_on_in_another_window_and_is_stopped(open_window, verifier, qtbot):
    first = open_window(server=verifier.url, token=TOKEN, max_new_tokens=12)
    qtbot.waitUntil(first.page.composer.is_ready, timeout=WAIT)
    ask(qtbot, first)
    cut = wait_for_answer(qtbot, first)
    chat = first.chats.current
    first.close()
    window = open_window(server=verifier.url, token=TOKEN, max_new_tokens=400)
    qtbot.waitUntil(window.page.composer.is_ready, timeout=WAIT)
    window.chats.open_chat(chat)
    qtbot.keyClick(window, Qt.Key.Key_R, Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier)
    qtbot.waitUntil(lambda: len(window.chats.messages[-1].content) > len(cut) + 10, timeout=WAIT)
    window.chats.stop()
    stopped = wait_for_answer(qtbot, window)
    assert stopped.startswith(cut) and len(stopped) > len(cut)
    assert window.runtime.chat.messages[-1]["content"].startswith(stopped)  # half a character may follow


def test_only_the_last_answer_and_only_one_that_was_cut_off_goes_on(open_window):
    window = open_window(server="ws://127.0.0.1:9")
    cut = Message("assistant", "Red", cut_off=Sampling())
    window.page.conversation.show_messages([Message("user", "A"), cut, Message("user", "B"), cut])
    answers = [widget for widget in window.page.conversation.widgets if isinstance(widget, Answer)]
    assert [answer.continue_button.isVisibleTo(answer) for answer in answers] == [False, True]
    window.page.conversation.set_message(3, dataclasses.replace(cut, cut_off=None))
    assert not answers[1].continue_button.isVisibleTo(answers[1])
    window.chats.continue_answer()
    assert not window.chats.busy


def test_how_it_was_sampled_is_stored(open_window):
    history = open_window().chats.history
    chat = history.create("Colours")
    cut = Message("assistant", "Red", cut_off=Sampling(0.2, 0.9, 7))
    history.save(chat, 0, Message("user", "A"))
    history.save(chat, 1, cut)
    assert history.messages(chat)[1] == cut
