"""The README of a bundle describes its graphs, and its Python samples run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from moa_export.bundle_commands import COMMANDS
from moa_runtime.bundle import Bundle


def sample(bundle: Bundle, graph: str, language: str) -> str:
    text = (bundle.folder / "README.md").read_text()
    section = text.split(f"## {graph}: ", 1)[1].split("\n## ", 1)[0]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found, section
    return found[1]


@pytest.mark.parametrize("graph", ["onnx", "executorch"])
def test_a_sample_in_python_prints_what_it_says(every_target: Bundle, graph: str) -> None:
    code = sample(every_target, graph, "python")
    token, logprob = code.rpartition("# ")[2].split()
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=every_target.folder, capture_output=True, text=True, check=True
    )
    printed = run.stdout.split()
    assert printed[0] == token and float(printed[1]) == pytest.approx(float(logprob), abs=0.01)


def test_every_graph_is_described(every_target: Bundle) -> None:
    text = (every_target.folder / "README.md").read_text()
    for name, entry in every_target.manifest.targets.items():
        assert f"## {name}: `{entry.file}`, {entry.bytes / 1e6:.1f} MB" in text
        for spec in (*entry.inputs, *entry.outputs):
            assert f"`{spec.name}` {spec.dtype} [{', '.join(map(str, spec.shape))}]" in text
    assert {"README.md", "example.json"} <= set(every_target.manifest.files)
    for graph, languages in {"coreml": ["swift", "python"], "executorch": ["kotlin", "swift"]}.items():
        assert all("@" not in sample(every_target, graph, language) for language in languages)


def test_the_example_of_every_graph_is_in_the_bundle(every_target: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    """So that a machine without a graph's engine prints it too."""
    folder = str(every_target.folder)
    for graph in every_target.manifest.targets:
        assert COMMANDS["example"]([folder, "--graph", graph]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["graph"] == graph and len(printed["steps"]) == 3 and printed["chat"]["tokens"]
