"""The program around the window."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from PySide6.QtCore import QLockFile, QObject, QTimer, Signal
from PySide6.QtNetwork import QLocalServer, QLocalSocket
from PySide6.QtWidgets import QApplication, QMessageBox

from moa_chat import strings
from moa_chat.desktop.appearance import Appearance
from moa_chat.desktop.profile import Profile, Settings
from moa_chat.desktop.window import Window
from moa_chat.history.store import History
from moa_chat.options import build_parser

_LOCK_FILE = "window.lock"
_ANSWER_MS = 2000


class InstanceLock(QObject):
    """Locks a profile for one window, and lets another instance ask for that window."""

    wanted = Signal()  # another instance wants this window in front

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._lock = QLockFile(str(folder / _LOCK_FILE))
        self._lock.setStaleLockTime(0)  # held for as long as its process lives, however long that is
        # Sockets have short names, and profiles may have long ones.
        self._name = f"moa-chat-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}"
        self._server: QLocalServer | None = None

    def take(self) -> bool:
        """Take the profile; False when another window has it."""
        if not self._lock.tryLock(0):
            return False
        QLocalServer.removeServer(self._name)  # left by a crash
        self._server = QLocalServer(self)
        self._server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
        self._server.newConnection.connect(self._called)
        self._server.listen(self._name)
        return True

    def call_other(self) -> bool:
        """Ask the window that has the profile to come to the front; False when it does not answer."""
        socket = QLocalSocket()
        socket.connectToServer(self._name)
        if not socket.waitForConnected(_ANSWER_MS):
            return False
        answered = socket.waitForReadyRead(_ANSWER_MS)
        socket.disconnectFromServer()
        return answered

    def release(self) -> None:
        if self._server is not None:
            self._server.close()
        self._lock.unlock()

    def _called(self) -> None:
        assert self._server is not None
        socket = self._server.nextPendingConnection()
        socket.write(b"here\n")
        socket.disconnected.connect(socket.deleteLater)
        self.wanted.emit()


_SIGNALS_MS = 200
_DISAGREEMENTS = {"ask": "ask", "rollback": "theirs", "keep": "mine"}


def run_desktop(options: argparse.Namespace) -> int:
    """Open the window, and return the exit status. Raises MoaError if the profile or history cannot be opened."""
    application = QApplication.instance() or QApplication(sys.argv[:1])
    assert isinstance(application, QApplication)
    application.setApplicationName("moa-chat")
    application.setStyle("Fusion")
    profile = Profile.default()
    settings = with_options(profile.load(), options)
    appearance = Appearance(settings.theme, settings.zoom, origins=settings.origins)
    lock = InstanceLock(profile.folder)
    if not lock.take():
        return _show_other(lock)
    window = Window(profile, settings, History.open(profile.history_path), appearance, options)
    lock.wanted.connect(window.come_to_front)
    window.show()
    # After the first paint: what comes now must not delay it.
    QTimer.singleShot(0, window.begin)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: window.close())
    # Python handles signals only when Python code runs.
    clock = QTimer(application, interval=_SIGNALS_MS, timeout=lambda: None)
    clock.start()
    try:
        return application.exec()
    finally:
        lock.release()


def with_options(settings: Settings, options: argparse.Namespace) -> Settings:
    """The settings with what the command line and the environment say instead."""
    server = options.server or os.environ.get("MOA_SERVER")
    given: dict[str, Any] = {"system": options.system, "disagreement": _DISAGREEMENTS.get(options.policy)}
    if options.local:
        given["local"] = True
    elif server:
        token = os.environ.get("MOA_TOKEN", "") if options.token is None else options.token
        given |= {"server": server, "token": token, "local": False, "certificate": ""}
    if options.bundle is not None:
        given["bundle"] = str(options.bundle)
    if options.max_new_tokens != build_parser().parse_args([]).max_new_tokens:
        given["max_new_tokens"] = options.max_new_tokens
    if options.temperature is not None or options.top_p is not None:
        given |= {"recommended": False, "temperature": options.temperature, "top_p": options.top_p}
    return dataclasses.replace(settings, **{name: value for name, value in given.items() if value is not None})


def _show_other(lock: InstanceLock) -> int:
    """The profile's window is open: say so, and offer it."""
    box = QMessageBox()
    box.setWindowTitle("moa-chat")
    box.setText(strings.ALREADY_OPEN)
    box.setInformativeText(strings.ALREADY_OPEN_WHY)
    show = box.addButton(strings.SHOW_OPEN, QMessageBox.ButtonRole.AcceptRole)
    box.addButton(strings.CLOSE, QMessageBox.ButtonRole.RejectRole)
    box.exec()
    if box.clickedButton() is show and not lock.call_other():
        QMessageBox.warning(None, "moa-chat", strings.OPEN_HANGS)
        return 1
    return 0
