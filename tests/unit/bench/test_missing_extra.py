"""``moa-bench`` of an installation without its extra."""

from __future__ import annotations

import subprocess
import sys


def test_what_is_missing_is_a_sentence() -> None:
    program = "import sys; sys.modules['simpy'] = None; from moa_bench.program import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "simpy" in done.stderr and "[missing_package]" in done.stderr
    done = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("moa-bench ")
    whole = program.replace("sys.modules['simpy'] = None; ", "")
    done = subprocess.run([sys.executable, "-c", whole, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "usage: moa-bench" in done.stdout
