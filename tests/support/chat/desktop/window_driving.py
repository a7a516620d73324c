"""What a user does with the window, for tests."""

from __future__ import annotations

from PySide6.QtCore import Qt

from moa_chat.desktop.message_widgets import Answer, Question
from moa_chat.desktop.window import Window

TOKEN = "secret"  # of the verifier
WAIT = 60_000  # milliseconds
QUESTION = "Name three primary colours."


def ask(qtbot, window: Window, text: str = QUESTION) -> None:
    """Type a question and press Enter."""
    qtbot.keyClicks(window.page.composer.field, text)
    qtbot.keyClick(window.page.composer.field, Qt.Key.Key_Return)


def wait_for_answer(qtbot, window: Window) -> str:
    """The answer, once it has ended."""
    qtbot.waitUntil(lambda: not window.chats.busy, timeout=WAIT)
    return window.chats.messages[-1].content


def shown_messages(window: Window) -> list[str]:
    """Text of every message on the page."""
    page = window.page.conversation
    widgets = [*page.findChildren(Question), *page.findChildren(Answer)]
    return sorted(widget.message.content for widget in widgets if not widget.isHidden())
