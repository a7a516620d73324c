"""Private files written by several processes, and by killed ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moa_runtime.atomic_file import remove_private, replace_private
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
def test_what_a_killed_program_left_goes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_private(path, [b"before"])
    for finish in (remove_private, lambda path: replace_private(path, [b"after"])):
        killed = subprocess.run([sys.executable, "-c", _KILLED, str(path)], check=False)
        assert killed.returncode == -9 and len(names(tmp_path)) >= 1
        assert any(b"secret" in each.read_bytes() for each in tmp_path.iterdir())
        finish(path)
        assert not any(b"secret" in each.read_bytes() for each in tmp_path.iterdir())
    assert names(tmp_path) == {"file"} and path.read_bytes() == b"after"
