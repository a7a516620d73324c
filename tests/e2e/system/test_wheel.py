"""The wheel: what people install, away from this checkout."""

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

from moa_runtime.session.events import Sampling
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.offered_bundles import OfferedBundles
from moa_server.settings import Settings
from support.server.running import serving
from support.system.asking import QUESTION, TIMEOUT_S
from support.system.cutting import cutting

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
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=300)
    python = place / "bin" / "python"
    find = [str(python), "-c", "import site; print(site.getsitepackages()[0])"]
    own = Path(subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip())
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "-q", "--no-deps", "--no-compile", str(wheel)]
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


@pytest.mark.parametrize("installer", ["uv", pytest.param("pipx", marks=pytest.mark.slow)])  # pip takes minutes
def test_a_device_needs_an_installer_and_an_address(
    wheel: Path, installer: str, engine, onnx_bundle: Path, bundle, tmp_path: Path
) -> None:
    """In an empty home, without torch, over a link that is cut three times while the bundle comes."""
    names = {"UV_TOOL_DIR": "tools", "UV_TOOL_BIN_DIR": "bin", "PIPX_HOME": "tools", "PIPX_BIN_DIR": "bin"}
    places = {name: str(tmp_path / folder) for name, folder in {**names, "HOME": "home"}.items()}
    caches = {"UV_CACHE_DIR": str(Path.home() / ".cache" / "uv"), "PIP_CACHE_DIR": str(Path.home() / ".cache" / "pip")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MOA_", "PYTHON", "XDG_"))}
    environment = {**kept, **caches, **places}
    (tmp_path / "home").mkdir()
    install = {"uv": ("tool", "install", "--python", sys.executable), "pipx": ("install",)}[installer]
    command = [sys.executable, "-m", installer, *install, f"{wheel}[desktop]"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    installed = {path.name for path in (tmp_path / "tools").rglob("site-packages/*")}
    assert "moa_page" in installed and not installed & {"torch", "transformers", "onnx"}
    largest = max(entry.bytes for entry in bundle.manifest.files.values())
    with serving(engine, Settings(), bundles=OfferedBundles.of([onnx_bundle], engine.fingerprints)) as verifier:
        tokenizer = ChatTokenizer.from_bundle(bundle)
        prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
        own = tokenizer.decode(verifier.decode(prompt, 24, Sampling()))
        with cutting(verifier.port, largest // 5, times=3) as link:
            chat = [str(tmp_path / "bin" / "moa-chat"), "--server", f"ws://127.0.0.1:{link.port}", "--once", QUESTION]
            chat += ["--json", "--temperature", "0", "--max-new-tokens", "24"]
            done = subprocess.run(chat, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
            assert done.returncode == 0, done.stderr
            assert link.cuts == 3 and " MB" in done.stderr
    assert json.loads(done.stdout)["text"] == own
