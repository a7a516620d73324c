"""The window: connects the pages with the conversations and the connection."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QByteArray
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import QHBoxLayout, QStackedWidget, QWidget

from moa_chat.desktop.appearance import Look
from moa_chat.desktop.chat_list import ChatList
from moa_chat.desktop.chat_page import ChatPage
from moa_chat.desktop.chat_settings import ChatSettingsDialog
from moa_chat.desktop.checking_controller import CheckingController
from moa_chat.desktop.commands import add_commands, commands_of
from moa_chat.desktop.connecting import Connecting
from moa_chat.desktop.connector import Connector
from moa_chat.desktop.first_run import FirstRun
from moa_chat.desktop.host_conditions import HostHints
from moa_chat.desktop.profile import Profile, Settings
from moa_chat.desktop.runtime_thread import Engine
from moa_chat.desktop.saving import ask_and_save
from moa_chat.desktop.settings_dialog import SettingsDialog
from moa_chat.desktop.style import letters, lines
from moa_chat.history.chat_settings import ChatSettings
from moa_chat.history.store import History
from moa_chat.strings import as_sentence
from moa_runtime.errors import MoaError


class Window(QWidget):
    """The one window of the program.

    Args:
        settings: those of the profile, with what the command line says instead.
        options: of the command line.
    """

    def __init__(
        self, profile: Profile, settings: Settings, history: History, look: Look, options: argparse.Namespace
    ) -> None:
        super().__init__()
        self.setObjectName("window")
        self.setWindowTitle("moa-chat")
        self._profile, self.settings, self.look = profile, settings, look
        self._stored = profile.load()
        self.engine = Engine(profile.answer_path, self)
        self.connector = Connector(self.engine, options, self)
        self.chats = CheckingController(self.engine, history, lambda: self.settings, options, self)
        self.list = ChatList(look)
        self.page = ChatPage(look)
        self.first_run = FirstRun(look, self.connector, settings)
        self.settings_dialog: SettingsDialog | None = None
        self.chat_settings_dialog: ChatSettingsDialog | None = None
        self._pages = QStackedWidget()
        self._pages.addWidget(self.page)
        self._pages.addWidget(self.first_run)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        layout.addWidget(self.list, 2)
        layout.addWidget(self._pages, 5)
        self._connect_chats()
        self._connect_page()
        self.connecting = Connecting(self)
        self.commands = commands_of(self)
        add_commands(self, self.commands)
        self._restore_size()
        self._show_chats()
        if history.set_aside is not None:
            words = f"The history was damaged and a new one was begun. The old file is kept: {history.set_aside}"
            self.page.notice.say(words, stays=True)

    def begin(self) -> None:
        """Connect, or let a newcomer choose to what. The window is there already."""
        self.hints = HostHints(self.engine, self)
        self.connecting.begin()

    def come_to_front(self) -> None:
        """Another instance of the program was asked for this one."""
        if self.isMinimized():
            self.showNormal()
        self.show()
        self.raise_()
        self.activateWindow()

    # -- wiring --------------------------------------------------------------------------------

    def _connect_chats(self) -> None:
        chats, page, conversation = self.chats, self.page, self.page.conversation
        chats.chats_changed.connect(self._show_chats)
        chats.opened.connect(self._opened)
        chats.message_changed.connect(conversation.set_message)
        chats.truncated.connect(conversation.truncate)
        for changed in (chats.opened, chats.message_changed, chats.truncated):
            changed.connect(page.find.refresh)
        chats.busy_changed.connect(self._busy)
        chats.figures_changed.connect(page.plot.figures.show_figures)
        chats.round_seen.connect(page.plot.add)
        chats.round_trip_changed.connect(page.pill.set_round_trip)
        chats.waiting.connect(conversation.set_waiting)
        chats.returned.connect(page.composer.put_back)
        chats.told.connect(self._tell)
        chats.corrected.connect(lambda text, undo: page.notice.say(text, "Undo", undo, until_asked=True))
        chats.context_changed.connect(page.context.show_use)
        chats.disagreed.connect(page.disagreement.ask)
        self.list.wanted.connect(self._open_chat)
        self.list.new_wanted.connect(self.new_chat)
        self.list.renamed.connect(chats.rename)
        self.list.deleted.connect(chats.delete)
        self.list.searched.connect(lambda _: self._show_chats())
        self.list.settings_wanted.connect(self.open_settings)

    def _connect_page(self) -> None:
        page = self.page
        page.composer.sent.connect(self.chats.send)
        page.composer.stopped.connect(self.chats.stop)
        page.composer.scrolled.connect(page.conversation.page)
        page.conversation.edited.connect(self.chats.edit)
        page.conversation.again.connect(self.chats.again)
        page.conversation.continued.connect(self.chats.continue_answer)
        page.conversation.stopped.connect(self.chats.stop)
        page.disagreement.chosen.connect(self._settle)
        page.sidebar.clicked.connect(lambda: self.list.setVisible(not self.list.isVisible()))
        page.origins.setChecked(self.settings.origins)
        page.origins.toggled.connect(self._color_origins)
        page.chat_settings.clicked.connect(self.open_chat_settings)
        page.export.clicked.connect(self.export)

    # -- chats ---------------------------------------------------------------------------------

    def _show_chats(self) -> None:
        try:
            found = self.chats.history.chats(self.list.search.text())
        except MoaError as error:
            self._tell(as_sentence(str(error)), "", None)
            return
        self.list.show_chats(found, self.chats.current)
        titles = {chat.id: chat.title for chat in found}
        if self.chats.current is None:
            self.page.title.setText("New chat")
        elif self.chats.current in titles:
            self.page.title.setText(titles[self.chats.current])

    def _opened(self) -> None:
        self.page.conversation.show_messages(self.chats.messages)
        self.page.conversation.set_busy(self.chats.busy)
        self.page.disagreement.hide()
        self.page.composer.field.setFocus()

    def _open_chat(self, chat: int) -> None:
        self._pages.setCurrentWidget(self.page)
        self.chats.open_chat(chat)

    def new_chat(self) -> None:
        self._pages.setCurrentWidget(self.page)
        self.chats.new_chat()

    def _busy(self, busy: bool) -> None:
        self.page.composer.set_answering(busy)
        self.page.conversation.set_busy(busy)
        if busy:
            self.page.disagreement.hide()
            self.page.notice.asked()

    def _settle(self, mine: bool, always: bool) -> None:
        if always:
            self.change(disagreement="mine" if mine else "theirs")
        self.chats.settle(mine)

    def escape(self) -> None:
        """One thing at a time: the search first, if it is open."""
        self.page.find.leave() if self.page.find.isVisible() else self.chats.stop()

    def search(self) -> None:
        self.list.show()
        self.list.search.setFocus()
        self.list.search.selectAll()

    def go_to_list(self) -> None:
        self.list.show()
        self.list.list.setFocus()

    def export(self) -> None:
        try:
            saved = ask_and_save(self, self.page.title.text(), self.chats.turns)
        except MoaError as error:
            self._tell(as_sentence(str(error)), "", None)
        else:
            if saved is not None:
                self._tell(f"Saved as {saved}.", "", None)

    @property
    def shows_first_run(self) -> bool:
        return self._pages.currentWidget() is self.first_run

    def show_first_run(self, shown: bool) -> None:
        self._pages.setCurrentWidget(self.first_run if shown else self.page)
        self.list.setVisible(not shown)

    # -- settings ------------------------------------------------------------------------------

    def open_settings(self) -> None:
        self.settings_dialog = SettingsDialog(self.connector, self.settings, self.engine.recommended, self)
        self.settings_dialog.saved.connect(self._save_settings)
        self.settings_dialog.open()

    def open_chat_settings(self) -> None:
        title, settings = self.page.title.text(), self.chats.settings
        self.chat_settings_dialog = ChatSettingsDialog(title, settings, self.engine.recommended, self)
        self.chat_settings_dialog.saved.connect(self._save_chat_settings)
        self.chat_settings_dialog.open()

    def _save_chat_settings(self, settings: ChatSettings) -> None:
        self.chats.change_settings(settings)
        self.chats.measure_context()

    def _save_settings(self, settings: Settings) -> None:
        before = self.settings
        self.change(**dataclasses.asdict(settings))
        if settings.theme != before.theme:
            self.look.set_theme(settings.theme)
        if settings.zoom != before.zoom:
            self.look.set_zoom(settings.zoom)
        connection = ("local", "server", "token", "certificate", "bundle")
        changed = any(getattr(settings, name) != getattr(before, name) for name in connection)
        if changed or self.engine.chat is None:
            self.page.notice.hide()
            self.chats.stop()
            self.connecting.again()

    def change(self, **values: Any) -> None:
        """Change settings and store them."""
        self.settings = dataclasses.replace(self.settings, **values)
        # What the command line says counts for this time only.
        self._stored = dataclasses.replace(self._stored, **values)
        try:
            self._profile.save(self._stored)
        except MoaError as error:
            self._tell(as_sentence(str(error)), "", None)

    def _color_origins(self, shown: bool) -> None:
        self.look.set_origins(shown)
        self.change(origins=shown)

    def zoom(self, step: int) -> None:
        self.look.step_zoom(step)
        self.change(zoom=self.look.zoom)

    def _tell(self, text: str, offer: str, does: Callable[[], None] | None) -> None:
        self.page.notice.say(text, offer, does or (lambda: None))

    # -- the window itself ---------------------------------------------------------------------

    def _restore_size(self) -> None:
        stored = QByteArray.fromHex(self.settings.geometry.encode())
        if not self.restoreGeometry(stored):
            self.resize(letters(132), lines(46))

    def closeEvent(self, event: QCloseEvent) -> None:
        """Out of sight at once; what has to be waited for is done behind it."""
        self.change(geometry=bytes(self.saveGeometry().toHex().data()).decode())
        self.hide()
        self.chats.close()
        self.connector.close()
        self.engine.close()
        self.chats.history.close()
        super().closeEvent(event)
