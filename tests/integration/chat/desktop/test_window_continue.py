"""Answers that were cut off are continued."""

from __future__ import annotations

import dataclasses

import pytest
from PySide6.QtCore import Qt

from moa_chat import strings
from moa_chat.history.message import Message
from moa_runtime.events import FinishReason
from moa_runtime.session.events import Sampling
from support.chat.desktop.window_driving import answered, answers_of, shown_messages, wait_for_answer


def at_most(window, tokens: int) -> None:
    """Set the longest answer of the open chat."""
    window.chats.change_settings(dataclasses.replace(window.chats.settings, max_new_tokens=tokens))


@pytest.mark.parametrize("settings", [{}, {"recommended": False, "temperature": 0.9, "top_p": 0.95}])
def test_a_cut_off_answer_becomes_what_a_larger_limit_gives(open_online, options, settings, qtbot):
    options.seed = 1
    window = open_online(max_new_tokens=40, **settings)
    whole = answered(qtbot, window)
    window.new_chat()
    at_most(window, 17)
    cut = answered(qtbot, window)
    assert whole.startswith(cut) and cut != whole
    assert window.chats.messages[-1].figures == strings.FINISH[FinishReason.LENGTH]
    button = answers_of(window)[-1].continue_button
    assert button.isVisible() and button.text().strip() == strings.CONTINUE
    at_most(window, 23)
    spans = window.chats.messages[-1].spans
    qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
    assert window.chats.busy and not button.isVisible()
    assert wait_for_answer(qtbot, window) == whole
    message = window.chats.messages[-1]
    assert "".join(span.text for span in message.spans) == whole and message.spans[: len(spans) - 1] == spans[:-1]
    assert window.chats.history.messages(window.chats.current)[1] == message
    assert len(window.chats.messages) == 2 and whole in shown_messages(window)


def test_a_stored_answer_is_continued_in_another_window_and_stopped(open_online, qtbot, until):
    first = open_online(max_new_tokens=12)
    cut, chat = answered(qtbot, first), first.chats.current
    first.close()
    window = open_online(max_new_tokens=400)
    window.chats.open_chat(chat)
    qtbot.keyClick(window, Qt.Key.Key_R, Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier)
    until(lambda: len(window.chats.messages[-1].content) > len(cut) + 10)
    window.chats.stop()
    stopped = wait_for_answer(qtbot, window)
    assert stopped.startswith(cut) and len(stopped) > len(cut)
    assert window.runtime.chat.messages[-1]["content"].startswith(stopped)  # half a character may follow


def test_only_the_last_answer_and_only_one_that_was_cut_off_is_continued(away):
    cut = Message("assistant", "Red", cut_off=Sampling(0.2, 0.9, 7))
    history = away.chats.history
    chat = history.create("Colours")
    history.replace(chat, 0, [Message("user", "A"), cut, Message("user", "B"), cut])
    assert history.messages(chat)[1] == cut, "its sampling is stored"
    away.chats.open_chat(chat)
    answers = answers_of(away)
    assert [answer.continue_button.isVisibleTo(answer) for answer in answers] == [False, True]
    away.page.conversation.set_message(3, dataclasses.replace(cut, cut_off=None))
    assert not answers[1].continue_button.isVisibleTo(answers[1])
