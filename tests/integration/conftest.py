"""Toys for systems in memory, and the log of a verifier."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest

from moa_server.logging import configure
from support.system.fuzz_world import toy_bundle
from support.system.hostile import CONTEXT


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
def log():
    """``log(form, level)`` gives the stream that is logged to from then on."""
    root, stream = logging.getLogger(), io.StringIO()
    before, level = list(root.handlers), root.level

    def start(form: str = "json", level: str = "info") -> io.StringIO:
        configure(form, level, stream)
        return stream

    yield start
    configure()
    root.handlers[:] = before
    root.setLevel(level)
