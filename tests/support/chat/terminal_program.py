"""A program in a pseudo-terminal whose screen can be read."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence

from support.chat.ansi_screen import AnsiScreen

CTRL_C, CTRL_D = "\x03", "\x04"


class TerminalProgram:
    """``press`` keys, ``wait`` for a text on the screen."""

    def __init__(self, process: subprocess.Popen, master: int, screen: AnsiScreen) -> None:
        self.process, self._master, self.screen = process, master, screen
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def text(self) -> str:
        """Everything written so far, what has scrolled out included."""
        return "\n".join(self.screen.text())

    def wait(self, pattern: str, count: int = 1, seconds: float = 60) -> str:
        """The text in which the pattern occurs ``count`` times."""
        deadline = time.monotonic() + seconds
        while len(re.findall(pattern, text := self.text())) < count:
            assert time.monotonic() < deadline and self.process.poll() is None, f"no {pattern!r} in:\n{text}"
            time.sleep(0.02)
        return text

    def read_to_the_end(self) -> None:
        """Wait until all that the ended program wrote is read."""
        self._reader.join()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        pending = ""
        with contextlib.suppress(OSError):  # what Linux says when the other end is closed
            while data := os.read(self._master, 65536):
                pending += decoder.decode(data)
                # An escape sequence may come in two parts.
                cut = pending.rfind("\x1b") if re.search(r"\x1b(\[[?0-9;]*)?$", pending) else len(pending)
                self.screen.write(pending[:cut])
                pending = pending[cut:]


def listen_to_ctrl_c() -> None:
    """For ``preexec_fn``: Ctrl-C in the terminal on stdin is a signal that the program hears."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job, as these tests may be, ignores it


@contextlib.contextmanager
def in_terminal(
    command: Sequence[str], *, columns: int = 100, rows: int = 30, **environment: str
) -> Iterator[TerminalProgram]:
    """Run the command in a terminal of its own; it is killed at the end if it still runs."""
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull, "PYTHONUTF8": "1", **environment},
        start_new_session=True,
        preexec_fn=listen_to_ctrl_c,
    )
    os.close(slave)
    terminal = TerminalProgram(process, master, AnsiScreen(columns, rows))
    try:
        yield terminal
    finally:
        process.kill()
        process.wait()
        terminal.read_to_the_end()  # else it would read what the next terminal gets, whose number is the same
        os.close(master)
