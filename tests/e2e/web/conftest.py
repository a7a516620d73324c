"""The TypeScript runtime, compiled."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from support.web.typescript import WEB


@pytest.fixture(scope="session")
def compiled() -> Path:
    """The folder of ``runtime/web``, whose ``dist`` is made of the sources as they are."""
    compiler = WEB / "node_modules" / ".bin" / "tsc"
    if not compiler.exists():
        missing = "the TypeScript runtime's packages are not installed: make test-web does that"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with FileLock(WEB / "node_modules" / ".tests.lock"):
        done = subprocess.run([compiler, "-b", "test"], cwd=WEB, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return WEB
