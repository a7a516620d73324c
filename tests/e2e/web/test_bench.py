"""``runtime/web/bench.mjs``: steps in a real browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from moa_export.targets.web import VERSION, WebEngine

BENCH = Path(__file__).parents[3] / "runtime" / "web" / "bench.mjs"


def bench(engine: WebEngine, bundle: Path, *words: str) -> subprocess.CompletedProcess[str]:
    where = ["--bundle", str(bundle), "--ort", str(engine.module.parent)]
    return subprocess.run([engine.node, str(BENCH), *where, *words], capture_output=True, text=True)


def test_steps_of_both_graphs_are_timed(browser: str, web_bundle: Path, web_engine_here: WebEngine) -> None:
    words = ["--browser", browser, "--contexts", "4,16", "--repeats", "2", "--writer"]
    done = bench(web_engine_here, web_bundle, *words, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "Chrome" in result["agent"] and result["version"] == VERSION
    for graph, file in (("drafter", "device_half.web.onnx"), ("writer", "writer.web.onnx")):
        figures = result["graphs"][graph]
        assert figures["bytes"] == (web_bundle / file).stat().st_size and figures["load_ms"] > 0
        assert [(step["context"], step["tokens"]) for step in figures["steps"]] == [(4, 1), (4, 8), (16, 1), (16, 8)]
        # A browser's clock is coarse.
        assert all(0 <= step["least_ms"] <= step["ms"] <= step["p95_ms"] for step in figures["steps"])
    table = bench(web_engine_here, web_bundle, *words).stdout.splitlines()
    assert len(table) == 1 + 8 + 2 + 1 and table[1].split()[:3] == ["drafter", "4", "1"]


def test_a_graph_that_the_browser_cannot_load_is_one_sentence(browser, web_bundle, web_engine_here, tmp_path):
    broken = tmp_path / "bundle"
    shutil.copytree(web_bundle, broken)
    (broken / "device_half.web.onnx").write_bytes(b"no graph")
    done = bench(web_engine_here, broken, "--browser", browser)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("bench: error: the browser failed: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--browser", "no-such-browser"], "no-such-browser is not installed"),
        (["--contexts", "0,16"], "--contexts must be whole numbers from 1 to "),
        (["--contexts", "many"], "--contexts must be whole numbers"),
        (["--repeats", "0"], "--repeats must be whole numbers from 1"),
        (["--ort", "no-such-folder"], "there is no ort.wasm.bundle.min.mjs in no-such-folder"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_bad_input_is_one_sentence(web_bundle: Path, web_engine_here: WebEngine, words: list[str], said: str) -> None:
    done = bench(web_engine_here, web_bundle, *words)
    assert done.returncode == 2 and done.stderr.startswith("bench: error: ")
    assert said in done.stderr and "    at " not in done.stderr


def test_a_bundle_without_a_graph_for_browsers_is_one_sentence(onnx_bundle: Path, web_engine_here: WebEngine) -> None:
    done = bench(web_engine_here, onnx_bundle)
    assert done.returncode == 2 and "has no graph for browsers: export it with --target web" in done.stderr
