"""Open a window that a program drives, for pictures and measurements."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from PySide6.QtCore import QEventLoop, QTimer
from PySide6.QtWidgets import QApplication

from moa_chat.desktop.appearance import Appearance
from moa_chat.desktop.profile import Profile, Settings
from moa_chat.desktop.window import Window
from moa_chat.history.store import History
from moa_chat.options import build_parser
from moa_runtime.errors import MoaError

_PATIENCE_S = 300.0
_LOOK_MS = 20


@contextlib.contextmanager
def staged_window(settings: Settings, arguments: Sequence[str] = ()) -> Iterator[Window]:
    """A window with a profile of its own that is gone afterwards. It is not shown yet.

    Args:
        arguments: of the command line.
    """
    application = QApplication.instance() or QApplication([])
    assert isinstance(application, QApplication)
    application.setStyle("Fusion")
    with tempfile.TemporaryDirectory() as folder:
        profile = Profile(Path(folder))
        history = History.open(profile.history_path)
        appearance = Appearance(settings.theme, settings.zoom)
        window = Window(profile, settings, history, appearance, build_parser().parse_args(arguments))
        try:
            yield window
        finally:
            window.close()
            window.deleteLater()


def rest(seconds: float) -> None:
    """Let the window live."""
    loop = QEventLoop()
    QTimer.singleShot(round(1000 * seconds), loop.quit)
    loop.exec()


def until(window: Window, condition: Callable[[], bool]) -> None:
    """Let the window live until something is so.

    Raises:
        MoaError: it cannot connect, or it takes minutes.
    """
    problems: list[MoaError] = []
    window.connector.failed.connect(problems.append)
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        if problems:
            raise problems[0]
        if time.monotonic() > end:
            raise MoaError(f"the window was not ready within {_PATIENCE_S:g} s", code="timeout")
        rest(_LOOK_MS / 1000)
    window.connector.failed.disconnect(problems.append)
