"""``moa-core.js`` in the JavaScript engines that phones have, without a browser's functions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.web.test_chats import Setting, converse
from moa_export.targets.web import WebEngine

ENGINES = ("quickjs", "jsc")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "jsc" and not shutil.which("jsc"):
        missing = "JavaScriptCore's shell is not installed: make test-e2e does that"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return name


@pytest.fixture
def tiny(tiny_target: Path, tiny_drafter: Path, web_bundle: Path, tmp_path: Path, unused_port: int) -> Setting:
    options = ("--model", str(tiny_target), "--drafter", str(tiny_drafter))
    return Setting(tmp_path, web_bundle, unused_port, options, 0.8, 64)


@pytest.mark.parametrize(
    ("engine", "build"),
    [("jsc", "hermes"), *(pytest.param(name, "moa-core", marks=pytest.mark.slow) for name in ENGINES)],
    indirect=["engine"],
)
def test_vectors_are_replayed(compiled: Path, engine: str, build: str) -> None:
    command = ["node", str(compiled / "dist" / "test" / "engines" / "replay_in.js"), engine, build]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *results, end = [json.loads(line) for line in done.stdout.splitlines()]
    assert end is None and len(results) > 25
    assert [problem for _, problem in results if problem] == []


def test_two_conversations_to_which_things_happen(
    compiled: Path, engine: str, tiny: Setting, web_engine_here: WebEngine
) -> None:
    happened = converse(compiled, replace(tiny), 2, 1, {"engine": engine, "ort": str(web_engine_here.module)})
    assert sum(happened.values()) >= 2
