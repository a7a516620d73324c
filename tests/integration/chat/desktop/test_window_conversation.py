"""Questions and answers in the window, against a real verifier."""

from __future__ import annotations

import json

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFileDialog, QPushButton

from moa_chat import strings
from moa_chat.desktop.message_widgets import Question
from moa_chat.history.message import Message
from moa_runtime.events import FinishReason, LinkStatus
from support.chat.desktop.window_driving import (
    AWAY,
    MORE,
    QUESTION,
    TOKEN,
    answered,
    ask,
    can_draft,
    contents,
    has_confirmed,
    is_online,
    link_state,
    shown_messages,
    unconfirmed_text,
    wait_for_answer,
)

TWO_TURNS = ["user", "assistant"] * 2


def roles(window) -> list[str]:
    return [message.role for message in window.chats.messages]


@pytest.fixture
def linked(open_online, link):
    """Opens a window over a link that can be cut."""
    return lambda **settings: open_online(server=f"ws://127.0.0.1:{link.port}", token=TOKEN, **settings)


def test_a_question_is_answered_word_by_word(connected, steps, qtbot, until):
    ask(qtbot, connected)
    until(lambda: has_confirmed(connected))
    assert connected.chats.busy
    begun = "".join(span.text for span in connected.chats.messages[-1].spans if span.committed)
    steps.release(1000)
    text = wait_for_answer(qtbot, connected)
    assert text == connected.runtime.chat.messages[-1]["content"] and text.startswith(begun) and len(text) > len(begun)
    assert connected.page.composer.text == "" and connected.page.title.text() == QUESTION
    figures = connected.page.plot.figures
    assert "\xa0second" in figures.text() and "passes" in figures.text()
    assert not figures.isVisible(), "they are shown on request"
    assert connected.chats.messages[-1].figures in ("", strings.FINISH[FinishReason.LENGTH])
    connected.page.plot_button.click()
    assert figures.isVisible()


def test_a_second_question_continues_the_first_while_another_chat_is_read(connected, qtbot, until):
    first = answered(qtbot, connected)
    chat = connected.chats.current
    ask(qtbot, connected, MORE)
    connected.chats.new_chat()
    assert connected.chats.busy and shown_messages(connected) == []
    until(lambda: not connected.chats.busy)
    assert connected.chats.messages == []
    connected.chats.open_chat(chat)
    assert roles(connected) == TWO_TURNS and contents(connected.chats.messages)[:3] == [QUESTION, first, MORE]
    assert [message.turn for message in connected.chats.messages] == connected.runtime.chat.messages
    assert connected.chats.messages[3].content != ""


def test_escape_stops_at_once_even_if_the_link_hangs(linked, link, qtbot, until):
    window = linked(max_new_tokens=200)
    ask(qtbot, window)
    until(lambda: has_confirmed(window))
    link.cut()
    qtbot.keyClick(window.page.composer.field, Qt.Key.Key_Escape)
    stopped = wait_for_answer(qtbot, window)
    assert stopped and all(span.committed for span in window.chats.messages[-1].spans)
    assert strings.STOPPED in window.chats.messages[-1].figures
    link.restore()
    ask(qtbot, window, MORE)
    until(lambda: window.chats.messages[-1].content)
    qtbot.mouseClick(window.page.composer.button, Qt.MouseButton.LeftButton)
    wait_for_answer(qtbot, window)
    assert roles(window) == TWO_TURNS


def test_an_empty_chat_names_the_model_and_suggests_questions(connected, qtbot):
    conversation, composer = connected.page.conversation, connected.page.composer
    assert conversation.model.text().startswith(connected.runtime.chat.manifest.target)
    made = {button.text(): button for button in conversation.findChildren(QPushButton)}
    qtbot.mouseClick(made[strings.EXAMPLES[1]], Qt.MouseButton.LeftButton)
    assert composer.field.toPlainText() == strings.EXAMPLES[1] and connected.chats.messages == []


