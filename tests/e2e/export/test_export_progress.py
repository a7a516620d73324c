"""How far an export is, where no terminal is, and what one leaves that is told to end."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moa_export import progress
from moa_export.progress import Progress
from moa_runtime.cli_main import own_program


def shown(stages: list[tuple[str, int]], **options: bool) -> list[str]:
    out = io.StringIO()
    drawn = Progress(out, **{"quiet": False, **options})
    for title, steps in stages:
        with drawn.stage(title, steps) as advance:
            for _ in range(steps):
                advance()
    return out.getvalue().splitlines()


def test_at_most_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [("reading", 1), ("comparing", 3)]
    assert shown(stages) == ["moa-export: reading (0 s gone)"], "the rest took no minute"
    assert shown(stages, quiet=True) == []
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    assert shown(stages) == ["moa-export: reading (0 s gone)", *["moa-export: comparing (0 s gone)"] * 4]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends programs without asking them")
def test_an_export_that_is_terminated_leaves_nothing(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    options = ("--model", tiny_target, "--drafter", tiny_drafter, "--out", tmp_path / "bundle")
    exporting = subprocess.Popen(own_program("moa_export.cli", *map(str, options)), stderr=subprocess.PIPE, text=True)
    while exporting.poll() is None and not list(tmp_path.iterdir()):
        time.sleep(0.01)
    exporting.terminate()
    said = exporting.communicate()[1]
    assert exporting.returncode == 128 + 15 and "Traceback" not in said
    assert not list(tmp_path.iterdir())
