"""Questions and answers in the window, against a real verifier."""

from __future__ import annotations

import json
import threading

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFileDialog

from moa_bench.link import with_round_trip
from moa_bench.link.proxy import background_link
from moa_chat.desktop.message_widgets import Question
from moa_chat.history.message import Message
from moa_chat.history.store import History
from moa_runtime.events import LinkStatus, Origin
from support.chat.desktop.window_driving import QUESTION, TOKEN, WAIT, ask, shown_messages, wait_for_answer


def test_a_question_is_answered_word_by_word(connected, engine, qtbot, monkeypatch):
    steps, step_now = threading.Semaphore(2), engine.step_now  # the prompt, and one round

    def when_let(requests):
        steps.acquire()
        return step_now(requests)

    monkeypatch.setattr(engine, "step_now", when_let)
    ask(qtbot, connected)
    qtbot.waitUntil(lambda: any(span.committed for span in connected.chats.messages[-1].spans), timeout=WAIT)
    assert connected.chats.busy
    begun = "".join(span.text for span in connected.chats.messages[-1].spans if span.committed)
    steps.release(1000)
    text = wait_for_answer(qtbot, connected)
    assert [message.role for message in connected.chats.messages] == ["user", "assistant"]
    assert text == connected.runtime.chat.messages[-1]["content"] != ""
    assert text.startswith(begun) and len(text) > len(begun)
    assert connected.page.composer.text == "" and connected.page.title.text() == QUESTION
    figures = connected.page.plot.figures
    assert "words\xa0a\xa0second" in figures.text() and "passes" in figures.text()
    assert not figures.isVisible(), "who wants figures asks for them"
    assert connected.chats.messages[-1].figures in ("", "cut off at the length limit")
    connected.page.plot_button.click()
    assert figures.isVisible()


def test_a_second_question_continues_the_first(connected, qtbot):
    ask(qtbot, connected)
    wait_for_answer(qtbot, connected)
    ask(qtbot, connected, "And now?")
    wait_for_answer(qtbot, connected)
    assert [turn["role"] for turn in connected.runtime.chat.messages] == ["user", "assistant"] * 2
    assert [message.turn for message in connected.chats.messages] == connected.runtime.chat.messages


def test_escape_stops_at_once_even_when_the_link_hangs(open_window, verifier, qtbot):
    with background_link(with_round_trip(10), "127.0.0.1", verifier.port) as link:
        window = open_window(server=f"ws://127.0.0.1:{link.port}", token=TOKEN, max_new_tokens=200)
        qtbot.waitUntil(window.page.composer.is_ready, timeout=WAIT)
        ask(qtbot, window)
        qtbot.waitUntil(lambda: any(span.committed for span in window.chats.messages[-1].spans), timeout=WAIT)
        link.cut()
        qtbot.keyClick(window.page.composer.field, Qt.Key.Key_Escape)
        stopped = wait_for_answer(qtbot, window)
        assert stopped and all(span.committed for span in window.chats.messages[-1].spans)
        assert "stopped" in window.chats.messages[-1].figures
        link.restore()
        ask(qtbot, window, "Go on.")
        qtbot.waitUntil(lambda: len(window.chats.messages[-1].content) > 0, timeout=WAIT)
        qtbot.mouseClick(window.page.composer.button, Qt.MouseButton.LeftButton)
        wait_for_answer(qtbot, window)
        assert [message.role for message in window.chats.messages] == ["user", "assistant"] * 2


def test_an_edited_question_replaces_what_followed(connected, qtbot):
    ask(qtbot, connected)
    first = wait_for_answer(qtbot, connected)
    ask(qtbot, connected, "And now?")
    wait_for_answer(qtbot, connected)
    question = connected.page.conversation.findChildren(Question)[0]
    qtbot.mouseClick(question.edit_button, Qt.MouseButton.LeftButton)
    question.editor.setPlainText("What is the capital of France?")
    qtbot.mouseClick(question.send_button, Qt.MouseButton.LeftButton)
    second = wait_for_answer(qtbot, connected)
    assert [message.content for message in connected.chats.messages] == ["What is the capital of France?", second]
    assert shown_messages(connected) == sorted(["What is the capital of France?", second])
    question = connected.page.conversation.findChildren(Question)[-1]
    question.begin_edit()
    question.editor.setPlainText(QUESTION)
    qtbot.mouseClick(question.send_button, Qt.MouseButton.LeftButton)
    # Greedy: the first question again has the first answer again.
    assert wait_for_answer(qtbot, connected) == first


