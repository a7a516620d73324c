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


@pytest.mark.parametrize("build", ["moa-core", "hermes"])
def test_vectors_are_replayed(compiled: Path, engine: str, build: str) -> None:
    if (engine, build) == ("quickjs", "hermes"):
        pytest.skip("the lowered build is replayed in one engine")
    command = ["node", str(compiled / "dist" / "test" / "engines" / "replay_in.js"), engine, build]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *results, end = [json.loads(line) for line in done.stdout.splitlines()]
    assert end is None and len(results) > 25
    assert [problem for _, problem in results if problem] == []


def test_five_conversations_to_which_things_happen(
    compiled: Path, engine: str, tiny: Setting, web_engine_here: WebEngine
) -> None:
    happened = converse(compiled, replace(tiny), 5, 1, {"engine": engine, "ort": str(web_engine_here.module)})
    assert sum(happened.values()) >= 5
