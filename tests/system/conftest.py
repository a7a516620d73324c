"""A tiny target with its bundle, and verifiers of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moa_runtime.bundle import Bundle
from server.running import Verifier, serving
from tiny import make_tiny_drafter, make_tiny_target


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds ``target``, ``drafter`` and ``bundle``."""
    from moa_export.pipeline import export_bundle
    from moa_export.recipe import Recipe

    root = tmp_path_factory.mktemp("system")
    make_tiny_target(root / "target")
    make_tiny_drafter(root / "target", root / "drafter")
    export_bundle(
        root / "bundle",
        model=str(root / "target"),
        drafter_folder=root / "drafter",
        recipe=Recipe(),
        texts=[("Name three colours.", "Red, yellow and blue.")],
    )
    return root


@pytest.fixture(scope="session")
def bundle(tiny_root: Path) -> Bundle:
    return Bundle.open(tiny_root / "bundle")


@pytest.fixture(scope="session")
def engine(tiny_root: Path):
    from moa_server.transformers_engine import TransformersEngine

    return TransformersEngine.load(str(tiny_root / "target"), tiny_root / "drafter")


@pytest.fixture
def verifier(engine) -> Iterator[Verifier]:
    from moa_server.settings import Settings

    with serving(engine, Settings(token="secret")) as running:
        yield running
