"""The keyboard while an answer is written, in a pseudo-terminal."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from support.chat.terminal_program import CTRL_C, listen_to_ctrl_c

_WRITER = """
import os, sys, time
from moa_chat.terminal.input import watch_keyboard

with watch_keyboard() as keyboard:
    os.set_blocking(1, False)  # terminals hold different amounts of unread text
    written = 0
    try:
        while written < 12000:
            written += os.write(1, b"x" * 1000)
    except BlockingIOError:
        pass
    print(written, file=sys.stderr, flush=True)
    while not keyboard.interrupts:
        time.sleep(0.01)
    print("interrupted", file=sys.stderr, flush=True)
    time.sleep(60)
"""


def test_ctrl_c_drops_nothing_that_was_drawn():
    """By default a terminal drops the text that it holds at Ctrl-C; here it is read after that."""
    import pty

    master, slave = pty.openpty()
    options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True, "preexec_fn": listen_to_ctrl_c}
    process = subprocess.Popen([sys.executable, "-c", _WRITER], stdin=slave, stdout=slave, **options)
    os.close(slave)
    try:
        written = int(process.stderr.readline())
        os.write(master, CTRL_C.encode())
        assert process.stderr.readline() == "interrupted\n"
        shown = b""
        while len(shown) < written and select.select([master], [], [], 5)[0]:
            shown += os.read(master, 4096)
        assert written and shown == b"x" * written
    finally:
        process.kill()
        process.communicate()
        os.close(master)