def test_an_answer_is_written_again_and_copied(connected, qtbot):
    ask(qtbot, connected)
    first = wait_for_answer(qtbot, connected)
    asked = len(connected.runtime.chat.tokens)
    qtbot.keyClick(connected, Qt.Key.Key_R, Qt.KeyboardModifier.ControlModifier)
    assert connected.chats.busy
    assert wait_for_answer(qtbot, connected) == first
    assert len(connected.runtime.chat.tokens) == asked and len(connected.chats.messages) == 2
    connected.page.conversation.copy_last()
    assert QGuiApplication.clipboard().text() == first


@pytest.mark.parametrize("edited", [True, False], ids=["edited", "again"])
def test_old_turns_stay_until_a_new_answer_has_its_first_words(open_window, verifier, profile, qtbot, edited):
    """Giving up loses nothing, in the window and on disk."""
    with background_link(with_round_trip(10), "127.0.0.1", verifier.port) as link:
        window = open_window(server=f"ws://127.0.0.1:{link.port}", token=TOKEN)
        qtbot.waitUntil(window.page.composer.is_ready, timeout=WAIT)
        ask(qtbot, window)
        first = wait_for_answer(qtbot, window)
        window.page.offline.click()
        qtbot.waitUntil(lambda: window.runtime.chat.status is LinkStatus.OFFLINE, timeout=WAIT)
        if edited:
            window.chats.edit(0, "Something else?")
        else:
            window.chats.again()
        assert window.chats.busy and len(window.chats.messages) == 2 and window.chats.messages[1].content != first
        assert [message.content for message in window.chats.history.messages(window.chats.current)] == [QUESTION, first]
        window.chats.stop()
        qtbot.waitUntil(lambda: not window.chats.busy, timeout=WAIT)
        assert [message.content for message in window.chats.messages] == [QUESTION, first]
        qtbot.waitUntil(lambda: shown_messages(window) == sorted([QUESTION, first]), timeout=WAIT)
        assert window.page.composer.text == ("Something else?" if edited else "")


def test_a_cut_link_is_written_through_and_reconciled(open_window, verifier, qtbot):
    with background_link(with_round_trip(10), "127.0.0.1", verifier.port) as link:
        window = open_window(server=f"ws://127.0.0.1:{link.port}", token=TOKEN, max_new_tokens=60)
        qtbot.waitUntil(window.page.composer.is_ready, timeout=WAIT)
        ask(qtbot, window)

        def tentative() -> str:
            spans = window.chats.messages[-1].spans
            return "".join(span.text for span in spans if span.origin is Origin.OFFLINE and not span.committed)

        qtbot.waitUntil(lambda: any(span.committed for span in window.chats.messages[-1].spans), timeout=WAIT)
        link.cut()
        qtbot.waitUntil(lambda: len(tentative()) > 20, timeout=WAIT)
        assert window.page.pill.accessibleDescription() not in ("online", "slow")
        stored = window.chats.history
        # Before the answer's end, which cannot come now.
        qtbot.waitUntil(lambda: stored.messages(window.chats.current)[-1].content != "", timeout=WAIT)
        newest = stored.messages(window.chats.current)[-1]
        assert not newest.finished or newest.unconfirmed  # where the device came to an end
        link.restore()
        qtbot.waitUntil(
            lambda: not stored.unconfirmed() and stored.messages(window.chats.current)[-1].finished, timeout=WAIT
        )
        text = wait_for_answer(qtbot, window)
        assert all(span.committed for span in window.chats.messages[-1].spans)
        assert text == window.runtime.chat.messages[-1]["content"]
        qtbot.waitUntil(lambda: window.page.pill.accessibleDescription() in ("online", "slow"), timeout=WAIT)


