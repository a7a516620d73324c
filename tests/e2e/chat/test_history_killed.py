"""Chats are kept although the program was killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys

from moa_chat.history.store import History


def test_a_killed_program_loses_nothing_that_was_saved(tmp_path):
    path = tmp_path / "history.sqlite"
    script = (
        "import os, sys; from pathlib import Path\n"
        "from moa_chat.history.store import History; from moa_chat.history.message import Message\n"
        "history = History.open(Path(sys.argv[1])); chat = history.create('Chat')\n"
        "history.save(chat, 0, Message('user', 'Question'))\n"
        "for length in range(1, 100): history.save(chat, 1, Message('assistant', 'x' * length, finished=False))\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)], timeout=60).returncode != 0
    with contextlib.closing(History.open(path)) as history:
        assert history.set_aside is None
        assert [message.content for message in history.messages(history.chats()[0].id)] == ["Question", "x" * 99]
