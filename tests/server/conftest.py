"""The tiny target and drafter, made once for all server tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny import make_tiny_drafter, make_tiny_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_drafter(tiny_target, tmp_path_factory) -> Path:
    return make_tiny_drafter(tiny_target, tmp_path_factory.mktemp("tiny") / "drafter")


@pytest.fixture(scope="session")
def transformers_engine(tiny_target, tiny_drafter):
    import torch

    from moa_server.transformers_engine import TransformersEngine

    torch.set_num_threads(1)  # threads that wait for each other on busy cores cost more than they bring
    return TransformersEngine.load(str(tiny_target), tiny_drafter)


@pytest.fixture(scope="session")
def engine(transformers_engine):
    """The engine of a test that names no other."""
    return transformers_engine
