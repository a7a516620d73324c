"""The window and its commands: it connects the pages with the conversations and the connection."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import QByteArray
from PySide6.QtGui import QAction, QCloseEvent, QKeySequence
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QFileDialog,
    QGridLayout,
    QHBoxLayout,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from moa_chat import strings
from moa_chat.desktop.appearance import Appearance, letters, lines
from moa_chat.desktop.chat_controller import ChatController
from moa_chat.desktop.chat_list import ChatList
from moa_chat.desktop.chat_page import ChatPage
from moa_chat.desktop.connection import ConnectionFailedError, Connector
from moa_chat.desktop.first_run import FirstRun
from moa_chat.desktop.host_conditions import HostConditions
from moa_chat.desktop.profile import Profile, Settings
from moa_chat.desktop.runtime_thread import RuntimeThread
from moa_chat.desktop.settings_dialog import ChatSettingsDialog, SettingsDialog
from moa_chat.desktop.widgets import PlainLabel, label, pad
from moa_chat.history.chat_settings import ChatSettings
from moa_chat.history.store import History
from moa_chat.strings import as_sentence
from moa_chat.transcript import as_json, as_markdown, file_name
from moa_runtime.errors import MoaError
from moa_runtime.events import LinkChanged, LinkStatus

_KEY_ROWS = 12  # of the list of keys


@dataclass(frozen=True)
class Command:
    """A command of the window, with its keys."""

    title: str
    keys: str
    does: Callable[[], object]


class ShortcutDialog(QDialog):
    """A dialog that lists all keys."""

    def __init__(self, commands: Sequence[Command], parent: QWidget) -> None:
        super().__init__(parent)
        self.setWindowTitle(strings.KEYBOARD)
        native = QKeySequence.SequenceFormat.NativeText
        rows = [(QKeySequence(command.keys).toString(native), command.title) for command in commands]
        grid = QGridLayout()
        grid.setHorizontalSpacing(lines(1.5))
        grid.setVerticalSpacing(lines(0.35))
        for number, (keys, title) in enumerate([*rows, *strings.OTHER_KEYS]):
            column, row = divmod(number, _KEY_ROWS)
            grid.addWidget(label(keys, "title", wraps=False), row, 2 * column)
            grid.addWidget(PlainLabel(title), row, 2 * column + 1)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.reject)
        layout = QVBoxLayout(self)
        pad(layout, 1.2, 1.2, 1.2, 0.8, spacing=1)
        layout.addLayout(grid)
        layout.addWidget(buttons)


class Window(QWidget):
    """The one window of the program; ``settings`` are the profile's, with what the command line says instead."""

    def __init__(
        self,
        profile: Profile,
        settings: Settings,
        history: History,
        appearance: Appearance,
        options: argparse.Namespace,
    ) -> None:
        super().__init__()
        self.setObjectName("window")
        self.setWindowTitle("moa-chat")
        self._profile, self.settings, self.appearance = profile, settings, appearance
        self._stored = profile.load()
        self.runtime = RuntimeThread(profile.answer_path, self)
        self.connector = Connector(self.runtime, options, self)
        self.chats = ChatController(self.runtime, history, lambda: self.settings, options, self)
        self.list = ChatList(appearance)
        self.page = ChatPage(appearance)
        self.first_run = FirstRun(appearance, self.connector, settings)
        self.settings_dialog: SettingsDialog | None = None
        self.chat_settings_dialog: ChatSettingsDialog | None = None
        self._pages = QStackedWidget()
        self._pages.addWidget(self.page)
        self._pages.addWidget(self.first_run)
        layout = QHBoxLayout(self)
        pad(layout, 0, spacing=0)
        layout.addWidget(self.list, 2)
        layout.addWidget(self._pages, 5)
        self._connect_chats()
        self._connect_page()
        self._follow_connection()
        self.commands = self._make_commands()
        for command in self.commands:
            action = QAction(command.title, self)
            action.setShortcut(QKeySequence(command.keys))
            action.triggered.connect(lambda _=False, does=command.does: does())
            self.addAction(action)
        if not self.restoreGeometry(QByteArray.fromHex(settings.geometry.encode())):
            self.resize(letters(132), lines(46))
        self._show_chats()
        if history.set_aside is not None:
            self.page.notice.say(strings.HISTORY_DAMAGED.format(history.set_aside), stays=True)

    def begin(self) -> None:
        """Connect, or show the first-run page. The window has been painted by now."""
        self.hints = HostConditions(self.runtime, self)
        ready = self.settings.ready
        self.show_first_run(not ready)
        self.chats.open_interrupted()
        if ready:
            self._connect()

    def come_to_front(self) -> None:
        """Show the window, because another instance of the program asked for it."""
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
        chats.figures_changed.connect(page.plot.show_figures)
        chats.round_seen.connect(page.plot.add)
        chats.round_trip_changed.connect(page.pill.set_round_trip)
        chats.waiting.connect(conversation.set_waiting)
        chats.returned.connect(page.composer.put_back)
        page.conversation.suggested.connect(page.composer.put_back)
        chats.told.connect(self._tell)
        chats.corrected.connect(lambda text, undo: page.notice.say(text, strings.UNDO, undo, until_asked=True))
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

    def _follow_connection(self) -> None:
        self.runtime.link.connect(self._link_changed)
        self.connector.connecting.connect(self._connecting)
        self.connector.preparing.connect(self._preparing)
        self.connector.starting.connect(self._starting)
        self.connector.fetching.connect(self._fetching)
        self.connector.connected.connect(self._connected)
        self.connector.failed.connect(self._connection_failed)
        self.first_run.wanted.connect(self._connect_first)
        self.first_run.cancelled.connect(self.connector.cancel)
        self.page.offline.toggled.connect(self._work_offline)

    def _make_commands(self) -> list[Command]:
        """Return all commands with keys."""
        page = self.page
        return [
            Command(strings.NEW_CHAT, "Ctrl+N", self.new_chat),
            Command(strings.COMMAND_SEARCH, "Ctrl+K", self.search),
            Command(strings.COMMAND_LIST, "Ctrl+Shift+L", self.go_to_list),
            Command(strings.COMMAND_WRITE, "Ctrl+L", page.composer.field.setFocus),
            Command(strings.FIND, "Ctrl+F", page.find.begin),
            Command(strings.COMMAND_FIND_NEXT, "F3", lambda: page.find.step(1)),
            Command(strings.COMMAND_FIND_PREVIOUS, "Shift+F3", lambda: page.find.step(-1)),
            Command(strings.COMMAND_ESCAPE, "Esc", self.escape),
            Command(strings.ANSWER_AGAIN, "Ctrl+R", self.chats.again),
            Command(strings.COMMAND_CONTINUE, "Ctrl+Shift+R", self.chats.continue_answer),
            Command(strings.COMMAND_EDIT, "Ctrl+E", page.conversation.edit_last),
            Command(strings.COMMAND_COPY, "Ctrl+Shift+C", page.conversation.copy_last),
            Command(strings.COMMAND_JUMP, "Ctrl+End", page.conversation.jump),
            Command(strings.COMMAND_SAVE, "Ctrl+S", self.export),
            Command(strings.COMMAND_OFFLINE, "Ctrl+Shift+O", page.offline.toggle),
            Command(strings.COMMAND_ORIGINS, "Ctrl+Shift+G", page.origins.toggle),
            Command(strings.COMMAND_FIGURES, "Ctrl+Shift+P", page.plot_button.toggle),
            Command(strings.COMMAND_SIDEBAR, "Ctrl+B", page.sidebar.click),
            Command(strings.COMMAND_LARGER, "Ctrl++", lambda: self.zoom(1)),
            Command(strings.COMMAND_SMALLER, "Ctrl+-", lambda: self.zoom(-1)),
            Command(strings.CHAT_SETTINGS, "Ctrl+Shift+S", self.open_chat_settings),
            Command(strings.SETTINGS, "Ctrl+,", self.open_settings),
            Command(strings.KEYBOARD, "F1", lambda: ShortcutDialog(self.commands, self).open()),
            Command(strings.COMMAND_QUIT, "Ctrl+Q", self.close),
        ]

    # -- chats ---------------------------------------------------------------------------------

    def _show_chats(self) -> None:
        try:
            found = self.chats.history.chats(self.list.search.text())
        except MoaError as error:
            self._tell(as_sentence(str(error)))
            return
        self.list.show_chats(found, self.chats.current)
        titles = {chat.id: chat.title for chat in found}
        if self.chats.current is None:
            self.page.title.setText(strings.NEW_CHAT)
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
        """Close the search if it is open, otherwise stop the answer."""
        self.page.find.leave() if self.page.find.isVisible() else self.chats.stop()

    def search(self) -> None:
        self.list.show()
        self.list.search.setFocus()
        self.list.search.selectAll()

    def go_to_list(self) -> None:
        self.list.show()
        self.list.list.setFocus()

    def export(self) -> None:
        """Ask for a file, and save the open chat in it."""
        title = self.page.title.text()
        name, kind = QFileDialog.getSaveFileName(self, strings.SAVE_AS, f"{file_name(title)}.md", strings.SAVE_KINDS)
        if not name:
            return
        path = Path(name)
        if not path.suffix:
            path = path.with_suffix(".json" if "json" in kind else ".md")
        write = as_json if path.suffix == ".json" else as_markdown
        try:
            path.write_text(write(title, self.chats.turns), encoding="utf-8")
        except OSError as error:
            self._tell(strings.SAVE_FAILED.format(path, error.strerror))
        else:
            self._tell(strings.SAVED_AS.format(path))

    @property
    def shows_first_run(self) -> bool:
        return self._pages.currentWidget() is self.first_run

    def show_first_run(self, shown: bool) -> None:
        self._pages.setCurrentWidget(self.first_run if shown else self.page)
        self.list.setVisible(not shown)

    # -- the connection ------------------------------------------------------------------------

    def _connect(self) -> None:
        self.connector.connect_as(self.settings)

    def _connect_first(self, settings: Settings) -> None:
        self.settings = settings
        self._connect()

    def _connecting(self, where: str) -> None:
        self.page.composer.set_ready(False)
        self.page.pill.set_server(where)
        self.first_run.show_progress(strings.CONNECTING)

    def _preparing(self, stage: str, part: float) -> None:
        """Show what is done to make the bundle of this device; ``part`` is 0 if it is not known."""
        self._show_progress(strings.PREPARING.format(stage), part or None)

    def _starting(self, starts: bool) -> None:
        """Show whether the verifier of this machine is being started."""
        if starts:
            self._show_progress(strings.STARTING_FIRST if self.shows_first_run else strings.STARTING)
        else:
            self.page.progress.end()
            self.first_run.show_progress(strings.CONNECTING)

    def _fetching(self, received: float, total: float) -> None:
        """Show how far the download of the server's bundle is."""
        self._show_progress(strings.FETCHING.format(received / 1e6, total / 1e6), received / max(total, 1))

    def _show_progress(self, words: str, part: float | None = None) -> None:
        """Show what is done before there is a connection; the connector can cancel it."""
        self.page.progress.begin(words, self.connector.cancel, part)
        self.first_run.show_progress(words, part)

    def _connected(self, where: str) -> None:
        page = self.page
        page.progress.end()
        page.pill.set_server(where)
        if self.runtime.chat is not None:
            manifest = self.runtime.chat.manifest
            page.model.setText(strings.model_words(manifest.target, manifest.target_parameters))
            page.conversation.show_model(manifest.target, manifest.target_parameters, where)
            self.setWindowTitle(f"{manifest.target} - moa-chat")
        page.composer.set_ready(True)
        if page.offline.isChecked():
            self.runtime.work_offline(True)
        if self.shows_first_run:
            self.change(**dataclasses.asdict(self.settings))
            self.show_first_run(False)
        self.chats.measure_context()
        page.composer.field.setFocus()

    def _connection_failed(self, error: MoaError) -> None:
        page, sentence = self.page, as_sentence(str(error))
        page.pill.set_server("")
        page.progress.end()
        if self.shows_first_run:
            self.first_run.show_problem(error)
        elif isinstance(error, ConnectionFailedError):
            page.notice.say(sentence, strings.SETTINGS, self.open_settings, stays=True)
        else:  # no setting is at fault, as when the verifier of this machine has ended
            page.notice.say(sentence, strings.TRY_AGAIN, self._connect, stays=True)

    def _link_changed(self, link: LinkChanged) -> None:
        self.page.pill.set_link(link)
        if link.status is LinkStatus.ONLINE:
            self.chats.check()
        if link.status is LinkStatus.OFFLINE and not self.page.offline.isChecked():
            self.page.conversation.set_waiting(strings.AWAY)

    def _work_offline(self, offline: bool) -> None:
        self.page.pill.set_wanted_offline(offline)
        self.runtime.work_offline(offline)

    # -- settings ------------------------------------------------------------------------------

    def open_settings(self) -> None:
        self.settings_dialog = SettingsDialog(self.connector, self.settings, self.runtime.recommended, self)
        self.settings_dialog.saved.connect(self._save_settings)
        self.settings_dialog.open()

    def open_chat_settings(self) -> None:
        title, settings = self.page.title.text(), self.chats.settings
        self.chat_settings_dialog = ChatSettingsDialog(title, settings, self.runtime.recommended, self)
        self.chat_settings_dialog.saved.connect(self._save_chat_settings)
        self.chat_settings_dialog.open()

    def _save_chat_settings(self, settings: ChatSettings) -> None:
        self.chats.change_settings(settings)
        self.chats.measure_context()

    def _save_settings(self, settings: Settings) -> None:
        before = self.settings
        self.change(**dataclasses.asdict(settings))
        if settings.theme != before.theme:
            self.appearance.set_theme(settings.theme)
        if settings.zoom != before.zoom:
            self.appearance.set_zoom(settings.zoom)
        connection = ("local", "server", "token", "certificate", "bundle")
        changed = any(getattr(settings, name) != getattr(before, name) for name in connection)
        if changed or self.runtime.chat is None:
            self.page.notice.hide()
            self.chats.stop()
            self._connect()

    def change(self, **values: Any) -> None:
        """Change settings and store them."""
        self.settings = dataclasses.replace(self.settings, **values)
        # Options of the command line are not stored.
        self._stored = dataclasses.replace(self._stored, **values)
        try:
            self._profile.save(self._stored)
        except MoaError as error:
            self._tell(as_sentence(str(error)))

    def _color_origins(self, shown: bool) -> None:
        self.appearance.set_origins(shown)
        self.change(origins=shown)

    def zoom(self, step: int) -> None:
        self.appearance.step_zoom(step)
        self.change(zoom=self.appearance.zoom)

    def _tell(self, text: str, offer: str = "", does: Callable[[], None] | None = None) -> None:
        self.page.notice.say(text, offer, does or (lambda: None))

    # -- the window itself ---------------------------------------------------------------------

    def closeEvent(self, event: QCloseEvent) -> None:
        """Hide the window at once, then close what takes time."""
        self.change(geometry=bytes(self.saveGeometry().toHex().data()).decode())
        self.hide()
        self.chats.close()
        self.connector.close()
        self.runtime.close()
        self.chats.history.close()
        super().closeEvent(event)
