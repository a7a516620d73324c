"""The README of a bundle describes its graphs, and its samples run them."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moa_export.built_bundle import build_bundle
from moa_export.bundle_commands import COMMANDS
from moa_export.errors import ExportError
from moa_export.progress import Progress
from moa_export.targets.web import WebEngine
from moa_runtime.bundle import Bundle
from support.refusals import refused

ESBUILD = Path(__file__).parents[3] / "runtime" / "web" / "node_modules" / ".bin" / "esbuild"
#: onnxruntime-web asks for it in Node, where its modules have none.
REQUIRE = 'data:text/javascript,import{createRequire}from"node:module";globalThis.require=createRequire("file:///")'


@pytest.fixture
def bundle(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> Bundle:
    progress = Progress(io.StringIO(), quiet=True)
    build_bundle(tmp_path / "bundle", progress, ("onnx", "web"), tiny_drafter, model=str(tiny_target))
    return Bundle.open(tmp_path / "bundle")


def sample(bundle: Bundle, graph: str, language: str) -> str:
    text = (bundle.folder / "README.md").read_text()
    section = text.split(f"## {graph}: ", 1)[1].split("\n## ", 1)[0]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found, section
    return found[1]


def check_printed(printed: str, code: str, comment: str) -> None:
    """It is what the sample's last comment says."""
    (token, logprob), (expected, about) = printed.split(), code.rpartition(comment)[2].split()
    assert token == expected and float(logprob) == pytest.approx(float(about), abs=0.05)


def test_a_sample_in_python_prints_what_it_says(bundle: Bundle) -> None:
    code = sample(bundle, "onnx", "python")
    run = subprocess.run([sys.executable, "-c", code], cwd=bundle.folder, capture_output=True, text=True, check=True)
    check_printed(run.stdout, code, "# ")


def test_a_sample_for_executorch_prints_what_it_says(every_target: Bundle) -> None:
    code = sample(every_target, "executorch", "python")
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=every_target.folder, capture_output=True, text=True, check=True)
    check_printed(run.stdout, code, "# ")
    assert "@" not in (every_target.folder / "README.md").read_text()


@pytest.mark.skipif(not ESBUILD.exists(), reason="make test-web installs it")
@pytest.mark.parametrize("graph", ["onnx", "web"])
def test_a_sample_in_typescript_prints_what_it_says(bundle: Bundle, web_engine_here: WebEngine, graph: str) -> None:
    code, engine = sample(bundle, graph, "typescript"), web_engine_here
    plain = subprocess.run([ESBUILD, "--loader=ts"], input=code, capture_output=True, text=True, check=True).stdout
    plain = re.sub('"onnxruntime-(web|node)"', json.dumps(engine.module.as_uri()), plain)
    # A browser fetches the file.
    plain = re.sub(r'create\((".*?")', r'create(await (await import("node:fs/promises")).readFile(\1)', plain)
    (bundle.folder / "sample.mjs").write_text(plain)
    command = [engine.node, "--import", REQUIRE, "sample.mjs"]
    run = subprocess.run(command, cwd=bundle.folder, capture_output=True, text=True, check=True)
    check_printed(run.stdout, code.rstrip(), "// ")


def test_every_graph_is_described(bundle: Bundle) -> None:
    text = (bundle.folder / "README.md").read_text()
    for name, entry in {**bundle.manifest.targets, **bundle.manifest.writers}.items():
        assert f"## {name}: `{entry.file}`, {entry.bytes / 1e6:.1f} MB" in text
    for spec in (*(entry := bundle.manifest.targets["onnx"]).inputs, *entry.outputs):
        assert f"`{spec.name}` {spec.dtype} [{', '.join(map(str, spec.shape))}]" in text
    assert {"README.md", "example.json"} <= set(bundle.manifest.files) and "@" not in sample(bundle, "onnx", "kotlin")


def test_the_example_of_every_graph_is_in_the_bundle(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    """So that a machine without a graph's engine prints it too."""
    for graph in bundle.manifest.targets:
        assert COMMANDS["example"]([str(bundle.folder), "--graph", graph]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["graph"] == graph and len(printed["steps"]) == 3 and printed["chat"]["tokens"]
    with refused("unknown_graph", ExportError):
        COMMANDS["example"]([str(bundle.folder), "--graph", "coreml"])
