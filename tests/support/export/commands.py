"""``moa-export`` in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moa_export import cli


def run(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> str:
    """Run the command with an expected exit status; return what it printed."""
    assert cli.main([str(arg) for arg in argv]) == status
    return capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    """Run the command with ``--json``; return the object that it printed."""
    return json.loads(run(capsys, *argv, "--json"))


def refuse(capsys: pytest.CaptureFixture[str], code: str | None, *argv: object) -> str:
    """Run a command that is refused with an error of this code; return the line that says so."""
    assert cli.main([str(arg) for arg in argv]) == 2
    *before, said = capsys.readouterr().err.splitlines()
    assert said.startswith("moa-export: error: ") and all(line.endswith(" s gone)") for line in before)
    assert code is None or said.endswith(f"  [{code}]"), said
    return said