def test_working_offline_on_purpose(open_window, verifier, writing_bundle, qtbot):
    window = open_window(server=verifier.url, token=TOKEN, bundle=str(writing_bundle), max_new_tokens=24)
    qtbot.waitUntil(window.page.composer.is_ready, timeout=WAIT)
    ask(qtbot, window)
    before = wait_for_answer(qtbot, window)
    window.page.offline.click()
    qtbot.waitUntil(lambda: window.page.pill.accessibleDescription() == "working offline", timeout=WAIT)
    ask(qtbot, window, "And now?")
    qtbot.waitUntil(lambda: len(window.chats.messages[-1].content) > 10, timeout=WAIT)
    assert all(span.origin is Origin.OFFLINE for span in window.chats.messages[-1].spans)
    window.page.offline.click()
    qtbot.waitUntil(lambda: all(span.committed for span in window.chats.messages[-1].spans), timeout=WAIT)
    wait_for_answer(qtbot, window)
    assert window.chats.messages[1].content == before


def test_without_a_writer_a_new_question_waits_for_the_verifier(connected, qtbot):
    connected.page.offline.click()
    qtbot.waitUntil(lambda: connected.page.pill.accessibleDescription() == "working offline", timeout=WAIT)
    ask(qtbot, connected)
    qtbot.wait(300)
    assert connected.chats.busy and connected.chats.messages[-1].content == ""
    connected.page.offline.click()
    assert wait_for_answer(qtbot, connected)


def test_what_was_written_is_there_after_closing(connected, open_window, qtbot):
    ask(qtbot, connected)
    text = wait_for_answer(qtbot, connected)
    spans = connected.chats.messages[-1].spans
    connected.close()
    again = open_window(server="ws://127.0.0.1:9")
    assert [item.text() for item in again.list.items()] == [QUESTION]
    again.list.list.itemActivated.emit(again.list.items()[0])
    assert [message.content for message in again.chats.messages] == [QUESTION, text]
    assert again.chats.messages[-1].spans == spans
    qtbot.waitUntil(lambda: shown_messages(again) == sorted([QUESTION, text]), timeout=WAIT)


def test_what_a_crash_left_is_shown_and_can_be_asked_again(open_window, profile, qtbot):
    history = History.open(profile.history_path)
    unanswered, interrupted = history.create("Unanswered"), history.create("Interrupted")
    for chat in (unanswered, interrupted):
        history.save(chat, 0, Message("user", QUESTION))
    history.save(interrupted, 1, Message("assistant", "Red and", finished=False))
    history.close()
    window = open_window(server="ws://127.0.0.1:9")
    assert window.chats.history.unfinished() == [(interrupted, 1)]
    window.chats.open_chat(interrupted)
    assert window.chats.messages[-1].figures == "interrupted"
    window.chats.open_chat(unanswered)
    assert window.page.composer.text == QUESTION and window.chats.messages == []


def test_an_answer_under_way_goes_on_in_the_next_window(open_window, verifier, qtbot):
    """Closed in the middle; what the next window shows in the end is what one window would have."""
    where = {"server": f"ws://127.0.0.1:{verifier.port}", "token": TOKEN, "max_new_tokens": 300}
    first = open_window(**where)
    qtbot.waitUntil(lambda: first.runtime.chat is not None, timeout=WAIT)
    ask(qtbot, first)
    whole = wait_for_answer(qtbot, first)
    ask(qtbot, first, "And why?")
    qtbot.waitUntil(lambda: bool(first.chats.messages[3:] and first.chats.messages[3].content), timeout=WAIT)
    assert first.chats.busy
    first.close()
    again = open_window(**where)
    assert again.chats.messages == []
    qtbot.waitUntil(lambda: len(again.chats.messages) == 4, timeout=WAIT)
    answer = wait_for_answer(qtbot, again)
    assert [message.content for message in again.chats.messages] == [QUESTION, whole, "And why?", answer]
    assert again.chats.messages[-1].finished and again.chats.messages[-1].figures != "interrupted"
    assert again.runtime.chat.messages[-1]["content"] == answer
    again.chats.again()
    assert wait_for_answer(qtbot, again) == answer


