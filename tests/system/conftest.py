"""The tiny bundle, and verifiers of its target."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moa_runtime.bundle import Bundle
from server.running import Verifier, serving
from system.fuzz_world import toy_bundle
from system.hostile import CONTEXT


@pytest.fixture(scope="session")
def bundle(onnx_bundle: Path) -> Bundle:
    return Bundle.open(onnx_bundle)


@pytest.fixture(scope="session")
def engine(tiny_target: Path, tiny_drafter: Path):
    from moa_server.engine.transformers import TransformersEngine

    return TransformersEngine.load(str(tiny_target), tiny_drafter)


@pytest.fixture(scope="module", params=["device", "auto"])
def toys(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """What a chat needs of a bundle, and who is to draft; ``auto`` is the server, which is faster in this world."""
    bundle = toy_bundle(tmp_path_factory.mktemp("toys"))
    bundle.drafting = request.param
    return bundle


@pytest.fixture(scope="module")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a chat with a server of tests needs."""
    bundle = toy_bundle(tmp_path_factory.mktemp("small"))
    bundle.manifest.max_context = CONTEXT
    return bundle


@pytest.fixture
def verifier(engine) -> Iterator[Verifier]:
    from moa_server.settings import Settings

    with serving(engine, Settings(token="secret")) as running:
        yield running


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
