"""Everything the window can do, with its keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QGridLayout, QLabel, QVBoxLayout, QWidget

from moa_chat.desktop.style import lines

if TYPE_CHECKING:
    from moa_chat.desktop.window import Window


@dataclass(frozen=True)
class Command:
    """Something to do, and the keys that do it."""

    title: str
    keys: str
    does: Callable[[], object]


def commands_of(window: Window) -> list[Command]:
    """All that can be done with a key."""
    page = window.page
    return [
        Command("New chat", "Ctrl+N", window.new_chat),
        Command("Search the chats", "Ctrl+K", window.search),
        Command("Go to the list of chats", "Ctrl+Shift+L", window.go_to_list),
        Command("Write a message", "Ctrl+L", page.composer.field.setFocus),
        Command("Find in this chat", "Ctrl+F", page.find.begin),
        Command("The next place found", "F3", lambda: page.find.step(1)),
        Command("The place found before", "Shift+F3", lambda: page.find.step(-1)),
        Command("Close the search, or stop the answer", "Esc", window.escape),
        Command("Answer again", "Ctrl+R", window.chats.again),
        Command("Continue an answer that was cut off", "Ctrl+Shift+R", window.chats.continue_answer),
        Command("Edit the last question", "Ctrl+E", page.conversation.edit_last),
        Command("Copy the last answer", "Ctrl+Shift+C", page.conversation.copy_last),
        Command("Jump to the newest message", "Ctrl+End", page.conversation.jump),
        Command("Save this chat as a file", "Ctrl+S", window.export),
        Command("Work offline", "Ctrl+Shift+O", page.offline.toggle),
        Command("Colour the text by origin", "Ctrl+Shift+G", page.origins.toggle),
        Command("Show how the answer is made, in figures", "Ctrl+Shift+P", page.plot_button.toggle),
        Command("Show or hide the chats", "Ctrl+B", page.sidebar.click),
        Command("Larger letters", "Ctrl++", lambda: window.zoom(1)),
        Command("Smaller letters", "Ctrl+-", lambda: window.zoom(-1)),
        Command("Chat settings", "Ctrl+Shift+S", window.open_chat_settings),
        Command("Settings", "Ctrl+,", window.open_settings),
        Command("Keyboard", "F1", lambda: ShortcutDialog(window.commands, window).open()),
        Command("Quit", "Ctrl+Q", window.close),
    ]


def add_commands(window: QWidget, commands: Sequence[Command]) -> None:
    """Make the keys work wherever in the window the keyboard is."""
    for command in commands:
        action = QAction(command.title, window)
        action.setShortcut(QKeySequence(command.keys))
        action.triggered.connect(lambda _=False, does=command.does: does())
        window.addAction(action)


class ShortcutDialog(QDialog):
    """The list of all keys."""

    def __init__(self, commands: Sequence[Command], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("Keyboard")
        fixed = [("Enter", "Send"), ("Shift+Enter", "Break the line"), ("PgUp, PgDown", "Scroll the conversation")]
        fixed += [("F2, Del", "Rename or delete the chat chosen in the list"), ("Tab", "Next button or field")]
        rows = [*((_native(command.keys), command.title) for command in commands), *fixed]
        grid = QGridLayout()
        grid.setHorizontalSpacing(lines(1.5))
        grid.setVerticalSpacing(lines(0.35))
        for number, (keys, title) in enumerate(rows):
            pressed = QLabel(keys)
            pressed.setObjectName("title")
            grid.addWidget(pressed, number % 12, 2 * (number // 12))
            grid.addWidget(QLabel(title), number % 12, 2 * (number // 12) + 1)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.reject)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(lines(1.2), lines(1.2), lines(1.2), lines(0.8))
        layout.setSpacing(lines(1))
        layout.addLayout(grid)
        layout.addWidget(buttons)


def _native(keys: str) -> str:
    return QKeySequence(keys).toString(QKeySequence.SequenceFormat.NativeText)
