"""The TypeScript runtime, compiled, and a tiny bundle for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from web.typescript import WEB


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


@pytest.fixture(scope="session")
def web_bundle(tiny_target: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For onnxruntime-web, with a writer in 8 bits. Nobody compared its graphs."""
    from moa_export.pipeline import ExportSettings, export_bundle
    from moa_export.progress import Progress
    from moa_export.writer import WriterSettings

    out = tmp_path_factory.mktemp("web") / "bundle"
    settings = ExportSettings(
        ("web",), tiny_drafter, model=str(tiny_target), checked=False, writer=WriterSettings("target", bits=8)
    )
    export_bundle(out, settings, Progress(sys.stderr, quiet=True))
    return out
