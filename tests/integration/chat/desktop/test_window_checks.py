"""Answers that were written without the verifier: kept, asked on from, marked, and checked when it is back."""

from __future__ import annotations

import dataclasses

import pytest

from moa_chat.desktop import notices
from moa_chat.desktop.message_widgets import Answer
from moa_chat.desktop.offline_checks import OfflineChecks, corrected_words
from moa_chat.history.message import Message
from moa_chat.history.store import History
from moa_runtime.conversation import Unconfirmed
from moa_runtime.events import Disagreement, Origin, TextSpan
from moa_runtime.session.events import Sampling
from support.chat.desktop.window_driving import QUESTION, TOKEN, WAIT, ask, shown_messages, wait_for_answer

MORE = "And three more?"


def offline(qtbot, window) -> None:
    window.page.offline.click()
    qtbot.waitUntil(lambda: window.page.pill.accessibleDescription() == "working offline", timeout=WAIT)


def unconfirmed(window) -> list[int]:
    return [position for _, position in window.chats.history.unconfirmed()]


@pytest.fixture
def window(open_window, verifier, writing_bundle, qtbot):
    opened = open_window(server=verifier.url, token=TOKEN, bundle=str(writing_bundle), max_new_tokens=16)
    qtbot.waitUntil(opened.page.composer.is_ready, timeout=WAIT)
    return opened


def write_alone(qtbot, window, *texts: str) -> None:
    for text in texts:
        before = len(window.chats.messages)
        ask(qtbot, window, text)
        qtbot.waitUntil(lambda: len(window.chats.messages) == before + 2, timeout=WAIT)  # noqa: B023
        wait_for_answer(qtbot, window)
        assert window.chats.messages[-1].unconfirmed is not None
        assert "not confirmed yet" in window.chats.messages[-1].figures


def test_one_asks_on_without_the_verifier(window, qtbot):
    """Both answers are marked until it is back; then they are what it would have written."""
    ask(qtbot, window)
    first = wait_for_answer(qtbot, window)
    ask(qtbot, window, MORE)
    wanted = [QUESTION, first, MORE, wait_for_answer(qtbot, window)]
    window.chats.new_chat()
    offline(qtbot, window)
    write_alone(qtbot, window, QUESTION, MORE)
    assert unconfirmed(window) == [1, 3]
    written = [message.content for message in window.chats.messages]
    window.page.offline.click()
    qtbot.waitUntil(lambda: not unconfirmed(window) and bool(window.page.notice.text), timeout=WAIT)
    assert [message.content for message in window.chats.messages] == wanted
    assert shown_messages(window) == sorted(wanted)
    assert all(span.committed for message in window.chats.messages for span in message.spans)
    if written != wanted:
        assert "corrected" in window.page.notice.text
        window.page.notice.button.click()
        assert not window.page.notice.isVisible()
        assert [message.content for message in window.chats.messages] == written
        assert unconfirmed(window) == []


def test_the_next_program_checks(window, open_window, verifier, writing_bundle, qtbot):
    offline(qtbot, window)
    write_alone(qtbot, window, QUESTION)
    window.close()
    again = open_window(server=verifier.url, token=TOKEN, bundle=str(writing_bundle), max_new_tokens=16)
    qtbot.waitUntil(lambda: bool(again.page.notice.text), timeout=WAIT)
    assert unconfirmed(again) == []
    chat = again.chats.history.chats()[0].id
    assert all(span.committed for span in again.chats.history.messages(chat)[1].spans)


def test_stopping_keeps_what_was_written(window, qtbot):
    offline(qtbot, window)
    window.settings = dataclasses.replace(window.settings, max_new_tokens=300)
    ask(qtbot, window)
    qtbot.waitUntil(lambda: len(window.chats.messages[-1].content) > 5, timeout=WAIT)
    window.chats.stop()
    text = wait_for_answer(qtbot, window)
    mark = window.chats.messages[-1].unconfirmed
    assert len(text) > 5 and mark is not None and 0 < mark.most < 300
    assert window.chats.history.messages(window.chats.current)[1].unconfirmed == mark


