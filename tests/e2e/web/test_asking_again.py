"""A program around ``moa-core.js`` asks while an answer is being written."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from support.server.running import Verifier
from support.system.asking import QUESTION

JSC = pytest.param("jsc", marks=pytest.mark.skipif(not shutil.which("jsc"), reason="make test-e2e installs it"))


@pytest.mark.parametrize("within", ["quickjs", JSC])
def test_the_earlier_answer_ends(compiled: Path, verifier: Verifier, web_bundle: Path, within: str) -> None:
    """A program that leaves the earlier one only afterwards does not stop the later one."""
    program, where = compiled / "dist" / "test" / "engines" / "asking_again.js", f"ws://127.0.0.1:{verifier.port}"
    command = ["node", program, within, web_bundle, where, verifier.token]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [number for number, event in said["events"] if event == "AnswerFinished"] == [3]
    assert [turn["content"] for turn in said["state"]["messages"][::2]] == [QUESTION, "And now?"]
    link = {name: said["state"][name] for name in ("status", "retryInS", "late")}
    assert link == {"status": "online", "retryInS": None, "late": False}
