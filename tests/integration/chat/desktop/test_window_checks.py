"""Answers that were written without the verifier: kept, marked, and checked when it is back."""

from __future__ import annotations

import dataclasses

import pytest

from moa_chat import strings
from moa_chat.desktop import notices
from moa_chat.desktop.offline_checks import AnswerCheck, corrected_words, with_confirmed_origins
from moa_chat.desktop.streaming_answer import StreamingAnswer
from moa_chat.history.message import Message
from moa_runtime.conversation import Unconfirmed
from moa_runtime.events import Disagreement, Origin, TextSpan
from moa_runtime.session.events import Sampling
from support.chat.desktop.window_driving import (
    MORE,
    QUESTION,
    answered,
    answers_of,
    ask,
    contents,
    link_state,
    shown_messages,
    wait_for_answer,
)

MARK = Unconfirmed(1, Sampling(), 16)


def unconfirmed(window) -> list[int]:
    return [position for _, position in window.chats.history.unconfirmed()]


@pytest.fixture
def alone(qtbot, until):
    """Works offline, and asks: each answer is the device's, and marked."""

    def write_alone(window, *texts: str) -> None:
        window.page.offline.click()
        until(lambda: link_state(window) == "working offline")
        for text in texts:
            words = len(answered(qtbot, window, text).split())
            assert window.chats.messages[-1].unconfirmed is not None
            said = strings.UNCONFIRMED_WORD if words == 1 else strings.UNCONFIRMED_WORDS.format(words)
            assert window.chats.messages[-1].figures == said

    return write_alone


def test_one_asks_on_without_the_verifier(writing, alone, qtbot, until):
    """Both answers are marked until it is back; then they are what it would have written."""
    wanted = [QUESTION, answered(qtbot, writing), MORE, answered(qtbot, writing, MORE)]
    writing.chats.new_chat()
    alone(writing, QUESTION, MORE)
    assert unconfirmed(writing) == [1, 3]
    written = contents(writing.chats.messages)
    writing.page.offline.click()
    until(lambda: not unconfirmed(writing) and writing.page.notice.text)
    assert contents(writing.chats.messages) == wanted and shown_messages(writing) == sorted(wanted)
    assert all(span.committed for message in writing.chats.messages for span in message.spans)
    if written != wanted:
        writing.page.notice.button.click()
        assert not writing.page.notice.isVisible()
        assert contents(writing.chats.messages) == written and unconfirmed(writing) == []


def test_stopping_keeps_what_was_written(writing, alone, qtbot, until):
    alone(writing)
    writing.settings = dataclasses.replace(writing.settings, max_new_tokens=300)
    ask(qtbot, writing)
    until(lambda: len(writing.chats.messages[-1].content) > 5)
    writing.chats.stop()
    text = wait_for_answer(qtbot, writing)
    mark = writing.chats.messages[-1].unconfirmed
    assert len(text) > 5 and mark is not None and 0 < mark.most < 300
    assert writing.chats.history.messages(writing.chats.current)[1].unconfirmed == mark


def test_a_question_comes_before_a_check(writing, qtbot, until):
    """The check is left, and made after the answer."""
    history = writing.chats.history
    chat = history.create("Colours")
    mark = Unconfirmed(1, Sampling(), 400)
    history.replace(chat, 0, [Message("user", QUESTION), Message("assistant", "No.", unconfirmed=mark)])
    writing.chats.open_chat(chat)
    writing.chats.check()
    assert not writing.chats.busy
    ask(qtbot, writing, MORE)
    until(lambda: len(writing.chats.messages) == 4 and not writing.chats.busy)
    assert writing.chats.messages[2].content == MORE and writing.chats.messages[3].content
    until(lambda: unconfirmed(writing) == [] and writing.page.notice.button.text() == strings.UNDO)
    assert writing.chats.messages[1].content != "No."
    assert [answer.message.content for answer in answers_of(writing)] == contents(writing.chats.messages[1::2])


def test_an_answer_that_the_verifier_refuses_keeps_no_other_from_its_check(writing, until):
    """It is reported once, and stays as the device wrote it."""
    history = writing.chats.history
    chats = [history.create(title) for title in ("Colours", "Endless")]
    for chat, question in zip(chats, (QUESTION, "word " * 2000), strict=True):
        history.replace(chat, 0, [Message("user", question), Message("assistant", "None.", unconfirmed=MARK)])
    writing.chats.open_chat(chats[1])
    writing.chats.check()
    until(lambda: unconfirmed(writing) == [])
    kept, checked = (history.messages(chat)[1] for chat in reversed(chats))
    assert kept.content == writing.chats.messages[1].content == "None." and kept.figures == strings.AS_WRITTEN
    assert checked.content != "None." and strings.AS_WRITTEN not in checked.figures


def test_an_undo_of_corrected_words_stays_until_the_next_question(connected, qtbot, until, monkeypatch):
    monkeypatch.setattr(notices, "_NOTICE_MS", 1)
    notice = connected.page.notice
    notice.say("SHORT")
    until(lambda: not notice.isVisible())
    connected.chats.handle_disagreement(Disagreement(3, 12, "the device's words", "the server's words"))
    assert notice.isVisible() and not notice._clock.isActive()
    ask(qtbot, connected)
    assert not notice.isVisible()
    wait_for_answer(qtbot, connected)


MIXED = [("red, ", Origin.DRAFTED, True), ("green ", Origin.OFFLINE, True), ("and blue", Origin.CORRECTED, True)]


@pytest.mark.parametrize(
    ("after", "words", "of_the_device"),
    [
        ("red, green and blue", 0, 0),
        ("red, green and blue. And more.", 0, 0),
        ("red, green and blue and more", 0, 0),
        ("red, yellow and blue", 1, 1),
        ("red", 3, 1),
        ("yellow, or so, green and blue", 3, 0),
        ("pink, green or white", 3, 0),
        ("red, dark yellow and blue", 2, 1),
        ("a very long other answer of the server", 4, 1),
        ("", 4, 1),
    ],
)
def test_only_words_of_the_device_count_as_corrected(after, words, of_the_device):
    assert corrected_words(Message("assistant", "red, green and blue"), after) == words
    mixed = Message("assistant", "red, green and blue", tuple(TextSpan(*span) for span in MIXED))
    assert corrected_words(mixed, after) == of_the_device


def test_words_that_the_server_confirmed_before_it_went_away_are_not_counted():
    answer = StreamingAnswer(1, 1, QUESTION, Sampling())
    spans = (TextSpan("red, ", Origin.DRAFTED, True), TextSpan("green", Origin.OFFLINE, False))
    answer.message = Message("assistant", "red, green", spans)
    answer.set_aside("red, green and blue", MARK)
    assert answer.message.figures == strings.UNCONFIRMED_WORDS.format(3)


def test_a_check_shows_the_stored_answer_until_its_end_and_keeps_the_servers_origins():
    spans = (TextSpan("red, ", Origin.DRAFTED, True), TextSpan("green and", Origin.OFFLINE, False))
    written = Message("assistant", "red, green and", spans, unconfirmed=MARK)
    checking = AnswerCheck(1, 1, QUESTION, written)
    checking.message = Message("assistant", "red, ")
    assert checking.shown == dataclasses.replace(written, figures=strings.CHECKING)
    alone = (TextSpan("red, green ", Origin.KEPT, True), TextSpan("or white", Origin.CORRECTED, True))
    origins = with_confirmed_origins(alone, written)
    assert origins == (spans[0], TextSpan("green ", Origin.KEPT, True), alone[1])
    assert with_confirmed_origins(alone, dataclasses.replace(written, spans=())) == alone