def test_a_question_comes_before_a_check(window, qtbot):
    """The check is left, and made up for behind the answer."""
    chat = window.chats.history.create("Colours")
    mark = Unconfirmed(1, Sampling(), 400)
    for position, message in enumerate([Message("user", QUESTION), Message("assistant", "No.", unconfirmed=mark)]):
        window.chats.history.save(chat, position, message)
    window.chats.open_chat(chat)
    window.chats.check()
    assert not window.chats.busy and window.chats.statistics is not None
    ask(qtbot, window, MORE)
    qtbot.waitUntil(lambda: len(window.chats.messages) == 4 and not window.chats.busy, timeout=WAIT)
    assert window.chats.messages[2].content == MORE and window.chats.messages[3].content
    qtbot.waitUntil(lambda: unconfirmed(window) == [] and "corrected" in window.page.notice.text, timeout=WAIT)
    assert window.chats.messages[1].content != "No."
    widgets = [widget for widget in window.page.conversation.widgets if isinstance(widget, Answer)]
    assert [widget.message.content for widget in widgets] == [each.content for each in window.chats.messages[1::2]]


def test_an_answer_that_the_verifier_refuses_keeps_no_other_from_its_check(window, qtbot):
    """Nobody is told of it twice, and it stays as the device wrote it."""
    history, mark = window.chats.history, Unconfirmed(1, Sampling(), 16)
    chats = [history.create(title) for title in ("Colours", "Endless")]
    for chat, question in zip(chats, (QUESTION, "word " * 2000), strict=True):
        history.save(chat, 0, Message("user", question))
        history.save(chat, 1, Message("assistant", "None.", unconfirmed=mark))
    window.chats.open_chat(chats[1])
    window.chats.check()
    qtbot.waitUntil(lambda: unconfirmed(window) == [], timeout=WAIT)
    kept, checked = (history.messages(chat)[1] for chat in reversed(chats))
    assert kept.content == window.chats.messages[1].content == "None." and "not confirmed" in kept.figures
    assert checked.content != "None." and "not confirmed" not in checked.figures


def test_an_undo_of_corrected_words_waits_until_the_next_question(window, qtbot, monkeypatch):
    monkeypatch.setattr(notices, "_NOTICE_MS", 1)
    notice = window.page.notice
    notice.say("The chat was deleted.")
    qtbot.waitUntil(lambda: not notice.isVisible(), timeout=WAIT)
    window.chats.handle_disagreement(Disagreement(3, 12, "the device's words", "the server's words"))
    qtbot.wait(100)
    assert notice.isVisible()
    ask(qtbot, window)
    assert not notice.isVisible()
    wait_for_answer(qtbot, window)


def test_marks_outlive_the_program(profile):
    spans = (TextSpan("Red.", Origin.OFFLINE, False),)
    marked = Message("assistant", "Red.", spans, unconfirmed=Unconfirmed(1, Sampling(0.7, 0.9, 3), 64))
    history = History.open(profile.history_path)
    chat, other = history.create("Colours"), history.create("Others")
    for number in (chat, other):
        history.save(number, 0, Message("user", QUESTION))
        history.save(number, 1, marked)
    history.save(other, 1, Message("assistant", "Green."))
    history.close()
    history = History.open(profile.history_path)
    assert history.messages(chat)[1] == marked and history.unconfirmed() == [(chat, 1)]
    checking = OfflineChecks(history).next(None, "")
    assert checking is not None and (checking.question, checking.written) == (QUESTION, marked)
    history.delete(chat)
    assert history.unconfirmed() == [] and OfflineChecks(history).next(None, "") is None
    history.close()


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ("red, green and blue", 0),
        ("red, green and blue. And more.", 0),
        ("red, green and blue and more", 0),
        ("red, yellow and blue", 1),
        ("red", 3),
        ("yellow, or so, green and blue", 3),
        ("", 4),
    ],
)
def test_words_that_were_corrected(after, words):
    assert corrected_words(Message("assistant", "red, green and blue"), after) == words


def test_words_of_the_server_are_not_counted_as_the_devices():
    spans = [("red, ", Origin.DRAFTED, True), ("green ", Origin.OFFLINE, True), ("and blue", Origin.CORRECTED, True)]
    written = Message("assistant", "red, green and blue", tuple(TextSpan(*span) for span in spans))
    assert corrected_words(written, "yellow") == 1
    assert corrected_words(written, "pink, green or white") == 0
    assert corrected_words(written, "red, dark yellow and blue") == 2
