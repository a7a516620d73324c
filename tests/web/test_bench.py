"""``moa-bench web``: steps in a real browser beside Python's."""

from __future__ import annotations

import json
import shutil
import socket
import struct
from pathlib import Path

import pytest

from moa_bench.cli import main
from moa_bench.web import present
from moa_bench.web.browser import BrowserPage
from moa_export.targets.web_engine import VERSION, WebEngine
from moa_runtime.bundle import read_manifest, write_manifest


def test_steps_of_both_graphs_are_timed(
    browser: str, web_bundle: Path, web_engine_here: WebEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "steps.svg"
    words = [
        "web",
        "--bundle",
        web_bundle,
        "--contexts",
        "16,4",
        "--repeats",
        "2",
        "--writer",
        "--json",
        "--plot",
        plot,
    ]
    assert main(list(map(str, words))) == 0
    result = json.loads(capsys.readouterr().out)
    assert not result["partial"] and result["settings"]["contexts"] == [4, 16]
    assert "Chrome" in result["browser"]["agent"] and result["browser"]["onnxruntime-web"] == VERSION
    for graph, file in (("drafter", "device_half.web.onnx"), ("writer", "writer.web.onnx")):
        figures = result["graphs"][graph]
        assert figures["bytes"] == (web_bundle / file).stat().st_size and figures["load_ms"] > 0
        assert [(step["context"], step["tokens"]) for step in figures["steps"]] == [(4, 1), (4, 8), (16, 1), (16, 8)]
        assert all(
            step["ratio"] == pytest.approx(step["ms"] / step["python_ms"], rel=0.02) for step in figures["steps"]
        )
    (table,) = present.tables(result)
    assert len(table.rows) == 8 and "one thread each" in table.note
    assert plot.read_text().count("<svg") == 1


def test_a_graph_that_the_browser_cannot_load_ends_it_with_a_sentence(
    browser: str, web_bundle: Path, web_engine_here: WebEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "bundle"
    shutil.copytree(web_bundle, broken)
    (broken / "device_half.web.onnx").write_bytes(b"no graph")
    write_manifest(broken, read_manifest(broken))
    assert main(["web", "--bundle", str(broken)]) == 1
    assert "partial result: the browser failed: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--browser", "no-such-browser"], "no browser: no-such-browser is not installed"),
        (["--contexts", "0,16"], "--contexts must be 1 to "),
        (["--contexts", "many"], "--contexts must be whole numbers"),
        (["--repeats", "0"], "--repeats must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(
    web_bundle: Path,
    web_engine_here: WebEngine,
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["web", "--bundle", str(web_bundle), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_bundle_without_a_graph_for_browsers_is_a_sentence(
    onnx_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["web", "--bundle", str(onnx_bundle)]) == 2
    assert "has no graph for 'web'; it has: onnx" in capsys.readouterr().err


def test_a_connection_that_the_browser_resets_prints_nothing(
    browser: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        BrowserPage(browser, "/", {"/": tmp_path}) as page,
        socket.create_connection(("127.0.0.1", page.port)) as connection,
    ):
        connection.sendall(b"GET")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
    assert capsys.readouterr().err == ""
