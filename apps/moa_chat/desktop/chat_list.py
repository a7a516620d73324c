"""The list of chats at the left."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QListWidget, QListWidgetItem, QMenu, QVBoxLayout, QWidget

from moa_chat import strings
from moa_chat.desktop.appearance import SIDEBAR_LETTERS, Appearance, letters
from moa_chat.desktop.widgets import IconButton, add, label, pad, plain_tip
from moa_chat.history.message import ChatSummary

_ID = Qt.ItemDataRole.UserRole
_SEARCH_MS = 150


class ChatList(QWidget):
    """The sidebar: a search field, and a row for each chat."""

    wanted = Signal(int)  # open this chat
    new_wanted = Signal()  # begin another one
    renamed = Signal(int, str)  # a chat, and its new title
    deleted = Signal(int)  # a chat
    searched = Signal(str)  # show only chats with these words
    settings_wanted = Signal()  # open the settings

    def __init__(self, appearance: Appearance) -> None:
        super().__init__()
        self.setObjectName("sidebar")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        new = IconButton(appearance, "new", strings.NEW_CHAT, self.new_wanted.emit, shortcut="Ctrl+N", word=strings.NEW)
        top = QHBoxLayout()
        top.addWidget(label("moa-chat", "title", wraps=False), 1)
        top.addWidget(new)
        self.search = QLineEdit()
        self.search.setPlaceholderText(strings.SEARCH_CHATS)
        self.search.setAccessibleName(strings.SEARCH_CHATS)
        self.search.setClearButtonEnabled(True)
        pause = QTimer(self, singleShot=True, interval=_SEARCH_MS)
        pause.timeout.connect(lambda: self.searched.emit(self.search.text()))
        self.search.textChanged.connect(lambda _: pause.start())
        self.list = QListWidget()
        self.list.setAccessibleName(strings.CHATS)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.setEditTriggers(QListWidget.EditTrigger.NoEditTriggers)
        self.list.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.list.customContextMenuRequested.connect(self._show_menu)
        self.list.itemClicked.connect(self._opened)
        self.list.itemActivated.connect(self._opened)
        self.list.itemChanged.connect(self._edited)
        self._nothing = label(strings.NO_CHATS_YET, "muted", wraps=False)
        self._nothing.setAlignment(Qt.AlignmentFlag.AlignHCenter)
        name, wanted = strings.SETTINGS, self.settings_wanted.emit
        self.settings_button = IconButton(appearance, "settings", name, wanted, shortcut="Ctrl+,", word=name)
        bottom = QHBoxLayout()
        bottom.addWidget(self.settings_button)
        bottom.addStretch()
        layout = self._layout = QVBoxLayout(self)
        layout.addLayout(top)
        add(layout, self.search, self._nothing)
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
            item.setToolTip(plain_tip(chat.title))
            item.setFlags(item.flags() | Qt.ItemFlag.ItemIsEditable)
            self.list.addItem(item)
            if chat.id == current:
                self.list.setCurrentItem(item)
        self.list.blockSignals(False)
        self._nothing.setText(strings.NO_CHAT_FOUND if self.search.text() else strings.NO_CHATS_YET)
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
        actions = ((strings.RENAME, "F2", self.rename_current), (strings.DELETE, "Del", self.delete_current))
        for title, keys, does in actions:
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
        pad(self._layout, 0.6, 0.6, 0.6, 0.5, spacing=0.45)
