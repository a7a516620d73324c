"""The tiny target in the verifier's engine, loaded once for all server tests; what a verifier logs."""

from __future__ import annotations

import io
import logging

import pytest

from moa_server.logging import configure


@pytest.fixture(scope="session")
def transformers_engine(tiny_target, tiny_drafter):
    import torch

    from moa_server.engine.transformers import TransformersEngine

    torch.set_num_threads(1)  # threads that wait for each other on busy cores cost more than they bring
    return TransformersEngine.load(str(tiny_target), tiny_drafter)


@pytest.fixture(scope="session")
def engine(transformers_engine):
    """The engine of a test that names no other."""
    return transformers_engine


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
