"""Fixtures of the window: offscreen, with a profile of its own."""

from __future__ import annotations

import os

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

import argparse
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QCoreApplication, QEvent

from moa_bench.link import with_round_trip
from moa_bench.link.proxy import BackgroundLink, background_link
from moa_chat.desktop.appearance import Appearance
from moa_chat.desktop.profile import Profile, Settings
from moa_chat.desktop.window import Window
from moa_chat.history.store import History
from moa_chat.options import build_parser
from moa_server.engine.base import Engine, StepRequest
from support.chat.desktop.window_driving import AWAY, TOKEN, WAIT, is_online
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
def history(profile: Profile) -> Iterator[History]:
    """The profile's history, without a window."""
    opened = History.open(profile.history_path)
    yield opened
    opened.close()


@pytest.fixture
def until(qtbot) -> Callable[[Callable[[], object]], None]:
    """Waits for a condition while the window lives."""
    return lambda condition: qtbot.waitUntil(lambda: bool(condition()), timeout=WAIT)


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
def open_online(open_window, verifier: Verifier, until) -> Callable[..., Window]:
    """Opens a window whose chat can be asked."""

    def open_it(**settings) -> Window:
        window = open_window(**{"server": verifier.url, "token": TOKEN, **settings})
        until(window.page.composer.is_ready)
        return window

    return open_it


@pytest.fixture
def connected(open_online, until) -> Window:
    """A window with a chat that is online."""
    window = open_online()
    until(lambda: is_online(window))
    return window


@pytest.fixture
def away(open_window) -> Window:
    """A window whose verifier is away."""
    return open_window(server=AWAY)


@pytest.fixture
def writing(open_online, writing_bundle) -> Window:
    """A window whose device has a writer, for answers without the verifier."""
    return open_online(bundle=str(writing_bundle), max_new_tokens=16)


@pytest.fixture
def steps(engine: Engine, memory_rows: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Lets the verifier make one step for each release; at first a prompt and one round. The device has their rows."""
    steps, step_now = threading.Semaphore(2), engine.step_now

    def when_let(requests: list[StepRequest]) -> Any:
        steps.acquire()
        return step_now(requests)

    monkeypatch.setattr(engine, "step_now", when_let)
    yield steps
    steps.release(1000)


@pytest.fixture
def link(verifier: Verifier) -> Iterator[BackgroundLink]:
    """A link to the verifier that can be cut; its address is ``ws://127.0.0.1:PORT``."""
    with background_link(with_round_trip(10), "127.0.0.1", verifier.port) as link:
        yield link
