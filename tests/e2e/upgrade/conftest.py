"""The version of commit 9bb5272 in an environment of its own, and what its programs leave on a disk."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from moa_runtime.cli_main import own_program

#: The last version before modules, classes and options got new names.
EARLIER = "9bb5272"
ROOT = Path(__file__).parents[3]
TOKEN = "secret"
_SOURCES = ("export", "runtime", "server_stub", "apps", "tests/tiny.py", "pyproject.toml", "README.md", "LICENSE")

#: Run by the earlier version: its models, its bundle, its settings.
_MAKE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from tiny import make_tiny_bundle, make_tiny_drafter, make_tiny_target
from moa_chat.desktop.profile import Profile, Settings

folder = Path(sys.argv[1])
make_tiny_target(folder / "target")
make_tiny_drafter(folder / "target", folder / "drafter")
make_tiny_bundle(folder / "bundle", folder / "target", folder / "drafter", "target")
settings = Settings(server="wss://example.org", bundle="b", max_new_tokens=77, temperature=0.5, top_p=0.9)
Profile(folder / "profile").save(settings)
(folder / "settings.json").write_text(json.dumps(asdict(settings)))
"""


@dataclass(frozen=True)
class Version:
    """Programs of one version.

    Attributes:
        python: the interpreter whose environment has them.
        paths: folders in which it also looks for modules.
    """

    python: Path
    paths: tuple[Path, ...] = ()

    def command(self, module: str, *arguments: object) -> list[str]:
        """The command line of a program by its module."""
        return [str(self.python), *own_program(module, *map(str, arguments))[1:]]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its programs, the verifier's token among them."""
        return {**os.environ, "MOA_TOKEN": TOKEN, "PYTHONPATH": os.pathsep.join(map(str, self.paths))}

    def run(self, command: list[str], *, stdin: str = "") -> str:
        """What the command prints. Its end has to be a good one."""
        ran = subprocess.run(command, input=stdin, capture_output=True, text=True, env=self.environment, timeout=240)
        assert ran.returncode == 0, ran.stderr[-2000:]
        return ran.stdout


@pytest.fixture(scope="session")
def now() -> Version:
    return Version(Path(sys.executable))


@pytest.fixture(scope="session")
def earlier(once) -> Version:
    """The earlier version, installed from this repository's history beside the packages that are installed here."""

    def make(folder: Path) -> None:
        sources = folder / "sources"
        archive = subprocess.run(["git", "archive", EARLIER, *_SOURCES], cwd=ROOT, capture_output=True)
        assert archive.returncode == 0, archive.stderr.decode()
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(sources, filter="data")
        venv.create(folder / "environment", with_pip=False)
        [packages] = (folder / "environment").glob("lib/python*/site-packages")
        # Their own .pth files are not read from here, so this version is not found twice.
        (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "environment/bin/python"), "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--no-index", "--no-build-isolation", str(sources)], check=True)

    known = subprocess.run(["git", "cat-file", "-e", f"{EARLIER}^{{commit}}"], cwd=ROOT, capture_output=True)
    if known.returncode:
        missing = f"this checkout has no commit {EARLIER}: fetch its history (git fetch --unshallow)"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    folder = once("earlier", make)
    return Version(folder / "environment/bin/python", (folder / "sources/tests",))


@pytest.fixture(scope="session")
def left(once, earlier: Version) -> Path:
    """Folder of what the earlier version left: ``target``, ``drafter``, ``bundle``, ``profile``, ``settings.json``."""

    def make(folder: Path) -> None:
        folder.mkdir()
        earlier.run([str(earlier.python), "-c", _MAKE, str(folder)])

    return once("left", make)


def ready(process: subprocess.Popen[str]) -> dict[str, object]:
    """The line by which a program says that it serves."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"it ended with {process.wait()}"
    return dict(json.loads(line))