def test_an_edited_question_replaces_the_turns_after_it(connected, qtbot):
    first = answered(qtbot, connected)
    answered(qtbot, connected, MORE)
    question = connected.page.conversation.findChildren(Question)[0]
    qtbot.mouseClick(question.edit_button, Qt.MouseButton.LeftButton)
    question.editor.setPlainText("What is the capital of France?")
    qtbot.mouseClick(question.send_button, Qt.MouseButton.LeftButton)
    second = wait_for_answer(qtbot, connected)
    assert contents(connected.chats.messages) == ["What is the capital of France?", second]
    assert shown_messages(connected) == sorted(contents(connected.chats.messages))
    question = connected.page.conversation.findChildren(Question)[-1]
    question.begin_edit()
    question.editor.setPlainText(QUESTION)
    qtbot.mouseClick(question.send_button, Qt.MouseButton.LeftButton)
    # Greedy: the first question again has the first answer again.
    assert wait_for_answer(qtbot, connected) == first


def test_an_answer_is_written_again_and_copied(connected, qtbot):
    first = answered(qtbot, connected)
    asked = len(connected.runtime.chat.tokens)
    qtbot.keyClick(connected, Qt.Key.Key_R, Qt.KeyboardModifier.ControlModifier)
    assert connected.chats.busy and wait_for_answer(qtbot, connected) == first
    assert len(connected.runtime.chat.tokens) == asked and len(connected.chats.messages) == 2
    connected.page.conversation.copy_last()
    assert QGuiApplication.clipboard().text() == first


@pytest.mark.parametrize("edited", [True, False], ids=["edited", "again"])
def test_old_turns_stay_until_a_new_answer_has_its_first_words(connected, qtbot, until, edited):
    """Giving up loses nothing, in the window and on disk."""
    before = [QUESTION, answered(qtbot, connected)]
    connected.page.offline.click()
    until(lambda: connected.runtime.chat.status is LinkStatus.OFFLINE)
    connected.chats.edit(0, "Something else?") if edited else connected.chats.again()
    assert connected.chats.busy and contents(connected.chats.messages)[1:] not in ([], before[1:])
    assert contents(connected.chats.history.messages(connected.chats.current)) == before
    connected.chats.stop()
    until(lambda: not connected.chats.busy)
    assert contents(connected.chats.messages) == before
    until(lambda: shown_messages(connected) == sorted(before))
    assert connected.page.composer.text == ("Something else?" if edited else "")


def test_an_answer_survives_a_cut_link_and_is_reconciled(linked, link, steps, qtbot, until):
    window = linked(max_new_tokens=60)
    stored = window.chats.history
    ask(qtbot, window)

    def newest() -> Message:
        return stored.messages(window.chats.current)[-1]

    until(lambda: can_draft(window))
    link.cut()
    until(lambda: len(unconfirmed_text(window)) > 20)
    assert not is_online(window)
    until(lambda: newest().content)  # before the answer's end, which cannot come now
    assert not newest().finished or newest().unconfirmed  # if the device came to an end
    steps.release(1000)
    link.restore()
    until(lambda: not stored.unconfirmed() and newest().finished)
    text = wait_for_answer(qtbot, window)
    assert all(span.committed for span in window.chats.messages[-1].spans)
    assert text == window.runtime.chat.messages[-1]["content"]
    until(lambda: is_online(window))


def test_a_new_question_waits_for_the_verifier_if_there_is_no_writer(connected, qtbot, until):
    connected.page.offline.click()
    until(lambda: link_state(connected) == "working offline")
    waiting = []
    connected.chats.waiting.connect(waiting.append)
    ask(qtbot, connected)
    until(lambda: waiting)
    assert connected.chats.busy and connected.chats.messages[-1].content == ""
    connected.page.offline.click()
    assert wait_for_answer(qtbot, connected)


def test_a_conversation_is_there_after_closing(connected, open_window, qtbot, until):
    text = answered(qtbot, connected)
    spans = connected.chats.messages[-1].spans
    connected.close()
    again = open_window(server=AWAY)
    assert [item.text() for item in again.list.items()] == [QUESTION]
    again.list.list.itemActivated.emit(again.list.items()[0])
    assert contents(again.chats.messages) == [QUESTION, text] and again.chats.messages[-1].spans == spans
    until(lambda: shown_messages(again) == sorted([QUESTION, text]))


def test_turns_from_before_a_crash_are_shown_and_can_be_asked_again(away):
    history = away.chats.history
    unanswered, interrupted = history.create("Unanswered"), history.create("Interrupted")
    history.save(unanswered, 0, Message("user", QUESTION))
    history.replace(interrupted, 0, [Message("user", QUESTION), Message("assistant", "Red and", finished=False)])
    assert history.unfinished() == [(interrupted, 1)]
    away.chats.open_chat(interrupted)
    assert away.chats.messages[-1].figures == strings.INTERRUPTED
    away.chats.open_chat(unanswered)
    assert away.page.composer.text == QUESTION and away.chats.messages == []


