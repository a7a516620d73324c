"""Fixtures of the window: offscreen, with a profile of its own."""

from __future__ import annotations

import os

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QCoreApplication, QEvent

from moa_chat.desktop.appearance import Appearance
from moa_chat.desktop.profile import Profile, Settings
from moa_chat.desktop.window import Window
from moa_chat.history.store import History
from moa_chat.options import build_parser
from support.chat.desktop.window_driving import TOKEN, WAIT
from support.server.running import Verifier


@pytest.fixture
def options(onnx_bundle: Path) -> argparse.Namespace:
    return build_parser().parse_args(["--bundle", str(onnx_bundle), "--threads", "1"])


@pytest.fixture
def appearance(qapp) -> Appearance:
    return Appearance("light")


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return Profile(tmp_path / "profile")


@pytest.fixture
def open_window(
    qtbot, profile: Profile, appearance: Appearance, options: argparse.Namespace, onnx_bundle: Path
) -> Iterator[Callable[..., Window]]:
    """Opens the window as the program does; ``settings`` are the profile's, with a bundle."""
    windows = []

    def open_it(**settings) -> Window:
        chosen = Settings(**{"bundle": str(onnx_bundle), "max_new_tokens": 24, **settings})
        window = Window(profile, chosen, History.open(profile.history_path), appearance, options)
        windows.append(window)
        window.show()
        window.begin()
        return window

    yield open_it
    for window in windows:
        window.close()
        window.deleteLater()
    # At once: a window that is only waiting for its end is still styled anew by each test.
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


@pytest.fixture
def connected(open_window, verifier: Verifier, qtbot) -> Window:
    """A window with a chat that is online."""
    window = open_window(server=f"ws://127.0.0.1:{verifier.port}", token=TOKEN)
    qtbot.waitUntil(lambda: window.page.pill.accessibleDescription() in ("online", "slow"), timeout=WAIT)
    return window
