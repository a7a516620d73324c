"""A verifier and an endpoint of each module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chat.programs import Running, gateway, verifier


@pytest.fixture(scope="module")
def server(tiny_target: Path, tiny_drafter: Path) -> Iterator[Running]:
    with verifier(tiny_target, tiny_drafter) as running:
        yield running


@pytest.fixture(scope="module")
def endpoint(onnx_bundle: Path, server: Running) -> Iterator[Running]:
    with gateway(onnx_bundle, server.url) as running:
        yield running
