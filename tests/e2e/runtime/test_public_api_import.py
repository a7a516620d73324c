"""The package's import in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_loads_none_of_its_modules() -> None:
    code = "import sys, moa_runtime; assert not [name for name in sys.modules if name.startswith('moa_runtime.')]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
