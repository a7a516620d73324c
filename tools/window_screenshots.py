"""Draw the pictures of docs/chat.md: ``python tools/window_screenshots.py docs/screenshots``.

The window answers real questions, with a verifier that it starts on this machine, a bundle (the default one, or
``--bundle``) and a profile of its own that is gone afterwards.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from PySide6.QtWidgets import QWidget

from moa_chat import strings
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.window import Window
from moa_chat.local_verifier import ensure_bundle, local_verifier
from moa_runtime.errors import MoaError
from moa_runtime.paths import bundle_of_drafter
from staged_window import rest, staged_window, until

_ARGUMENTS = ("--seed", "1", "--drafting", "device")  # the same each time, and this device's drafts to be seen
_WIDTH, _HEIGHT = 1240, 820
_SETTLING_S = 0.5
_THEMES = ("light", "dark")
_FETCHED = 20  # per cent of the bundle, in the picture of a download
_QUESTIONS = (
    "Name three primary colours.",
    "What is the capital of France?",
    "Write a Python function that returns the factorial of n, and explain it.",
)
_OFFLINE_QUESTION = "Tell me a short story about a fox."
_NEW_QUESTION = "Why is the sky blue?"
_INSTRUCTIONS = "You are a patient teacher.\nAnswer in short sentences, and give an example."
_BEFORE_THE_TUNNEL, _IN_THE_TUNNEL = 20, 420  # characters confirmed, and characters written offline


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with a sentence when there is no bundle or no verifier."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the window for the documentation.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--bundle", default="", help="folder (default: the bundle in the cache)")
    parser.add_argument("--theme", choices=_THEMES, nargs="*", default=_THEMES)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        if not options.bundle:
            ensure_bundle()
        for theme in options.theme:
            _draw(Settings(bundle=options.bundle, theme=theme, max_new_tokens=160), options.out)
    except MoaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _draw(settings: Settings, out: Path) -> None:
    """Draw all pictures in the theme of the settings."""

    def path(name: str) -> Path:
        return out / f"{name}-{settings.theme}.png"

    plain = dataclasses.replace(settings, bundle="")  # no folder of this machine
    with staged_window(plain) as window:
        _open(window)
        _take(window, path("first-run"))
    _take_fetching(plain, settings.bundle, path)
    with staged_window(dataclasses.replace(settings, local=True), _ARGUMENTS) as window:
        _open(window)
        until(window, window.page.composer.is_ready)
        _take(window, path("empty"))
        _take_chats(window, path)
        _take_settings(window, path)
        _take_offline(window, path)
        _take_return(window, path)


def _take_fetching(settings: Settings, bundle: str, path: Callable[[str], Path]) -> None:
    """The first page while a new device fetches what a verifier hands out."""
    offered = ("--bundle", bundle or str(bundle_of_drafter(None)))
    with local_verifier(offered) as verifier, tempfile.TemporaryDirectory() as cache:
        kept = {name: os.environ.get(name) for name in ("MOA_EDGE_CACHE", "MOA_EDGE_BUNDLE")}
        os.environ.update({"MOA_EDGE_CACHE": cache, "MOA_EDGE_BUNDLE": f"{cache}/none"})
        try:
            with staged_window(settings) as window:
                _open(window)
                welcome = window.first_run
                address = urlsplit(verifier.endpoint.url)
                welcome.form.server.setText(f"http://{address.netloc}/#token={verifier.endpoint.token}")
                welcome.form.remote.setChecked(True)
                welcome.start.click()
                until(window, lambda: welcome.progress.bar.value() >= _FETCHED)
                welcome.form.server.setText(strings.ADDRESS_EXAMPLE)
                window.grab().save(str(path("fetching")))
                window.connector.cancel()
        finally:
            for name, value in kept.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _take_chats(window: Window, path: Callable[[str], Path]) -> None:
    for question in _QUESTIONS:
        window.chats.new_chat()
        _ask(window, question)
        until(window, lambda: not window.chats.busy)
    page = window.page
    page.plot_button.setChecked(True)
    _take(window, path("chat"))
    page.plot_button.setChecked(False)
    page.origins.setChecked(True)
    _take(window, path("origins"))
    page.origins.setChecked(False)


def _take_offline(window: Window, path: Callable[[str], Path]) -> None:
    """The middle of an answer, a moment after the connection is gone."""

    def characters(committed: bool) -> int:
        return sum(len(span.text) for span in window.chats.messages[-1].spans if span.committed is committed)

    window.chats.new_chat()
    _ask(window, _OFFLINE_QUESTION)
    until(window, lambda: characters(True) >= _BEFORE_THE_TUNNEL)
    window.page.offline.setChecked(True)
    until(window, lambda: characters(False) >= _IN_THE_TUNNEL)
    _take(window, path("offline"))


def _take_settings(window: Window, path: Callable[[str], Path]) -> None:
    window.chats.change_settings(dataclasses.replace(window.chats.settings, system=_INSTRUCTIONS))
    window.open_chat_settings()
    dialog = window.chat_settings_dialog
    assert dialog is not None
    _take(dialog, path("chat-settings"))
    dialog.reject()
    window.open_settings()
    shown = window.settings_dialog
    assert shown is not None
    _take(shown, path("settings"))
    shown.reject()


def _take_return(window: Window, path: Callable[[str], Path]) -> None:
    """A new question without network; then the verifier is back, and has checked what was written."""
    window.chats.stop()
    until(window, lambda: not window.chats.busy)
    assert window.chats.current is not None
    window.chats.delete(window.chats.current)  # or its words would count among those that are corrected
    window.page.notice.hide()
    _ask(window, _NEW_QUESTION)
    until(window, lambda: not window.chats.busy)
    _take(window, path("asked-offline"))
    window.page.offline.setChecked(False)
    until(window, lambda: not window.chats.history.unconfirmed() and "this device wrote" in window.page.notice.text)
    _take(window, path("return"))


def _open(window: Window) -> None:
    window.resize(_WIDTH, _HEIGHT)
    window.show()
    window.begin()


def _ask(window: Window, question: str) -> None:
    window.page.composer.field.setPlainText(question)
    window.page.composer.send()


def _take(shown: QWidget, path: Path) -> None:
    rest(_SETTLING_S)
    shown.grab().save(str(path))


if __name__ == "__main__":
    sys.exit(main())
