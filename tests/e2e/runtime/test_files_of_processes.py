"""Private files and a chat's file, used by several processes and by killed ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moa_runtime.atomic_file import remove_private, replace_private
from moa_runtime.chat_store import ChatStore, StoreError
from support.refusals import refused
from unit.runtime.test_private_file import names, posix

SIZE = 1 << 20

_WRITER = """
import sys
from pathlib import Path
from moa_runtime.atomic_file import replace_private
for _ in range(40):
    replace_private(Path(sys.argv[1]), [sys.argv[2].encode() * 1024 for _ in range(1024)])
"""
_KILLED = """
import os, sys
from pathlib import Path
from moa_runtime.atomic_file import replace_private
def parts():
    yield b"secret" * 100000
    os.kill(os.getpid(), 9)
replace_private(Path(sys.argv[1]), parts())
"""
_HOLDER = """
import sys
from moa_runtime.chat_store import ChatStore
store = ChatStore(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


@posix
def test_programs_that_write_at_once_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_private(path, [b"a" * SIZE])
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(path), letter]) for letter in "bcd"]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        held = path.read_bytes()
        assert len(held) == SIZE and held == held[:1] * SIZE
        reads += 1
    assert [writer.returncode for writer in writers] == [0, 0, 0] and reads
    assert names(tmp_path) == {"file"}


@posix
def test_a_program_that_is_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for finish in (remove_private, lambda path: replace_private(path, [b"after"])):
        replace_private(path, [b"before"])
        killed = subprocess.run([sys.executable, "-c", _KILLED, str(path)], check=False)
        assert killed.returncode == -9 and path.read_bytes() == b"before"
        assert any(b"secret" in each.read_bytes() for each in tmp_path.iterdir())
        finish(path)
        assert not any(b"secret" in each.read_bytes() for each in tmp_path.iterdir())
    assert names(tmp_path) == {"file"} and path.read_bytes() == b"after"


def test_a_chat_is_open_in_one_program_and_free_when_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "chat.json"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
        with refused("in_use", StoreError) as caught:
            ChatStore(path)
        assert str(path) in str(caught.value)
        holder.kill()
        holder.wait()
    ChatStore(path).close()