def test_an_answer_whose_chat_is_gone_is_dropped(open_window, verifier, profile, qtbot):
    where = {"server": f"ws://127.0.0.1:{verifier.port}", "token": TOKEN, "max_new_tokens": 300}
    first = open_window(**where)
    qtbot.waitUntil(lambda: first.runtime.chat is not None, timeout=WAIT)
    ask(qtbot, first)
    qtbot.waitUntil(lambda: bool(first.chats.messages[1:] and first.chats.messages[1].content), timeout=WAIT)
    first.close()
    profile.history_path.unlink()
    again = open_window(**where)
    qtbot.waitUntil(lambda: again.runtime.chat is not None, timeout=WAIT)
    assert again.runtime.chat.pending() is not None and not again.chats.busy
    ask(qtbot, again, "And now?")
    assert wait_for_answer(qtbot, again) and len(again.chats.messages) == 2


def test_another_verifier_gets_the_store_of_the_first(connected, profile, verifier, qtbot):
    before = connected.runtime.chat
    connected.connector.connect_as(connected.settings)
    qtbot.waitUntil(lambda: connected.runtime.chat is not before, timeout=WAIT)
    qtbot.waitUntil(lambda: connected.runtime.chat._saver.keeps, timeout=WAIT)
    ask(qtbot, connected)
    wait_for_answer(qtbot, connected)
    qtbot.waitUntil(lambda: QUESTION in profile.answer_path.read_text(), timeout=WAIT)


def test_the_answer_goes_on_while_another_chat_is_read(connected, qtbot):
    ask(qtbot, connected)
    first = wait_for_answer(qtbot, connected)
    chat = connected.chats.current
    ask(qtbot, connected, "And now?")
    connected.chats.new_chat()
    assert connected.chats.busy and shown_messages(connected) == []
    qtbot.waitUntil(lambda: not connected.chats.busy, timeout=WAIT)
    assert connected.chats.messages == []
    connected.chats.open_chat(chat)
    assert [message.role for message in connected.chats.messages] == ["user", "assistant"] * 2
    assert connected.chats.messages[1].content == first and connected.chats.messages[3].content != ""


def test_a_chat_is_saved_as_a_file(connected, qtbot, monkeypatch, tmp_path):
    ask(qtbot, connected)
    text = wait_for_answer(qtbot, connected)
    for name, kind in (("chat.md", "Markdown (*.md)"), ("chat", "JSON (*.json)")):
        monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_, n=name, k=kind: (str(tmp_path / n), k))
        qtbot.mouseClick(connected.page.export, Qt.MouseButton.LeftButton)
        assert "Saved as" in connected.page.notice.text
    assert (tmp_path / "chat.md").read_text().endswith(f"## Assistant\n\n{text.strip()}\n")
    assert json.loads((tmp_path / "chat.json").read_text())["messages"][1]["content"] == text
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: (str(tmp_path / "none" / "chat.md"), ""))
    qtbot.mouseClick(connected.page.export, Qt.MouseButton.LeftButton)
    assert "could not be saved" in connected.page.notice.text


def test_search_finds_a_chat_by_its_words(connected, qtbot):
    for question in (QUESTION, "Where do foxes live?"):
        connected.chats.new_chat()
        ask(qtbot, connected, question)
        wait_for_answer(qtbot, connected)
    qtbot.keyClicks(connected.list.search, "FOXES")
    qtbot.waitUntil(lambda: [item.text() for item in connected.list.items()] == ["Where do foxes live?"], timeout=WAIT)
    connected.list.search.clear()
    qtbot.waitUntil(lambda: len(connected.list.items()) == 2, timeout=WAIT)


def test_the_window_lives_while_a_dead_link_hangs(open_window, verifier, qtbot):
    with background_link(with_round_trip(10), "127.0.0.1", verifier.port) as link:
        link.cut()
        window = open_window(server=f"ws://127.0.0.1:{link.port}", token=TOKEN)
        qtbot.keyClicks(window.page.composer.field, QUESTION)
        assert window.page.composer.text == QUESTION and not window.page.composer.is_ready()
        assert window.page.pill.accessibleDescription() == "connecting"
        link.restore()
        qtbot.waitUntil(window.page.composer.is_ready, timeout=WAIT)
        qtbot.keyClick(window.page.composer.field, Qt.Key.Key_Return)
        assert wait_for_answer(qtbot, window)
