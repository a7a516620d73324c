"""Settings for every test, a browser, an outer address, and the tiny target, drafter and bundles, each made once."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

# Tiny matrices gain nothing from threads, and two test machines' cores are soon oversubscribed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from moa_bench.web.browser import BROWSERS
from tiny import make_tiny_bundle, make_tiny_drafter, make_tiny_target

if TYPE_CHECKING:
    from moa_drafter.model import MoADrafter
    from moa_drafter.target import Target
    from moa_export.targets.web_engine import WebEngine
    from moa_runtime.bundle import Bundle


@pytest.fixture(scope="session")
def browser() -> str:
    """The command of a Chromium."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        missing = f"no browser: none of {', '.join(BROWSERS)} is installed"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


@pytest.fixture(scope="session")
def outer_address() -> str:
    """One of this machine's addresses that other machines reach: to browsers no secure context over plain http."""
    from moa_server.invitation import hosts_of

    found = [host for host in hosts_of("0.0.0.0") if host[0].isdigit()]
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]


@pytest.fixture(scope="session")
def web_engine_here() -> WebEngine:
    """onnxruntime-web in Node, which `make test` installs."""
    from moa_export.targets.base import NotRun
    from moa_export.targets.web_engine import find_engine

    found = find_engine(npm=bool(os.environ.get("CI")))
    if isinstance(found, NotRun):
        if os.environ.get("CI"):
            pytest.fail(found.reason)
        pytest.skip(found.reason)
    return found


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_drafter(tiny_target: Path) -> Path:
    return make_tiny_drafter(tiny_target, tiny_target.parent / "drafter")


@pytest.fixture(scope="session")
def target(tiny_target: Path) -> Target:
    """The tiny target, loaded."""
    from moa_drafter.target import load_target

    return load_target(str(tiny_target))


@pytest.fixture(scope="session")
def drafter(tiny_drafter: Path, target: Target) -> MoADrafter:
    """The tiny drafter, bound to the tiny target. Every test has the same one: change a deep copy."""
    from moa_drafter.checkpoint import load_bound

    return load_bound(tiny_drafter, target)


@pytest.fixture(scope="session")
def onnx_bundle(tiny_target: Path, tiny_drafter: Path) -> Path:
    """A bundle with one graph, which any process can run. Offline its drafter writes, sure or not: it knows nothing."""
    from moa_runtime.bundle import read_manifest, write_manifest
    from moa_runtime.manners import Manners

    bundle = make_tiny_bundle(tiny_target, tiny_drafter, "none")
    write_manifest(bundle, replace(read_manifest(bundle), manners=Manners(0.0, repeated=1000, longest=1000)))
    return bundle


@pytest.fixture(scope="session")
def writing_bundle(tiny_target: Path, tiny_drafter: Path) -> Path:
    """The same with a writer, which is the target itself in 8 bits."""
    return make_tiny_bundle(tiny_target, tiny_drafter, "target")


@pytest.fixture(scope="session")
def web_bundle(tiny_target: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For onnxruntime-web, with a writer in 8 bits. Nobody compared its graphs."""
    from moa_export.pipeline import ExportSettings, export_bundle
    from moa_export.progress import Progress
    from moa_export.writer import WriterSettings

    out = tmp_path_factory.mktemp("web") / "bundle"
    settings = ExportSettings(
        ("web",), tiny_drafter, model=str(tiny_target), checked=False, writer=WriterSettings("target", bits=8, web=True)
    )
    export_bundle(out, settings, Progress(sys.stderr, quiet=True))
    return out


@pytest.fixture(scope="session")
def every_target(tiny_target: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with a graph for every backend."""
    from moa_export.pipeline import ExportSettings, export_bundle
    from moa_export.progress import Progress
    from moa_export.targets import TARGETS
    from moa_export.targets.base import TargetOptions
    from moa_export.writer import WriterSettings
    from moa_runtime.bundle import Bundle

    out = tmp_path_factory.mktemp("every") / "bundle"
    settings = ExportSettings(
        tuple(TARGETS),
        tiny_drafter,
        model=str(tiny_target),
        options=TargetOptions(context=256),
        questions=["Name three colours.", "Why is the sky blue?"],
        writer=WriterSettings("none"),
    )
    export_bundle(out, settings, Progress(sys.stderr, quiet=True))
    return Bundle.open(out)
