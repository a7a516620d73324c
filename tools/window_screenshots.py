"""Draw the pictures of docs/chat.md: ``python tools/window_screenshots.py docs/screenshots``.

The window answers real questions, with a verifier that it starts on this machine, a bundle (the default one, or
``--bundle``) and a profile of its own that is gone afterwards.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from PySide6.QtWidgets import QWidget

from moa_chat.desktop.profile import Settings
from moa_chat.desktop.window import Window
from moa_chat.local_verifier import ensure_bundle
from moa_runtime.errors import MoaError
from staged_window import rest, staged_window, until

_ARGUMENTS = ("--seed", "1", "--drafting", "device")  # the same each time, and this device's drafts to be seen
_WIDTH, _HEIGHT = 1240, 820
_SETTLING_S = 0.5
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
    says = "of all but the dark picture of a chat"
    parser.add_argument("--theme", choices=("light", "dark"), default="light", help=says)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(bundle=options.bundle, theme=options.theme, max_new_tokens=160)
    try:
        if not options.bundle:
            ensure_bundle()
        with staged_window(settings) as window:
            _open(window)
            _take(window, options.out / "first-run.png")
        with staged_window(dataclasses.replace(settings, local=True), _ARGUMENTS) as window:
            _open(window)
            until(window, window.page.composer.is_ready)
            _take_chats(window, options.out)
            _take_settings(window, options.out)
            _take_offline(window, options.out)
            _take_return(window, options.out)
    except MoaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _take_chats(window: Window, out: Path) -> None:
    for question in _QUESTIONS:
        window.chats.new_chat()
        _ask(window, question)
        until(window, lambda: not window.chats.busy)
    page = window.page
    page.plot_button.setChecked(True)
    _take(window, out / "chat-light.png")
    page.plot_button.setChecked(False)
    window.appearance.set_theme("dark")
    _take(window, out / "chat-dark.png")
    window.appearance.set_theme(window.settings.theme)
    page.origins.setChecked(True)
    _take(window, out / "origins.png")
    page.origins.setChecked(False)


def _take_offline(window: Window, out: Path) -> None:
    """The middle of an answer, a moment after the connection is gone."""

    def characters(committed: bool) -> int:
        return sum(len(span.text) for span in window.chats.messages[-1].spans if span.committed is committed)

    window.chats.new_chat()
    _ask(window, _OFFLINE_QUESTION)
    until(window, lambda: characters(True) >= _BEFORE_THE_TUNNEL)
    window.page.offline.setChecked(True)
    until(window, lambda: characters(False) >= _IN_THE_TUNNEL)
    _take(window, out / "offline.png")


def _take_settings(window: Window, out: Path) -> None:
    window.chats.change_settings(dataclasses.replace(window.chats.settings, system=_INSTRUCTIONS))
    window.open_chat_settings()
    dialog = window.chat_settings_dialog
    assert dialog is not None
    _take(dialog, out / "chat-settings.png")
    dialog.reject()


def _take_return(window: Window, out: Path) -> None:
    """A new question without network; then the verifier is back, and has checked what was written."""
    window.chats.stop()
    until(window, lambda: not window.chats.busy)
    assert window.chats.current is not None
    window.chats.delete(window.chats.current)  # or its words would count among those that are corrected
    window.page.notice.hide()
    _ask(window, _NEW_QUESTION)
    until(window, lambda: not window.chats.busy)
    _take(window, out / "asked-offline.png")
    window.page.offline.setChecked(False)
    until(window, lambda: not window.chats.history.unconfirmed() and "this device wrote" in window.page.notice.text)
    _take(window, out / "return.png")


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
