"""Output of a program that is not read, or cannot be encoded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="shells and devices of POSIX")
@pytest.mark.parametrize(
    ("into", "status", "end"),
    [(">&-", 0, ""), ("| true", 141, ""), ("> /dev/full", 2, "[disk_full]\n")],
)
@pytest.mark.parametrize("lines", [1, 100_000])
def test_output_into_a_closed_or_full_file(tmp_path: Path, into: str, status: int, end: str, lines: int) -> None:
    (tmp_path / "prog.py").write_text(
        "import sys, time\nfrom moa_runtime.cli_main import run_program\n"
        f"sys.exit(run_program('prog', lambda: time.sleep(0.3) or print('line\\n' * {lines}) or 0))"
    )
    command = f'set -o pipefail; "{sys.executable}" prog.py {into}'
    ran = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == status
    assert ran.stderr.endswith(end) and "Traceback" not in ran.stderr and "ignored" not in ran.stderr


def test_a_path_that_is_not_utf8_is_printed(tmp_path: Path) -> None:
    program = "import sys; from moa_runtime.cli_main import run_program; run_program('prog', lambda: print(*sys.argv))"
    ran = subprocess.run([sys.executable, "-X", "utf8", "-c", program, b"caf\xe9"], capture_output=True, text=True)
    assert ran.returncode == 0 and r"caf\udce9" in ran.stdout and ran.stderr == ""
