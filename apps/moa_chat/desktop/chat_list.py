"""The list of chats at the left."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QHBoxLayout, QLabel, QLineEdit, QListWidget, QListWidgetItem, QMenu, QVBoxLayout, QWidget

from moa_chat.desktop.appearance import SIDEBAR_LETTERS, Appearance, letters, lines
from moa_chat.desktop.widgets import IconButton
from moa_chat.history.message import ChatSummary

_ID = Qt.ItemDataRole.UserRole
_SEARCH_MS = 150


class ChatList(QWidget):
    """The sidebar: a search field, and a row for each chat.

    Signals:
        wanted: open this chat.
        new_wanted: begin another one.
        renamed: a chat, and its new title.
        deleted: a chat.
        searched: show only chats with these words.
        settings_wanted: open the settings.
    """

    wanted = Signal(int)
    new_wanted = Signal()
    renamed = Signal(int, str)
    deleted = Signal(int)
    searched = Signal(str)
    settings_wanted = Signal()

    def __init__(self, appearance: Appearance, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("sidebar")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        name = QLabel("moa-chat")
        name.setObjectName("title")
        top = QHBoxLayout()
        top.addWidget(name, 1)
        top.addWidget(IconButton(appearance, "new", "New chat", self.new_wanted.emit, shortcut="Ctrl+N", label="New"))
        self.search = QLineEdit()
        self.search.setPlaceholderText("Search chats")
        self.search.setAccessibleName("Search chats")
        self.search.setClearButtonEnabled(True)
        self._pause = QTimer(self)
        self._pause.setSingleShot(True)
        self._pause.timeout.connect(lambda: self.searched.emit(self.search.text()))
        self.search.textChanged.connect(lambda _: self._pause.start(_SEARCH_MS))
        self.list = QListWidget()
        self.list.setAccessibleName("Chats")
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.setEditTriggers(QListWidget.EditTrigger.NoEditTriggers)
        self.list.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.list.customContextMenuRequested.connect(self._show_menu)
        self.list.itemClicked.connect(self._opened)
        self.list.itemActivated.connect(self._opened)
        self.list.itemChanged.connect(self._edited)
        self._nothing = QLabel("No chats")
        self._nothing.setObjectName("muted")
        self._nothing.setAlignment(Qt.AlignmentFlag.AlignHCenter)
        wanted = self.settings_wanted.emit
        self.settings_button = IconButton(
            appearance, "settings", "Settings", wanted, shortcut="Ctrl+,", label="Settings"
        )
        bottom = QHBoxLayout()
        bottom.addWidget(self.settings_button)
        bottom.addStretch()
        layout = self._layout = QVBoxLayout(self)
        layout.addLayout(top)
        layout.addWidget(self.search)
        layout.addWidget(self._nothing)
        layout.addWidget(self.list, 1)
        layout.addLayout(bottom)
        self._add_actions()
        appearance.changed.connect(self._fit)
        self._fit()

    def show_chats(self, chats: Sequence[ChatSummary], current: int | None) -> None:
        """Fill the list; ``current`` is the chat that is open."""
        self.list.blockSignals(True)
        self.list.clear()
        for chat in chats:
            item = QListWidgetItem(chat.title)
            item.setData(_ID, chat.id)
            item.setToolTip(chat.title)
            item.setFlags(item.flags() | Qt.ItemFlag.ItemIsEditable)
            self.list.addItem(item)
            if chat.id == current:
                self.list.setCurrentItem(item)
        self.list.blockSignals(False)
        self._nothing.setText("No chat contains these words" if self.search.text() else "No chats yet")
        self._nothing.setVisible(not chats)

    def items(self) -> list[QListWidgetItem]:
        """The rows from top to bottom."""
        return [self.list.item(row) for row in range(self.list.count())]

    def rename_current(self) -> None:
        """Let the user write another title."""
        if item := self.list.currentItem():
            self.list.editItem(item)

    def delete_current(self) -> None:
        if item := self.list.currentItem():
            self.deleted.emit(item.data(_ID))

    def _add_actions(self) -> None:
        """Keys that work while the list has the keyboard."""
        for title, keys, does in (("Rename", "F2", self.rename_current), ("Delete", "Del", self.delete_current)):
            action = QAction(title, self.list)
            action.setShortcut(QKeySequence(keys))
            action.setShortcutContext(Qt.ShortcutContext.WidgetShortcut)
            action.triggered.connect(lambda _=False, does=does: does())
            self.list.addAction(action)

    def _show_menu(self, position: QPoint) -> None:
        if item := self.list.itemAt(position):
            self.list.setCurrentItem(item)
            menu = QMenu(self)
            menu.addActions(self.list.actions())
            menu.popup(self.list.mapToGlobal(position))

    def _opened(self, item: QListWidgetItem) -> None:
        self.wanted.emit(item.data(_ID))

    def _edited(self, item: QListWidgetItem) -> None:
        if title := " ".join(item.text().split()):
            self.renamed.emit(item.data(_ID), title)

    def _fit(self) -> None:
        self.setMaximumWidth(letters(SIDEBAR_LETTERS))
        self._layout.setContentsMargins(lines(0.6), lines(0.6), lines(0.6), lines(0.5))
        self._layout.setSpacing(lines(0.45))
