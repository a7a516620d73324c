"""Find in the open chat."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt

from moa_chat.desktop.message_widgets import Answer
from moa_chat.history.message import Dropped, Message
from moa_runtime.events import Origin, TextSpan
from support.chat.desktop.window_driving import WAIT

CODE = "Some **Fox**.\n\n```python\nfox = 1\n```\n\nNo more."


@pytest.fixture
def window(open_window):
    return open_window(server="ws://127.0.0.1:9")


def show(qtbot, window, *contents: str) -> None:
    messages = [Message("assistant" if number % 2 else "user", text) for number, text in enumerate(contents)]
    window.page.conversation.show_messages(messages)
    qtbot.wait(20)  # for the layout


def find(qtbot, window, text: str) -> None:
    qtbot.keyClick(window, Qt.Key.Key_F, Qt.KeyboardModifier.ControlModifier)
    assert window.page.find.isVisible()
    window.page.find.field.clear()
    qtbot.keyClicks(window.page.find.field, text)


def marked(window) -> list[str]:
    """Texts that are marked, from the top; the one where one is in brackets."""
    accent = window.appearance.theme.accent
    found = []
    for text in window.page.conversation.texts():
        for one in text.extraSelections():
            now = one.format.background().color().name() == accent
            found.append(f"[{one.cursor.selectedText()}]" if now else one.cursor.selectedText())
    return found


def test_all_places_are_marked_and_one_steps_through_them(window, qtbot):
    show(qtbot, window, "Where is the fox?", CODE)
    find(qtbot, window, "fox")
    assert marked(window) == ["[fox]", "Fox", "fox"] and window.page.find.state.text() == "1 of 3"
    qtbot.keyClick(window.page.find.field, Qt.Key.Key_Return)
    assert marked(window) == ["fox", "[Fox]", "fox"]
    qtbot.keyClick(window, Qt.Key.Key_F3)
    qtbot.keyClick(window, Qt.Key.Key_F3)
    assert window.page.find.state.text() == "1 of 3", "behind the last comes the first"
    qtbot.keyClick(window.page.find.field, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    assert marked(window) == ["fox", "Fox", "[fox]"]
    qtbot.keyClick(window.page.find.field, Qt.Key.Key_Escape)
    assert not window.page.find.isVisible() and marked(window) == []


def test_what_is_not_there(window, qtbot):
    show(qtbot, window, "Where is the fox?")
    find(qtbot, window, "wolf")
    assert marked(window) == [] and window.page.find.state.text() == "not found"
    assert not window.page.find.next.isEnabled()
    window.page.find.field.clear()
    assert window.page.find.state.text() == ""


def test_messages_that_are_not_shown_yet_are_searched(window, qtbot):
    contents = [f"Message {number}." for number in range(120)]
    contents[3] = "Here is the Fox."
    show(qtbot, window, *contents)
    view = window.page.conversation
    assert len(view.widgets) < 120
    find(qtbot, window, "the fox")
    assert marked(window) == ["[the Fox]"]
    qtbot.waitUntil(lambda: not view.widgets[0].visibleRegion().isEmpty() or view.earlier.isVisible(), timeout=WAIT)
    assert view.verticalScrollBar().value() < view.verticalScrollBar().maximum() // 2


def test_the_place_is_brought_into_sight(window, qtbot):
    show(qtbot, window, "fox", *(f"Message {number}.\n\n" * 5 for number in range(30)))
    view = window.page.conversation
    qtbot.waitUntil(lambda: view.verticalScrollBar().value() > 0, timeout=WAIT)
    find(qtbot, window, "fox")
    qtbot.waitUntil(lambda: not view.widgets[0].visibleRegion().isEmpty(), timeout=WAIT)


def test_marks_follow_a_text_that_grows(window, qtbot):
    show(qtbot, window, "Where?", "A fox")
    find(qtbot, window, "fox")
    window.page.conversation.set_message(1, Message("assistant", "A fox, and a fox"))
    window.page.find.refresh()
    qtbot.waitUntil(lambda: marked(window) == ["[fox]", "fox"], timeout=WAIT)


def test_what_was_taken_back_is_not_found(window, qtbot):
    spans = (TextSpan("A wolf", Origin.CORRECTED, True),)
    window.page.origins.click()
    window.page.conversation.show_messages([Message("assistant", "A wolf", spans, (Dropped(2, "fox"),))])
    answer = window.page.conversation.findChildren(Answer)[0]
    assert "fox" in answer.texts[0].toPlainText()
    find(qtbot, window, "fox")
    assert marked(window) == []
    window.page.origins.click()


def test_escape_stops_an_answer_where_nothing_is_searched(window, qtbot, monkeypatch):
    stopped = []
    monkeypatch.setattr(window.chats, "stop", lambda: stopped.append(True))
    find(qtbot, window, "fox")
    qtbot.keyClick(window, Qt.Key.Key_Escape)
    assert not stopped
    qtbot.keyClick(window, Qt.Key.Key_Escape)
    assert stopped
