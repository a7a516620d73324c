"""Press keys in a window, and measure when each letter is on the screen."""

from __future__ import annotations

import threading
import time
from collections import deque

from PySide6.QtCore import QCoreApplication, QEvent, QObject, Qt, QTimer
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QPlainTextEdit, QWidget

_KEY_SECONDS = 0.09  # a fast typist


class Painted(QObject):
    """Notices a widget's pictures.

    Attributes:
        once: whether there was one.
    """

    def __init__(self, widget: QWidget) -> None:
        super().__init__(widget)
        self.once = False
        widget.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() is QEvent.Type.Paint:
            QTimer.singleShot(0, self, self._complete)
        return False

    def _complete(self) -> None:
        self.once = True


class Typist(QObject):
    """Presses keys from another thread, as the system does, whatever the window is doing meanwhile.

    Attributes:
        delays: for each key the seconds until it was on the screen.
    """

    def __init__(self, field: QPlainTextEdit) -> None:
        super().__init__(field)
        self.delays: list[float] = []
        self._field = field
        self._pressed: deque[float] = deque()
        self._arrived = 0  # keys that the field has and did not show yet
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._type)
        field.installEventFilter(self)
        field.viewport().installEventFilter(self)

    @property
    def settled(self) -> bool:
        """Whether every key that was pressed is on the screen."""
        return not self._pressed

    def start(self) -> None:
        """Press the first key now, the others at a typist's pace."""
        self._thread.start()

    def stop(self) -> None:
        """Press no more keys; the last ones may not be :attr:`settled` yet."""
        self._ended.set()
        self._thread.join()

    def _type(self) -> None:
        while True:
            self._pressed.append(time.monotonic())
            for kind in (QEvent.Type.KeyPress, QEvent.Type.KeyRelease):
                key = QKeyEvent(kind, Qt.Key.Key_A, Qt.KeyboardModifier.NoModifier, "a")
                QCoreApplication.postEvent(self._field, key)
            if self._ended.wait(_KEY_SECONDS):
                return

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() is QEvent.Type.KeyPress:
            self._arrived += 1
        elif event.type() is QEvent.Type.Paint and watched is self._field.viewport():
            shown, self._arrived = self._arrived, 0
            # Behind the painting, which follows this call.
            QTimer.singleShot(0, self, lambda: self._shown(shown))
        return False

    def _shown(self, count: int) -> None:
        now = time.monotonic()
        self.delays += [now - self._pressed.popleft() for _ in range(count)]
