"""A chat's file in several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moa_runtime.chat_store import ChatStore, StoreError
from support.refusals import refused
from unit.runtime.test_chat_store import posix


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "chat.json"


@posix
def test_a_program_that_is_killed_while_it_writes_leaves_a_whole_file(path: Path) -> None:
    code = (
        "import sys; from moa_runtime.chat_store import ChatStore; store = ChatStore(sys.argv[1])\n"
        "for n in range(10**9):\n    store.write({'n': n, 'text': str(n) * 20000})\n    print(n, flush=True)"
    )
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        written = [int(writer.stdout.readline()) for _ in range(3)][-1]
        writer.kill()
        writer.communicate()
        store = ChatStore(path)  # the lock went with the program
        content = store.read()
        assert content["n"] >= written and content["text"] == str(content["n"]) * 20000
        store.close()
    assert len(list(path.parent.iterdir())) <= 3


def test_a_second_program_is_told_that_it_is_one(path: Path) -> None:
    first = ChatStore(path)
    first.write({"of": "the first"})
    code = "import sys; from moa_runtime.chat_store import ChatStore; ChatStore(sys.argv[1])"
    other = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert other.returncode == 1 and "StoreError" in other.stderr and str(path) in other.stderr
    with refused("in_use", StoreError):
        ChatStore(path)
    assert first.read() == {"of": "the first"}
    first.close()
    ChatStore(path).close()
