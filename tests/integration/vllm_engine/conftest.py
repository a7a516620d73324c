"""vLLM, where it is installed: a tiny target with heads of the size that it takes, in a pool of few blocks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.tiny import make_tiny_bundle, make_tiny_drafter, make_tiny_target

#: Tokens of conversations; the pool has twice as many.
CONTEXT = 128

if TYPE_CHECKING:
    from moa_server.engine.engine import LocalEngine
    from moa_server.engine.vllm.engine import VllmEngine


@pytest.fixture(scope="session")
def vllm_here() -> None:
    """What it must find is set."""
    if importlib.util.find_spec("vllm") is None:
        missing = "vLLM is not installed: make vllm"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    from moa_server.engine.load import prepare_vllm

    prepare_vllm(1)


@pytest.fixture(scope="session")
def paged_target(vllm_here: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("paged") / "target", head_dim=32)


@pytest.fixture(scope="session")
def paged_drafter(paged_target: Path) -> Path:
    return make_tiny_drafter(paged_target, paged_target.parent / "drafter")


@pytest.fixture(scope="session")
def paged_bundle(paged_target: Path, paged_drafter: Path) -> Path:
    return make_tiny_bundle(paged_target.parent / "bundle", paged_target, paged_drafter, "none")


@pytest.fixture(scope="session")
def reference(paged_target: Path, paged_drafter: Path) -> LocalEngine:
    """What vLLM is compared with."""
    from moa_server.engine.torch_engine import load_torch_engine

    return load_torch_engine(str(paged_target), paged_drafter, max_context=CONTEXT)


@pytest.fixture(scope="session")
def vllm(paged_target: Path, paged_drafter: Path) -> Iterator[VllmEngine]:
    """Eight blocks of 32 tokens."""
    from moa_server.engine.vllm.engine import VllmEngine

    engine = VllmEngine.load(str(paged_target), paged_drafter, max_context=CONTEXT, cache_tokens=CONTEXT)
    assert engine.cache_use == (0, 2 * CONTEXT)
    yield engine
    engine.close()
