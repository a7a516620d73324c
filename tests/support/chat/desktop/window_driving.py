"""What a user does with the window and sees of it, for tests."""

from __future__ import annotations

from PySide6.QtCore import Qt

from moa_chat.desktop.message_widgets import Answer, Question
from moa_chat.desktop.window import Window
from moa_runtime.events import Origin

TOKEN = "secret"  # of the verifier
WAIT = 60_000  # milliseconds
AWAY = "ws://127.0.0.1:9"  # an address without a verifier
QUESTION = "Name three primary colours."
MORE = "And three more?"


def ask(qtbot, window: Window, text: str = QUESTION) -> None:
    """Type a question and press Enter."""
    qtbot.keyClicks(window.page.composer.field, text)
    qtbot.keyClick(window.page.composer.field, Qt.Key.Key_Return)


def wait_for_answer(qtbot, window: Window) -> str:
    """The answer, once it has ended."""
    qtbot.waitUntil(lambda: not window.chats.busy, timeout=WAIT)
    return window.chats.messages[-1].content


def answered(qtbot, window: Window, text: str = QUESTION) -> str:
    """The answer to a question that is asked now."""
    ask(qtbot, window, text)
    return wait_for_answer(qtbot, window)


def contents(messages) -> list[str]:
    return [message.content for message in messages]


def link_state(window: Window) -> str:
    """The state of the link as the badge names it."""
    return window.page.pill.accessibleDescription()


def is_online(window: Window) -> bool:
    return link_state(window) in ("online", "slow")


def has_confirmed(window: Window) -> bool:
    """Whether the last message has confirmed words."""
    return any(span.committed for span in window.chats.messages[-1].spans)


def can_draft(window: Window) -> bool:
    """Whether the device has memory rows, which come after the first confirmed words, to go on without the server."""
    return window.runtime.chat._session.rows > 0


def unconfirmed_text(window: Window) -> str:
    """Text of the last message that the device wrote offline."""
    spans = window.chats.messages[-1].spans
    return "".join(span.text for span in spans if span.origin is Origin.OFFLINE and not span.committed)


def answers_of(window: Window) -> list[Answer]:
    return [widget for widget in window.page.conversation.widgets if isinstance(widget, Answer)]


def shown_messages(window: Window) -> list[str]:
    """Text of every message on the page."""
    page = window.page.conversation
    widgets = [*page.findChildren(Question), *page.findChildren(Answer)]
    return sorted(widget.message.content for widget in widgets if not widget.isHidden())
