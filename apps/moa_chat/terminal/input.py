"""The keyboard while an answer is written: Ctrl-C, and single keys without an echo into the answer."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from types import FrameType

#: What arrow and function keys send.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)?")


class TypedAhead:
    """Text that was typed while an answer was written, for the prompts after it. ``begun`` is the line without end."""

    def __init__(self) -> None:
        self.begun = ""
        self._lines: list[str] = []

    def add(self, keys: str) -> None:
        for char in _ESCAPE.sub("", keys):
            if char in "\r\n":
                self._lines += [self.begun] if self.begun.strip() else []
                self.begun = ""
            elif char in "\x7f\b":
                self.begun = self.begun[:-1]
            elif char == "\x04" and not self.begun:  # Ctrl-D
                self._lines.append("/quit")
            elif char.isprintable():
                self.begun += char

    def take_line(self) -> str | None:
        """Return the first whole line; None if there is none."""
        return self._lines.pop(0) if self._lines else None

    def take_begun(self) -> str:
        begun, self.begun = self.begun, ""
        return begun


def read_line(prompt: str, begun: str = "") -> str:
    """Return a line as ``input`` does; ``begun`` stands in it already, if there is line editing."""
    try:
        import readline
    except ImportError:  # Windows
        return input(prompt)
    readline.set_startup_hook(lambda: readline.insert_text(begun))
    try:
        return input(prompt)
    finally:
        readline.set_startup_hook()


class Keyboard:
    """Keys that were pressed. ``interrupts`` counts Ctrl-C."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.reads_keys = False

    def pressed(self) -> str:
        """Return the keys pressed since the last call."""
        if not self.reads_keys or not select.select([sys.stdin], [], [], 0)[0]:
            return ""
        return os.read(sys.stdin.fileno(), 1024).decode(errors="ignore")


@contextlib.contextmanager
def watch_keyboard() -> Iterator[Keyboard]:
    """Collect keys and Ctrl-C while the context is open.

    Ctrl-C is counted instead of raising KeyboardInterrupt, which could come in the middle of drawing; the third one
    raises it after all, in case the count is not read. Must be called in the main thread.
    """
    keyboard = Keyboard()

    def interrupted(number: int, frame: FrameType | None) -> None:
        keyboard.interrupts += 1
        if keyboard.interrupts > 2:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        with _single_keys(keyboard):
            yield keyboard
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _single_keys(keyboard: Keyboard) -> Iterator[None]:
    """Switch line editing and echo off, if stdin is a POSIX terminal."""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield
        return
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        tty.setcbreak(descriptor)
        # A terminal throws away at Ctrl-C what it has not shown yet, and with it our count of rows; not with NOFLSH.
        during = termios.tcgetattr(descriptor)
        during[3] |= termios.NOFLSH
        termios.tcsetattr(descriptor, termios.TCSANOW, during)
    except (OSError, ValueError, termios.error):  # no terminal
        yield
        return
    keyboard.reads_keys = True
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
