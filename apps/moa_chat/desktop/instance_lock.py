"""One window for one profile."""

from __future__ import annotations

import hashlib
from pathlib import Path

from PySide6.QtCore import QLockFile, QObject, Signal
from PySide6.QtNetwork import QLocalServer, QLocalSocket

_LOCK_FILE = "window.lock"
_ANSWER_MS = 2000


class InstanceLock(QObject):
    """Locks a profile for one window, and lets another instance ask for that window.

    Signals:
        wanted: another instance wants this window in front.
    """

    wanted = Signal()

    def __init__(self, folder: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._lock = QLockFile(str(folder / _LOCK_FILE))
        self._lock.setStaleLockTime(0)  # held for as long as its process lives, however long that is
        # Sockets have short names, and profiles may have long ones.
        self._name = f"moa-chat-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}"
        self._server: QLocalServer | None = None

    def take(self) -> bool:
        """Take the profile; False when another window has it."""
        if not self._lock.tryLock(0):
            return False
        QLocalServer.removeServer(self._name)  # what a crash left behind
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
