"""The keyboard while an answer is written, in a pseudo-terminal."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from terminal_program import CTRL_C

_WRITER = """
import os, sys, time
from moa_chat.keys import watch_keyboard

with watch_keyboard() as keyboard:
    sys.stdout.write("x" * 12000)
    sys.stdout.flush()
    sys.stderr.write("drawn\\n")
    sys.stderr.flush()
    while not keyboard.interrupts:
        time.sleep(0.01)
    sys.stderr.write("interrupted\\n")
    sys.stderr.flush()
    sys.stdin.read(1)
"""


def test_ctrl_c_throws_away_nothing_that_was_drawn():
    """Unless it is told not to, a terminal drops what it holds; here nobody reads it before Ctrl-C has come."""
    import fcntl
    import pty
    import termios

    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER],
        stdin=slave,
        stdout=slave,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        assert process.stderr.readline() == "drawn\n"
        os.write(master, CTRL_C.encode())
        assert process.stderr.readline() == "interrupted\n"
        shown = b""
        while len(shown) < 12000 and select.select([master], [], [], 5)[0]:
            shown += os.read(master, 4096)
        assert shown == b"x" * 12000
    finally:
        process.kill()
        process.communicate()
        os.close(master)
