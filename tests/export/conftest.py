from __future__ import annotations

from pathlib import Path

import pytest

import tiny


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tiny_drafter(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_tiny_drafter(tiny_target, tmp_path_factory.mktemp("drafter"))
