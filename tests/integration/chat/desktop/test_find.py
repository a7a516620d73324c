"""Find in the open chat."""

from __future__ import annotations

from PySide6.QtCore import Qt

from moa_chat import strings
from moa_chat.history.message import Dropped, Message
from moa_runtime.events import Origin, TextSpan
from support.chat.desktop.window_driving import answers_of

CODE = "Some **Fox**.\n\n```python\nfox = 1\n```\n\nNo more."


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
    """Texts that are marked, from the top; the current one in brackets."""
    accent = window.appearance.theme.accent
    found = []
    for text in window.page.conversation.texts():
        for one in text.extraSelections():
            now = one.format.background().color().name() == accent
            found.append(f"[{one.cursor.selectedText()}]" if now else one.cursor.selectedText())
    return found


def test_all_places_are_marked_and_one_steps_through_them(away, qtbot):
    bar = away.page.find
    show(qtbot, away, "Where is the fox?", CODE)
    find(qtbot, away, "fox")
    assert marked(away) == ["[fox]", "Fox", "fox"] and bar.state.text() == strings.FOUND_PLACE.format(1, 3)
    qtbot.keyClick(bar.field, Qt.Key.Key_Return)
    assert marked(away) == ["fox", "[Fox]", "fox"]
    qtbot.keyClick(away, Qt.Key.Key_F3)
    qtbot.keyClick(away, Qt.Key.Key_F3)
    assert bar.state.text() == strings.FOUND_PLACE.format(1, 3), "the first place comes after the last"
    qtbot.keyClick(bar.field, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    assert marked(away) == ["fox", "Fox", "[fox]"]
    bar.field.setText("wolf")
    assert marked(away) == [] and bar.state.text() == strings.NOT_FOUND and not bar.next.isEnabled()
    bar.field.clear()
    assert bar.state.text() == ""


def test_messages_that_are_not_shown_yet_are_searched(away, qtbot, until):
    contents = [f"Message {number}." for number in range(120)]
    contents[3] = "Here is the Fox."
    show(qtbot, away, *contents)
    view = away.page.conversation
    assert len(view.widgets) < 120
    find(qtbot, away, "the fox")
    assert marked(away) == ["[the Fox]"]
    until(lambda: view.verticalScrollBar().value() < view.verticalScrollBar().maximum() // 2)


def test_marks_follow_a_text_that_grows(away, qtbot, until):
    show(qtbot, away, "Where?", "A fox")
    find(qtbot, away, "fox")
    away.page.conversation.set_message(1, Message("assistant", "A fox, and a fox"))
    away.page.find.refresh()
    until(lambda: marked(away) == ["[fox]", "fox"])


def test_text_that_was_taken_back_is_not_found(away, qtbot, appearance):
    spans = (TextSpan("A wolf", Origin.CORRECTED, True),)
    appearance.set_origins(True)
    away.page.conversation.show_messages([Message("assistant", "A wolf", spans, (Dropped(2, "fox"),))])
    assert "fox" in answers_of(away)[0].texts[0].toPlainText()
    find(qtbot, away, "fox")
    assert marked(away) == []


def test_escape_closes_the_search_and_then_stops_an_answer(away, qtbot, monkeypatch):
    stopped = []
    monkeypatch.setattr(away.chats, "stop", lambda: stopped.append(True))
    show(qtbot, away, "fox")
    find(qtbot, away, "fox")
    qtbot.keyClick(away, Qt.Key.Key_Escape)
    assert not stopped and not away.page.find.isVisible() and marked(away) == []
    qtbot.keyClick(away, Qt.Key.Key_Escape)
    assert stopped
