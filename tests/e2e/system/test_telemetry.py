"""onnxruntime's wheels report about the machine by default: a device id and a queue of events under the user's cache.
Every program of ours, and every app that imports the runtime, switches that off."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moa_runtime.cli_main import own_program
from support.chat.programs import chat, verifier

ROOT = Path(__file__).parents[3]


def imports_onnxruntime(file: Path) -> bool:
    """Whether a module does, in a statement: bundles have programs that do, as texts."""
    text = file.read_text("utf-8")
    if "onnxruntime" not in text:  # parsing all of them takes seconds
        return False
    nodes = ast.walk(ast.parse(text))
    names = [
        name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    ]
    return any(name.split(".")[0] == "onnxruntime" for name in names)


#: A module of each of our packages that imports onnxruntime itself; the package's own does it for all of them.
MODULES = {
    file.relative_to(folder).parts[0]: ".".join(file.relative_to(folder).with_suffix("").parts)
    for folder in (ROOT / "apps", ROOT / "export", ROOT / "runtime", ROOT / "server_stub")
    for file in sorted(folder.glob("moa_*/**/*.py"))
    if imports_onnxruntime(file)
}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr


def files_of_onnxruntime(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if "onnxruntime" in path.name]


def empty_environment(home: Path, patch: pytest.MonkeyPatch) -> None:
    """Set an empty home, and remove all by which onnxruntime takes this for a test machine."""
    for name in set(os.environ) - {"PATH"}:
        patch.delenv(name)
    patch.setenv("HOME", str(home))


@pytest.fixture(scope="module", autouse=True)
def reports(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip if onnxruntime alone writes no files: older releases, and some builds, do not."""
    home = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as patch:
        empty_environment(home, patch)
        run(python("import onnxruntime"))
    if not files_of_onnxruntime(home):
        pytest.skip("this build of onnxruntime reports nothing")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    empty_environment(tmp_path, monkeypatch)
    return tmp_path


def test_the_files_are_there_if_a_user_wants_them(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    run(python("import moa_runtime.backends.onnx"))
    assert files_of_onnxruntime(home)


@pytest.mark.parametrize("modules", ["moa_runtime, onnxruntime", *MODULES.values()])
def test_a_module_that_imports_onnxruntime_switches_it_off(home: Path, modules: str) -> None:
    """And the runtime does for an app that imports it first."""
    run(python(f"import sys, {modules}; assert 'onnxruntime' in sys.modules"))
    assert not files_of_onnxruntime(home)


@pytest.mark.slow
def test_the_programs_switch_it_off(home, onnx_bundle, tiny_target, tiny_drafter, monkeypatch):
    with verifier(tiny_target, tiny_drafter) as server:
        monkeypatch.setenv("MOA_TOKEN", "secret")
        run(chat(onnx_bundle, server.url, "--once", "hello", "--max-new-tokens", "8", "--drafting", "device"))
    models = ("--model", str(tiny_target), "--drafter", str(tiny_drafter), "--offline-model", "none")
    run(own_program("moa_export.cli", *models, "--no-checks", "--out", str(home / "bundle")))
    run(own_program("moa_export.cli", "example", str(home / "bundle")))
    options = ("--contexts", "8", "--repeats", "2", "--no-answers")
    run(own_program("moa_bench.cli", "device", "--bundle", str(onnx_bundle), *options))
    assert not files_of_onnxruntime(home)


def test_these_tests_switch_it_off(home: Path) -> None:
    options = ("-q", "--collect-only", "-p", "no:cacheprovider")
    run([sys.executable, "-m", "pytest", *options, "tests/e2e/bench/test_device.py"])
    assert not files_of_onnxruntime(home)
