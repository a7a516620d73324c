"""The wheel: what ``pip install`` gives, away from this checkout."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NEEDED = (
    "moa_runtime/py.typed",
    "moa_runtime/manifest.schema.json",
    "moa_drafter/weights/moa/config.json",
    "moa_drafter/weights/moa/model.safetensors",
    "moa_bench/page/",
    "moa_chat/desktop/style.qss",
    "moa_chat/desktop/window.py",
    "moa_server/cli.py",
    "moa_export/cli.py",
    "moa_page/__init__.py",
)
#: Files of a built page, as they are named.
PAGE = ("index.html", "sw.js", "manifest.webmanifest", "assets/app-0a1b2c.js", "assets/fonts/a-3d4e5f.woff2")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", "node_modules")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, for building writes beside them."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("export", "runtime", "server_stub", "apps"):
        shutil.copytree(ROOT / name, source / name, ignore=LEFT_OUT)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    page = source / "apps" / "moa_page" / "static"
    for name in PAGE:  # whether the page is built here or not
        (page / name).parent.mkdir(parents=True, exist_ok=True)
        (page / name).write_text("stand-in")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", out, source]
    subprocess.run(list(map(str, command)), check=True, timeout=600, capture_output=True)
    (built,) = out.glob("moa_edge-*.whl")
    return built


def test_it_holds_what_the_programs_need_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"moa_page/static/{name}" for name in PAGE} <= set(names)
    assert not [part for part in NEEDED if not any(name.startswith(part) for name in names)]
    assert not [name for name in names if name.startswith(("tests", "conftest"))]


def test_its_programs_run_in_an_environment_of_their_own(wheel: Path, onnx_bundle: Path, tmp_path: Path) -> None:
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, timeout=300)
    python = place / "bin" / "python"
    find = [str(python), "-c", "import site; print(site.getsitepackages()[0])"]
    own = Path(subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip())
    install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check", str(wheel)]
    subprocess.run(install, check=True, timeout=300, capture_output=True)
    # What it depends on is there already; the wheel's own packages come first.
    (own / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        program = [str(place / "bin" / command[0]), *command[1:]]
        done = subprocess.run(program, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("python", "-c", "import moa_runtime; print(moa_runtime.__file__)").startswith(str(own))
    serves = "from moa_page import page_folder; from moa_server.web.setup import page_files\n"
    served = run("python", "-c", serves + "print(*page_files(page_folder()))").split()
    assert {"/", *(f"/{name}" for name in PAGE)} <= set(served)
    for program in ("moa-chat", "moa-serve", "moa-export", "moa-bench", "moa-train"):
        assert "usage" in run(program, "--help")
    assert json.loads(run("moa-export", "inspect", str(onnx_bundle), "--json"))["target"]
    planned = json.loads(run("moa-export", "--target", "onnx", "--out", "bundle", "--dry-run", "--json"))
    assert planned["dry_run"] is True
