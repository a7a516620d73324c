"""The names of shipped drafters in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys


def test_names_need_no_torch():
    code = "import sys, moa_drafter.pretrained; assert not {'numpy', 'torch', 'safetensors'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