def test_a_start_opens_the_chat_whose_answer_was_interrupted(away, open_window):
    """Unless another chat has been used since."""
    history = away.chats.history
    interrupted = history.create("Interrupted")
    history.replace(interrupted, 0, [Message("user", QUESTION), Message("assistant", "Red and", finished=False)])
    away.close()
    again = open_window(server=AWAY)
    assert again.chats.current == interrupted and contents(again.chats.messages) == [QUESTION, "Red and"]
    history = again.chats.history
    history.replace(history.create("Later"), 0, [Message("user", MORE), Message("assistant", "Blue.")])
    again.close()
    assert open_window(server=AWAY).chats.current is None


@pytest.mark.parametrize("kept", [True, False], ids=["chat kept", "chat gone"])
def test_an_answer_under_way_is_continued_in_the_next_window_if_its_chat_is_there(
    open_online, profile, qtbot, until, kept
):
    """What the next window shows in the end is what one window would have."""
    first = open_online(max_new_tokens=300)
    whole = answered(qtbot, first)
    ask(qtbot, first, MORE)
    until(lambda: first.chats.messages[3:] and first.chats.messages[3].content)
    assert first.chats.busy
    first.close()
    if not kept:
        profile.history_path.unlink()
    again = open_online(max_new_tokens=300)
    if not kept:
        assert again.runtime.chat.pending() is not None and not again.chats.busy
        assert answered(qtbot, again) and len(again.chats.messages) == 2
        return
    until(lambda: len(again.chats.messages) == 4)
    answer = wait_for_answer(qtbot, again)
    assert contents(again.chats.messages) == [QUESTION, whole, MORE, answer]
    assert again.chats.messages[-1].finished and again.chats.messages[-1].figures != strings.INTERRUPTED
    assert again.runtime.chat.messages[-1]["content"] == answer
    again.chats.again()
    assert wait_for_answer(qtbot, again) == answer


def test_another_verifier_gets_the_store_of_the_first(connected, profile, qtbot, until):
    before = connected.runtime.chat
    connected.connector.connect_as(connected.settings)
    until(lambda: connected.runtime.chat is not before)
    until(lambda: connected.runtime.chat._saver.keeps)
    answered(qtbot, connected)
    until(lambda: QUESTION in profile.answer_path.read_text())


def test_a_chat_is_saved_as_a_file(connected, qtbot, monkeypatch, tmp_path):
    text = answered(qtbot, connected)
    for name, kind in (("chat.md", "Markdown (*.md)"), ("chat", "JSON (*.json)"), ("none/chat.md", "")):
        monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_, n=name, k=kind: (str(tmp_path / n), k))
        qtbot.mouseClick(connected.page.export, Qt.MouseButton.LeftButton)
        path = tmp_path / (f"{name}.json" if name == "chat" else name)
        failed = strings.SAVE_FAILED.format(path, "No such file or directory")
        assert connected.page.notice.text == (strings.SAVED_AS.format(path) if kind else failed)
    assert (tmp_path / "chat.md").read_text().endswith(f"## Assistant\n\n{text.strip()}\n")
    assert json.loads((tmp_path / "chat.json").read_text())["messages"][1]["content"] == text


def test_a_chat_is_found_by_its_words(away, qtbot, until):
    for question in (QUESTION, "Where do foxes live?"):
        away.chats.history.save(away.chats.history.create(question), 0, Message("user", question))
    qtbot.keyClicks(away.list.search, "FOXES")
    until(lambda: [item.text() for item in away.list.items()] == ["Where do foxes live?"])
    away.list.search.clear()
    until(lambda: len(away.list.items()) == 2)


def test_the_window_lives_while_a_dead_link_hangs(open_window, link, qtbot, until):
    link.cut()
    window = open_window(server=f"ws://127.0.0.1:{link.port}", token=TOKEN)
    qtbot.keyClicks(window.page.composer.field, QUESTION)
    assert window.page.composer.text == QUESTION and not window.page.composer.is_ready()
    assert link_state(window) == strings.CONNECTING_STATE
    link.restore()
    until(window.page.composer.is_ready)
    qtbot.keyClick(window.page.composer.field, Qt.Key.Key_Return)
    assert wait_for_answer(qtbot, window)
